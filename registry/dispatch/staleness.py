"""Whether a measurement holds here: for the toolchain that is installed, and the sources as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.tables import Layer, Rule, Table


def stale_rule(table: Table, rule: Rule) -> str | None:
    """Why a row of the user's own tuning does not hold here: the `skip` of registry.tables.load_tables. Such rows are
    left out one by one; other layers are the business of lint."""
    if table.layer is not Layer.TUNED:
        return None
    return next((f"{why}; tune again" for _, why in stale_evidence(rule)), None)


def stale_evidence(rule: Rule) -> Iterator[tuple[str, str]]:
    """Each reason why a row's measurement may not hold here, with the code that lint gives it."""
    evidence = rule.evidence
    if evidence is None:
        return
    here = Target.named("cpu")
    measured = {name: getattr(evidence, name) for name in ("torch", "triton")}
    for why in other_versions(measured, {name: getattr(here, name) for name in measured}):
        yield "stale-evidence", why
    sources = {**({rule.use[0].variant: evidence.source} if evidence.source else {}), **evidence.sources}
    for name, source in sources.items():
        changed = stale_code(name, source, catalog.get().variants)
        if changed:
            yield "changed-source", changed


def other_versions(measured: Mapping[str, str | None], here: Mapping[str, str | None]) -> Iterator[str]:
    """Versions with which something was measured that are others here; those not known of either do not count."""
    for name, now in here.items():
        was = measured.get(name)
        if was and now and _public(was) != _public(now):
            yield f"measured with {name} {was}, here is {now}"


def _public(version: str) -> str:
    """Without the build tag: 2.11.0+cu130 measures the same as 2.11.0."""
    return version.partition("+")[0]


def stale_code(name: str, fingerprint: str, variants: Mapping[str, Variant]) -> str | None:
    """Why a measurement of a variant with that fingerprint does not hold for the variants at hand."""
    if name not in variants:
        return f"{name} is not installed"
    if fingerprint_of(variants[name]) != fingerprint:
        return f"the source of {name} has changed since it was measured"
    return None
