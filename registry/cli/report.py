"""`kreg report`: one page from raw results that opens anywhere, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from registry.cli import FINDING, OK
from registry.cli._files import spare
from registry.cli._page import Page
from registry.cli._plugins import plugin_option

if TYPE_CHECKING:
    from registry.report.sources import Sources

PATH = click.Path(path_type=Path)


@click.command(
    "report",
    help="Draw one self-contained page from RESULTS: files of raw results, or folders that hold some. "
    "Without any, from your own tuning. What is damaged is passed over, named and counted.",
)
@click.argument("results", nargs=-1, type=PATH)
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), default="report.html", show_default=True)
@click.option("--against", multiple=True, type=PATH, metavar="OLD", help="Older results: what got slower since?")
@plugin_option
@click.option(
    "--pictures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Also the charts as PNG files.",
)
@click.option("--title", default="Measured kernels", show_default=True)
@click.option("--fail-if-slower", is_flag=True, help="With --against: exit 1 where something got slower beyond noise.")
def command(
    results: tuple[Path, ...],
    out: Path,
    against: tuple[Path, ...],
    plugins: tuple[str, ...],
    title: str,
    pictures: Path | None,
    fail_if_slower: bool,
) -> int:
    from registry.disk import write_atomic
    from registry.dispatch.in_force import cache_folder
    from registry.report.against import compare
    from registry.report.page import MOST_BYTES, page
    from registry.report.sources import read
    from registry.tuning.extra import load_plugins

    if fail_if_slower and not against:
        raise click.UsageError("--fail-if-slower needs --against OLD, the results to compare with")
    load_plugins(plugins)
    paths = results or (cache_folder() / "runs",)
    if not results and not paths[0].is_dir():
        raise click.UsageError(
            "RESULTS: got none, and you have not tuned yet; allowed: files of `kreg tune`, or folders"
        )
    for name, given in (("RESULTS", paths), ("--against", against)):
        spare("--out", out, name, _inputs(given, out))
    found = read(paths)
    old = read(against, "--against") if against else None
    shown = Page()
    for note in (*found.passed_over, *(old.passed_over if old else ())):
        shown.line(f"passed over: {note}", style="yellow")
    if not (found.runs or found.calls):
        shown.line("nothing to show: no file holds a measurement")
        return FINDING
    change = compare(found.runs, old.runs) if old is not None else None
    if fail_if_slower and change is not None and not any(change[name] for name in ("slower", "faster", "same")):
        raise click.UsageError(
            f"--against: got {', '.join(map(str, against))}, which measured nothing that RESULTS did; allowed with "
            "--fail-if-slower: results of the same shapes and variants, in the same mode"
        )
    text = page(found, old, title)
    write_atomic(out, text)
    if pictures is not None:
        _draw(found, pictures)
    size = len(text.encode())
    shapes = sum(bool(case.timed) for run in found.runs.values() for case in run.cases.values())
    shown.line(f"{out}: {len(found.runs)} sweeps, {shapes} shapes, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        shown.line(f"larger than {MOST_BYTES / 1e6:.0f} MB: give fewer files for a page that opens on a phone")
    if change is not None:
        _show(shown, change)
    return FINDING if fail_if_slower and change is not None and change["slower"] else OK


def _inputs(paths: tuple[Path, ...], out: Path) -> list[Path]:
    """What of these is read that the page could take the place of: of a folder, any file of results in it."""
    within = [path for path in paths if path.is_dir() and out.resolve().is_relative_to(path.resolve())]
    return [*paths, *([out] if within and out.suffix in (".json", ".jsonl") else [])]


def _draw(found: Sources, folder: Path) -> None:
    from registry.disk import make_folder
    from registry.report.pictures import pictures

    make_folder(folder.absolute())
    for name, data in pictures(found).items():
        (folder / name).write_bytes(data)


def _show(shown: Page, change: Mapping[str, Any]) -> None:
    shown.line(
        f"{change['slower']} slower, {change['faster']} faster, {change['same']} the same within noise; "
        f"{change['only_new']} only in the new results, {change['only_old']} only in the old"
    )
    for line in change["machines"]:
        shown.line(f"measured with another {line}", style="yellow", indent=2)
    for row in [row for row in change["rows"] if row["change"] > 0][:10]:
        before, now = row["ms"]
        shown.line(f"{100 * row['change']:+.1f}%  {row['op']} {row['shape']}  {row['variant']}", indent=2)
        shown.line(f"{before:.4g} ms before, {now:.4g} now; noise {100 * row['noise']:.1f}%", indent=10)
