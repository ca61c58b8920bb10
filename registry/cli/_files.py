"""Files as commands take them: none may overwrite those that it reads or adds to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)
_READ_BY_TUNE = ("out", "also", "learn", "timelines", "shapes", "recorded")


def check_tune(options: Mapping[str, Any]) -> None:
    """Raise for files that `kreg tune` cannot do without, and for those that it would destroy."""
    from registry.tables.files import beside
    from registry.tuning.journal import holds_other

    out, table = options["out"], options["table_path"]
    if options["fit_only"] and out is None:
        raise click.UsageError("--fit-only needs --out FILE, the raw results to fit")
    if options["also"] and out is None:
        raise click.UsageError("--also needs --out FILE, the raw results that the others join")
    if options["fit_only"] and not out.is_file():
        raise click.UsageError(f"--out {out} does not exist, and --fit-only measures nothing")
    if out is not None and any(out.resolve() == other.resolve() for other in options["also"]):
        raise click.UsageError(f"--also {out} is the file of --out: its shapes would count twice")
    for option, word in (("--keep", "keep"), ("--keep-trees", "keep_trees")):
        if options[word] and (table is None or not table.is_file()):
            raise click.UsageError(f"{option} needs --table FILE, a table that is there")
    if out is not None and holds_other(out):
        raise click.UsageError(
            f"--out: got {out}, which holds no raw results; allowed: a new file, or one of kreg tune's"
        )
    if table is not None:
        for name in _READ_BY_TUNE:
            spare("--table", table, f"--{name}", options[name])
            spare("--table", beside(table), f"--{name}", options[name], f"{table}, whose measured shapes go to ")


def spare(option: str, written: Path, source: str, read: Path | Sequence[Path] | None, how: str = "") -> None:
    """Raise where what an option writes is a file that another one reads: what was measured would be lost."""
    for path in [read] if isinstance(read, Path) else read or ():
        if path.resolve() == written.resolve():
            raise click.UsageError(f"{option}: got {how}{written}, a file of {source}; allowed: another one")
