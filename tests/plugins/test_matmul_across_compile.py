"""Products with rows at odd distances across K, compiled for a GPU that is not here."""

from __future__ import annotations

import pytest

from registry import Target
from registry.ops.parts.cases import Case

pytest.importorskip("triton")

from compiled import instructions, loop_spills, reading, resources

from registry.plugins import gluon_matmul_ws
from registry.toolbox.in_flight import touched_in_flight

ACROSS = next(one for one in gluon_matmul_ws.registry_variants() if one.name == "gluon_matmul_across")
IN_PLACE = dict(m=2000, n=515, k=3003, layout="tn")
COPIED = dict(m=2001, n=515, k=3003, layout="tn")
FEW = dict(m=111, n=10818, k=7080)
SHORT = dict(m=111, n=10818, k=280)


@reading
def early(found) -> int:
    """Instructions that touch sums of products in flight."""
    return len(touched_in_flight(found.sass))


@pytest.mark.parametrize("shape", [IN_PLACE, COPIED, FEW, SHORT], ids=["in place", "copied", "few rows", "short"])
def test_the_first_config_compiles_cleanly(shape):
    p = Case.of("matmul", **shape).problem(Target.named("H100"))
    config = ACROSS.legal_configs(p)[0]
    *copies, product = ACROSS.builds(p, config)
    assert len(copies) == (shape is not IN_PLACE)
    found = resources(product, p.target)
    assert not found.spills or not loop_spills(found)
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"
    assert not early(found)
    assert found.shared <= ACROSS.requires.shared_memory(p, config) <= found.shared + 1024
    asked = instructions(found)
    assert asked["wgmma"] >= 2 and asked["TMA load"]
