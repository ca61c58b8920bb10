"""`kreg list`: every variant, what it claims and how it is built."""

from __future__ import annotations

import click

from registry.cli import OK
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option
from registry.cli._problems import target_named
from registry.contract import describe
from registry.contract.capability import arch_matches
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument
from registry.ops.known import all_ops


@click.command("list", help="Every variant: what it claims and how it is built.")
@click.option("--op", metavar="OP", help="Only variants of this op.")
@click.option(
    "--arch", metavar="ARCH", help='Only variants for this target: "sm90", "cpu", or a device such as "H100".'
)
@plugin_option
@json_option
def command(op: str | None, arch: str | None, plugins: tuple[str, ...], as_json: bool) -> int:
    from registry.tuning.extra import load_plugins

    load_plugins(plugins)
    if op is not None and op not in all_ops():
        raise InvalidArgument("--op", repr(op), ", ".join(sorted(all_ops())))
    wanted = target_named(arch, "--arch").arch if arch is not None else None
    found = [
        variant
        for variant in sorted(catalog.get().variants.values(), key=lambda v: (v.op, v.name))
        if op in (None, variant.op) and (wanted is None or arch_matches(variant.requires.arch, wanted))
    ]
    failures = catalog.get().failures
    if as_json:
        print_json([describe.variant_data(variant) for variant in found])
        return OK
    page = Page()
    current = None
    for variant in found:
        if variant.op != current:
            if current is not None:
                page.gap()
            current = variant.op
            summary = all_ops()[current].summary if current in all_ops() else "an op that is not known here"
            page.title(f"{current}: {summary}" if summary else current)
        _print_variant(page, variant)
    page.gap()
    page.line(f"{len(found)} variants" + (f", {len(failures)} plugins failed: see kreg doctor" if failures else ""))
    return OK


def _print_variant(page: Page, variant: Variant) -> None:
    requires = variant.requires
    page.row(variant.name, variant.summary)
    claims = [
        ("on", ", ".join(requires.arch)),
        ("dtypes", describe.dtypes_text(requires.dtypes)),
        ("sizes", ", ".join(describe.sizes(requires))),
        ("features", ", ".join(describe.features(requires))),
        ("memory", ", ".join(describe.memory(requires))),
        ("limits", ", ".join(describe.limits(requires))),
        ("design", ", ".join(describe.design_traits(variant.design))),
        ("from", variant.origin),
    ]
    page.rows([(label, text) for label, text in claims if text], indent=6)
