"""What earlier configs of a variant tell of it: what there is, until its first config of today was timed enough."""

from __future__ import annotations

import pytest

from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.tuning.journal import CaseResults, Entry
from registry.tuning.taking_part import Settings, asked_of, firsts_of

OLD, NEW = {"TILE": 32}, {"TILE": 64}


def entry(variant, config, ms=None, **more):
    samples = {0: {"ms": ms}} if ms else {}
    return Entry(variant, config, samples=samples, failure=more.get("failure"), fingerprint=more.get("source", ""))


def asked(entries, *, told, settled, first=NEW):
    case = CaseResults("attention", "", {}, {}, 1.0, {str(place): one for place, one in enumerate(entries)})
    firsts = firsts_of(list(case.timed.values()), {"test.ours": first, "theirs": {}})
    sources = {"test.ours": fingerprint_of(catalog.get().variants["test.ours"])}
    could, here = asked_of(case, firsts, told, Settings(), sources, settled)
    return [(one.variant, one.config) for one in could if one.timed], here


@pytest.mark.parametrize("told", [(), ("test.ours",)], ids=["no trees", "trees"])
@pytest.mark.parametrize("earlier", [False, True], ids=["its source", "an earlier source"])
def test_a_variant_tells_nothing_where_its_first_config_of_today_was_not_timed(declare, told, earlier):
    declare("test.ours", configs=[NEW, OLD], dtypes=("bfloat16",))
    source = "0" * 12 if earlier else fingerprint_of(catalog.get().variants["test.ours"])
    entries = [entry("test.ours", OLD, 1.0, source=source), entry("theirs", {}, 1.1)]
    assert ("test.ours", OLD) in asked(entries, told=told, settled=())[0]
    assert asked(entries, told=told, settled=("test.ours",))[0] == [("theirs", {})]
    both = [*entries, entry("test.ours", NEW, 1.2, source=fingerprint_of(catalog.get().variants["test.ours"]))]
    assert {name for name, _ in asked(both, told=told, settled=("test.ours",))[0]} == {"test.ours", "theirs"}
