"""Whether a measurement holds here: for the toolchain that is installed, and the sources as they are now."""

from __future__ import annotations

from collections.abc import Mapping

from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import source_hash
from registry.tables import Layer, Rule, Table


def stale_rule(table: Table, rule: Rule) -> str | None:
    """Why a row of the user's own tuning does not hold here: the `skip` of registry.tables.load_tables. Such rows are
    left out one by one; other layers are the business of lint."""
    evidence = rule.evidence
    if table.layer is not Layer.TUNED or evidence is None:
        return None
    installed = Target.named("cpu")
    for name in ("torch", "triton"):
        measured, here = getattr(evidence, name, None), getattr(installed, name)
        if measured and here and measured.split("+")[0] != here:
            return f"measured with {name} {measured}, installed is {here}; tune again"
    if evidence.source is None:
        return None
    return stale_source(rule.use[0].variant, evidence.source, catalog.get().variants)


def stale_source(name: str, measured: str, variants: Mapping[str, Variant]) -> str | None:
    """Why a measurement of a variant with that source hash does not hold for the variants at hand."""
    if name not in variants:
        return f"{name} is not installed"
    if source_hash(variants[name]) != measured:
        return f"the source of {name} has changed since it was measured; tune again"
    return None
