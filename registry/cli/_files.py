"""Files as commands take them: none may overwrite those that it reads or adds to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from registry.tables.model import Table

FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)
_READ_BY_TUNE = ("out", "also", "learn", "timelines", "shapes", "recorded")


def check_tune(op: str, options: Mapping[str, Any]) -> None:
    """Raise for files that `kreg tune` cannot do without, for those that it would destroy, and for a table that could
    not be written, or read to keep what it holds: before anything is measured."""
    from registry.disk import no_folder
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
    table_to_keep(op, options)
    for option in ("learn", "timelines"):
        if options[option] and not options["guided"]:
            raise click.UsageError(f"--{option}: got {options[option][0]}, which only --guided reads: add --guided")
    if out is not None and holds_other(out):
        raise click.UsageError(
            f"--out: got {out}, which holds no raw results; allowed: a new file, or one of kreg tune's"
        )
    if table is not None:
        if why := no_folder(table.absolute().parent):
            raise click.UsageError(
                f"--table: got {table}, but {why}; allowed: a file in a folder that can be written to"
            )
        for name in _READ_BY_TUNE:
            spare("--table", table, f"--{name}", options[name])
            spare("--table", beside(table), f"--{name}", options[name], f"{table}, whose measured shapes go to ")


def table_to_keep(op: str, options: Mapping[str, Any]) -> Table | None:
    """The table that --keep or --keep-trees builds upon; None without them. Raises where --table holds none of this
    op: it would be replaced, with all that was to be kept."""
    if not (options["keep"] or options["keep_trees"]):
        return None
    from registry.tuning.lint import load_files

    path = options["table_path"]
    found = load_files([path])
    if found.broken:
        raise click.UsageError(f"--table: {found.broken[0]}; allowed with --keep and --keep-trees: a table of {op}")
    if [table.op for table in found.tables] != [op]:
        held = f"a table of {found.tables[0].op}" if found.tables else "which holds no table"
        raise click.UsageError(f"--table: got {path}, {held}; allowed with --keep and --keep-trees: one of {op}")
    return found.tables[0]


def check_profile(options: Mapping[str, Any], out: Path) -> None:
    """Raise for options of `kreg profile` that would do nothing, and for files that it would destroy."""
    recorded = options["recorded"]
    for option, name in (("--figures", "collected"), ("--svg", "svg"), ("--keep", "keep")):
        if options[name] is not None and options["plan_only"]:
            raise click.UsageError(f"{option} needs a recording: leave out --plan-only")
    for option, given in (("--keep", options["keep"]), ("--plan-only", options["plan_only"])):
        if given and recorded is not None:
            raise click.UsageError(f"{option}: got it together with --from {recorded}; allowed: one of them")
    written = [("-o", out, "")]
    if not options["plan_only"]:
        written.append(("-o", trace_beside(out), f"{out}, whose trace goes to "))
    written += [(f"--{name}", options[name], "") for name in ("svg", "keep") if options[name] is not None]
    written += [("--figures", options["collected"], "")] if options["collected"] is not None else []
    for place, (option, path, how) in enumerate(written):
        spare(option, path, "--from", recorded, how)
        for other, earlier, _ in written[:place]:
            spare(option, path, other, earlier, how)


def trace_beside(out: Path) -> Path:
    """Where the trace of a page goes, for ui.perfetto.dev."""
    return out.with_suffix(".perfetto.json")


def spare(option: str, written: Path, source: str, read: Path | Sequence[Path] | None, how: str = "") -> None:
    """Raise where what an option writes is a file that another one reads, or writes: one of the two would be lost."""
    for path in [read] if isinstance(read, Path) else read or ():
        if path.resolve() == written.resolve():
            raise click.UsageError(f"{option}: got {how}{written}, a file of {source}; allowed: another one")
