"""Grouped products on a GPU: offsets that change under a captured graph, and offsets that lie."""

from __future__ import annotations

import pytest
import torch

import registry
from registry import grouped_mm
from registry.errors import DeviceComplaint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def operands():
    made = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", generator=made).bfloat16() for shape in ((300, 64), (3, 128, 64)))
    return a, b.mT


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def variants(waits: bool = True):
    """Those that can take these operands here; without the one that waits for the offsets, if so asked."""
    if not torch.cuda.is_available():
        return []
    a, b = operands()
    found = {one.variant for one in grouped_mm.explain(a, b, offs=offsets(100, 200, 300)).candidates if one.legal}
    return sorted(found if waits else found - {"torch_loop"})


def off(out, want):
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("variant", variants(waits=False))
def test_a_graph_goes_by_the_offsets_of_its_replay(variant):
    a, b = operands()
    offs, out = offsets(100, 200, 300), torch.empty(300, 128, device="cuda", dtype=torch.bfloat16)
    grouped_mm(a, b, offs=offs, out=out, variant=variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_mm(a, b, offs=offs, out=out, variant=variant)
    for ends in ((0, 10, 300), (300, 300, 300), (7, 130, 131), (0, 0, 0)):
        offs.copy_(offsets(*ends))
        out.fill_(float("nan"))
        graph.replay()
        want = grouped_mm.reference(a, b, offs=offs)
        assert off(out, want) < 0.01 if want.any() else not out.any(), ends


@pytest.mark.parametrize("variant", variants())
def test_offsets_that_lie(variant):
    a, b = operands()
    for ends, lie in (((100, 50, 400), True), ((-3, 100, 300), True), ((100, 100, 300), False)):
        offs = offsets(*ends)
        assert off(grouped_mm(a, b, offs=offs, variant=variant), grouped_mm.reference(a, b, offs=offs)) < 0.01
        if lie:
            with pytest.raises(DeviceComplaint, match="offs"):
                registry.check()
        registry.check()
