"""`kreg schema`: the JSON Schemas of dispatch tables and of errata, for editors and checkers."""

from __future__ import annotations

from pathlib import Path

import click

from registry.cli import FINDING, OK
from registry.cli._page import answer_stream, json_option, print_json


@click.command(help="Print the JSON Schema of dispatch tables, or write or check the files that editors read.")
@click.argument("kind", type=click.Choice(["table", "errata"]), default="table")
@click.option("--write", "write_to", metavar="FOLDER", help="Write both schemas there, such as to dispatch_tables.")
@click.option("--check", "check_in", metavar="FOLDER", help="Exit 1 if the schemas there are not current.")
@json_option
def command(kind: str, write_to: str | None, check_in: str | None, as_json: bool) -> int:
    from registry.tables.schema import SCHEMAS, schema_text, write_schema

    if write_to is not None and check_in is not None:
        raise click.UsageError("--check: got it together with --write; allowed: one of them")
    folder = write_to if write_to is not None else check_in
    if folder is None:
        click.echo(schema_text(SCHEMAS[f"{kind}.schema.json"]), file=answer_stream(), nl=False)
        return OK
    if not Path(folder).is_dir():
        raise click.UsageError(f"FOLDER: got {folder!r}; allowed: a folder that exists")
    stale = [name for name, struct in SCHEMAS.items() if not _is_current(Path(folder) / name, schema_text(struct))]
    if write_to is not None:
        written = [str(path) for path in write_schema(Path(folder))]
        print_json({"written": written}) if as_json else click.echo("\n".join(f"wrote {path}" for path in written))
        return OK
    if as_json:
        print_json({"stale": stale})
    else:
        lines = [f"{Path(folder) / name} is not current: kreg schema --write {folder}" for name in stale]
        click.echo("\n".join(lines or ["schemas are current"]))
    return FINDING if stale else OK


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text
