"""`kreg doctor`: versions, devices, plugins, tables, and everything that is wrong with them."""

from __future__ import annotations

from typing import Any

import click

from registry.cli import FINDING, OK
from registry.cli._main import own_commands
from registry.cli._page import Page, json_option, print_json


@click.command(help="Versions, devices, plugins, tables, and what is wrong with them. Exits 1 if anything is.")
@json_option
def command(as_json: bool) -> int:
    from registry.doctor import ailments, examine
    from registry.notices import shown_by_caller

    with shown_by_caller():
        report = examine(own_commands())
    wrong = ailments(report)
    if as_json:
        print_json(report | {"wrong": wrong})
    else:
        _print(report, wrong)
    return FINDING if wrong else OK


def _print(report: dict[str, Any], wrong: list[str]) -> None:
    from registry.tables.lint import LintFinding
    from registry.tuning.lint import together

    page = Page()
    page.title("versions")
    page.rows(list(report["versions"].items()))
    _section(page, "devices", [_device(device) for device in report["devices"]], "no GPU: the CPU is what there is")
    for stranger in report["installation"]:
        page.row("OVERWRITTEN", stranger, label_style="red")
    plugins = report["plugins"]
    _section(
        page, f"plugins: {len(plugins['loaded'])} loaded, {plugins['variants']} variants", plugins["loaded"], "none"
    )
    for failure in plugins["failed"]:
        page.row("FAILED", f"{failure['plugin']}: {failure['error']}", label_style="red")
    for one in plugins["never_run"]:
        page.row("never runs", f"{one['variant']} of {one['origin']}: {one['why']}", label_style="yellow")
    tables = report["tables"]
    in_force = [
        f"{t['file']} ({t['layer']}: {t['op']} on {t['device'] or t['arch']}, {t['rules']} rules)"
        for t in tables["in_force"]
    ]
    _section(page, f"tables in force, errata: {tables['errata']}", in_force, "none")
    for error in tables["broken"]:
        page.row("BROKEN", error, label_style="red")
    for skipped in tables["skipped"]:
        page.row("left out", skipped, label_style="yellow")
    for finding, more in together(LintFinding(**finding) for finding in tables["findings"]):
        text = f"{finding.file}:{finding.line}: {finding.message}" + (f" (and {more} more rows)" if more else "")
        page.row(finding.severity, text, label_style="red" if finding.severity == "error" else "yellow")
    quarantined = [
        f"{entry['variant']} for {entry['problem_class']}: {entry['error']}" for entry in report["quarantined"]
    ]
    _section(page, "quarantined in this process", quarantined, "none")
    _section(page, "notices", [f"{text} (met {count} times)" for text, count in report["notices"].items()], "none")
    environment = [f"{name}={value}" for name, value in report["environment"].items()]
    _section(page, "environment", environment, "no REGISTRY_* variable is set")
    page.gap()
    page.title("folders")
    page.rows(list(report["folders"].items()))
    for why in report["unusable"]:
        page.row("no cache", why, label_style="yellow")
    page.gap()
    if wrong:
        page.line(f"wrong: {len(wrong)}", style="bold red")
    else:
        warned = sum(map(len, (tables["findings"], tables["skipped"], plugins["never_run"], report["unusable"])))
        page.line("nothing is broken" + (f", {warned} warnings" if warned else ""), style="bold green")


def _section(page: Page, title: str, lines: list[str], empty: str) -> None:
    page.gap()
    page.title(title)
    for line in lines or [empty]:
        page.line(line, indent=2)


def _device(device: dict[str, Any]) -> str:
    shared = device["shared_memory"] // 1024
    return f"{device['name']} ({device['arch']}): {device['sm_count']} SMs, {shared} KiB of shared memory per block"
