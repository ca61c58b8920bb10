"""The grouped products compiled for GPUs that are not here: what they take from the machine, and how they load."""

from __future__ import annotations

import pytest

from registry import Target
from registry.ops.grouped_mm.problem import GroupedMmProblem

pytest.importorskip("triton")

from compiled import instructions, matrix_units, resources

from registry.plugins import gluon_grouped, triton_grouped

WITH_NEWEST_TRITON = r"on_hopper|specialized|start_where"
PLAIN, SPECIALIZED = (module.registry_variants()[0] for module in (triton_grouped, gluon_grouped))
GPUS = {"sm80": "A100", "sm89": "RTX 4090", "sm90": "H100", "sm100": "B200"}
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
    assert matrix_units(found)
    return found, instructions(found)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"m": 64}, SWIGLU, {"form": "inner", "layout": "tn", "m": 4096, "k": 8192}, {"form": "batch", "m": 1024}],
    ids=["rows", "few", "gated", "inner", "batch"],
)
def test_plain_triton_on_hopper(sizes):
    _, asked = compiled(PLAIN, **sizes)
    assert asked["TMA load"] and bool(asked["wgmma"]) == (sizes.get("m") != 64)
    assert bool(asked["TMA store"]) == ("form" in sizes)  # groups of rows end inside of boxes


@pytest.mark.parametrize("sizes", [{}, {"form": "inner", "layout": "tn", "m": 4096, "k": 8192}], ids=["rows", "inner"])
def test_plain_triton_on_ampere(sizes):
    _, asked = compiled(PLAIN, "sm80", **sizes)
    assert asked["cp.async"]


def test_plain_triton_of_gathered_rows():
    compiled(PLAIN, gather=True)
    compiled(PLAIN, "sm89", gather=True, **SWIGLU)


@pytest.mark.parametrize("sizes", [{}, SWIGLU, {"e": 300, "layout": "nn"}], ids=["rows", "gated", "many"])
def test_specialized(sizes):
    found, asked = compiled(SPECIALIZED, **sizes)
    assert asked["TMA load"] and asked["TMA store"]
    assert not [warning for warning in found.ptxas_warnings if "serializ" in warning]


@pytest.mark.parametrize("layout, n, fits", [("nn", 136, True), ("nn", 132, False), ("nt", 132, True)])
def test_halves_of_b_start_where_tma_can(layout, n, fits):
    p = GroupedMmProblem.of_shape(Target.named("H100"), e=4, m=77, n=n, k=104, layout=layout, **SWIGLU)
    assert bool(SPECIALIZED.reasons(p)) != fits
    assert any(config["TMA"] for config in PLAIN.legal_configs(p)) == fits
