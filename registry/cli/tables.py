"""`kreg tables`: what is wrong with dispatch tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from registry.cli import FINDING, OK
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option


@click.group("tables", help="Dispatch tables: what ranks the variants.", no_args_is_help=True)
def command() -> None: ...


@command.command(
    help="Find what is wrong with the tables in force, or with these FILES and folders, and say where each rule was "
    "measured. Exits 1 on an error."
)
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option("--strict", is_flag=True, help="Exit 1 on a warning, too.")
@plugin_option
@json_option
def lint(files: tuple[str, ...], strict: bool, plugins: tuple[str, ...], as_json: bool) -> int:
    from registry.dispatch import in_force
    from registry.dispatch.catalog import catalog
    from registry.notices import shown_by_caller
    from registry.tuning.extra import load_plugins
    from registry.tuning.lint import coverage, lint_tables, load_files, results_folder, together, unproven

    catalog.get()  # no finding of ours names a plugin that fails, so that may be logged
    load_plugins(plugins)
    with shown_by_caller():
        tables = load_files([Path(file) for file in files]) if files else in_force.tables()
    covered, past = coverage(tables)
    findings = lint_tables(tables) + past
    folder = results_folder()
    if folder is not None:
        findings += unproven(tables, folder)
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json({"findings": list(map(asdict, findings)), "coverage": list(map(asdict, covered))})
    else:
        page = Page()
        for finding, more in together(findings):
            text = str(finding) + (f" (and {more} more rows)" if more else "")
            page.line(text, style="red" if finding.severity == "error" else "yellow")
        for rule in covered:
            page.line(str(rule))
        page.line(f"{errors} errors, {len(findings) - errors} warnings")
    return FINDING if errors or (strict and findings) else OK
