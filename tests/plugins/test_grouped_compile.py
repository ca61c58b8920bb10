"""The grouped products compiled for GPUs that are not here: what they take from the machine, and how they load."""

from __future__ import annotations

import pytest

from registry import Target
from registry.ops.grouped_mm.problem import GroupedMmProblem

pytest.importorskip("triton")

from compiled import resources

from registry.plugins import gluon_grouped, triton_grouped

WITH_NEWEST_TRITON = r"."
PLAIN, SPECIALIZED = (module.registry_variants()[0] for module in (triton_grouped, gluon_grouped))
GPUS = {"sm80": "A100", "sm89": "RTX 4090", "sm90": "H100", "sm100": "B200"}
MATRIX_UNITS = ("HGMMA", "QGMMA", "HMMA", "QMMA", "tcgen05")
SWIGLU = {"activation": "silu", "gated": True}


def compiled(variant, arch="sm90", **sizes):
    """The first config's kernel for groups of 1024 rows, after the checks that hold for every one."""
    asked = {"e": 8, "m": 8192, "n": 4096, "k": 4096} | sizes
    p = GroupedMmProblem.of_shape(Target.named(GPUS[arch]), **asked)
    assert not variant.reasons(p)
    config = variant.legal_configs(p)[0]
    (build,) = variant.builds(p, config)
    found = resources(build, p.target)
    assert found.spills == 0
    assert found.shared <= variant.requires.shared_memory(p, config) <= p.target.shared_memory
    assert any(found.counts[unit] for unit in MATRIX_UNITS)
    return found


@pytest.mark.parametrize(
    "sizes",
    [{}, {"m": 64}, SWIGLU, {"form": "inner", "layout": "tn", "m": 4096, "k": 8192}, {"form": "batch", "m": 1024}],
    ids=["rows", "few", "gated", "inner", "batch"],
)
def test_plain_triton_on_hopper(sizes):
    found = compiled(PLAIN, **sizes)
    assert found.counts["TMA load"] and bool(found.counts["HGMMA"]) == (sizes.get("m") != 64)
    assert bool(found.counts["TMA store"]) == ("form" in sizes)  # groups of rows end inside of boxes


@pytest.mark.parametrize("sizes", [{}, {"form": "inner", "layout": "tn", "m": 4096, "k": 8192}], ids=["rows", "inner"])
def test_plain_triton_on_ampere(sizes):
    assert compiled(PLAIN, "sm80", **sizes).counts["cp.async"]


def test_plain_triton_of_gathered_rows():
    compiled(PLAIN, gather=True)
    compiled(PLAIN, "sm89", gather=True, **SWIGLU)


@pytest.mark.parametrize("sizes", [{}, SWIGLU, {"e": 300, "layout": "nn"}], ids=["rows", "gated", "many"])
def test_specialized(sizes):
    found = compiled(SPECIALIZED, **sizes)
    assert found.counts["TMA load"] and found.counts["TMA store"]
    assert not [warning for warning in found.ptxas_warnings if "serializ" in warning]
