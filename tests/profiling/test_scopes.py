"""Marks for the profiler cost nothing unless a recording is asked for, and say what they mark when one is."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from bare import without_scopes
from compiled import reading, resources
from kept_builds import hashed

from registry import Target
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case

TARGET = Target.named("H200")
MARKED = {
    "gluon_fa3": ("gluon_fa3", "b=2,hq=8,s=1024,d=64,causal"),
    "gluon_fa3_backward": ("gluon_fa3", "b=2,hq=8,s=1024,d=128,causal"),
    "gluon_fa3_varlen": ("gluon_fa3", "b=2,hq=8,sq=1024,d=128,causal"),
    "gluon_matmul_ws": ("gluon_matmul_ws", "m=1024,n=1024,k=1024"),
}
"""By variant: the package that holds it, and a shape."""


@reading
def machine_code(found):
    """How many products, and a hash of the instructions alone: no addresses, no debug names."""
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", found.sass)
    return ["\n".join(code).count("HGMMA"), hashed(*code)]


@pytest.mark.slow(4)
@pytest.mark.parametrize("name", MARKED)
def test_a_plain_build_is_the_one_without_marks(name, tmp_path):
    variant = catalog.get().variants[name]
    package, shape = MARKED[name]
    problem = Case.parse(variant.op, shape).problem(TARGET)
    config = variant.legal_configs(problem)[0]
    marked = variant.builds(problem, config)
    with without_scopes(f"registry.plugins.{package}", tmp_path) as (bare, marks):
        assert marks > 10
        (variant_without,) = [one for one in bare.registry_variants() if one.name == name]
        plain = variant_without.builds(problem, config)
        assert all(build.kernel.fn.__module__.startswith("bare_") for build in plain)
        code = [machine_code(resources(build)) for build in plain]
    assert code == [machine_code(resources(build)) for build in marked]
    assert any(products for products, _ in code), "the kernel with the marks is among them"


def test_marks_become_records_in_an_instrumented_build(monkeypatch):
    language = pytest.importorskip("triton.profiler.language")
    from triton.profiler.flags import flags

    from registry.toolbox import scopes

    seen = []
    monkeypatch.setattr(language, "record", lambda start, name, semantic: seen.append((start, name)))
    scopes._record(True, "wait K", None)
    assert seen == []
    monkeypatch.setattr(flags, "instrumentation_on", True)
    scopes._record(True, "wait K", None)
    scopes._record(False, "wait K", None)
    assert seen == [(True, "wait K"), (False, "wait K")]
