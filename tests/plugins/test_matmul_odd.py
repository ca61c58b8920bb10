"""Rows at odd distances: what the boxes of several tensor maps bring, put together as the kernel does."""

from __future__ import annotations

import pytest
import torch

from registry import Target
from registry.ops.matmul.calls import MATMUL
from registry.ops.parts.cases import Case
from registry.plugins import gluon_matmul_ws
from registry.plugins.gluon_matmul_ws.host import sides
from registry.plugins.gluon_matmul_ws.odd import host
from registry.plugins.gluon_matmul_ws.odd.fragments import STEP, UNIT

ODD = next(one for one in gluon_matmul_ws.registry_variants() if one.name == "gluon_matmul_odd")
SHAPES = [
    dict(m=m, n=n, k=k, layout=layout, **more)
    for layout in ("nn", "nt", "tt")
    for m, n, k, more in (
        (131, 67, 65, {}),
        (5, 301, 130, {}),
        (300, 3, 7, {}),
        (142, 70, 198, {}),
        (132, 136, 100, {}),
        (128, 72, 51, dict(b=2)),
        (67, 131, 65, dict(b=3)),
    )
]
LINE = 64


def held(place):
    """Which element of a line lies at that place of K as wgmma counts it."""
    step, half, quarter, element = place // 16, place // 8 % 2, place // 2 % 4, place % 2
    return 16 * quarter + 4 * step + 2 * half + element


ORDER = [held(place) for place in range(LINE)]


def brought(one, memory, z, first, column):
    """The box of a map at these places, zero where it lies outside."""
    _, high, wide = one.block_shape
    entries, rows, width = one.shape
    assert column % 8 == 0, "the card raises an illegal instruction"
    box = torch.zeros(high, wide, dtype=torch.float64)
    for g in range(max(0, min(high, rows - first))):
        inside = max(0, min(wide, width - column))
        at = z * one.strides[0] + (first + g) * one.strides[1] + column
        box[g, :inside] = memory[at : at + inside]
    assert z < entries
    return box


def lines(args, cfg, memory, z, outer, k):
    """A part of a block of the first factor: as `_load_rows` brings it, and `fragment` shifts it."""
    pitch = args["pitch"]
    assert cfg.A_FLAT or outer % UNIT == 0
    found = torch.full((cfg.GM, LINE), float("nan"), dtype=torch.float64)
    for s in range(UNIT):
        below = (s - outer) & (UNIT - 1) if cfg.A_FLAT else s
        box = brought(args[f"a{s}"], memory, z, (outer + below) // UNIT, s * pitch // 8 * 8 + k)
        found[below * cfg.GM // UNIT : (below + 1) * cfg.GM // UNIT] = box
    for number, line in enumerate(found):
        begin = ((outer + number // (cfg.GM // UNIT)) * pitch) % 8
        shifted = torch.zeros(LINE, dtype=torch.float64)
        shifted[:STEP] = line[begin:][:STEP]
        found[number] = shifted[ORDER]
    return found


def ordered(second):
    """[z, K, N] as the copy holds it: [z, blocks * 64, N]."""
    z, k, n = second.shape
    blocks = -(-k // STEP)
    padded = torch.zeros(z, blocks * STEP, n, dtype=second.dtype)
    padded[:, :k] = second
    found = torch.zeros(z, blocks, LINE, n, dtype=second.dtype)
    found[:, :, :STEP] = padded.reshape(z, blocks, STEP, n)
    return found[:, :, ORDER].reshape(z, blocks * LINE, n)


def in_order(x):
    """As `_in_order`."""
    m, n = x.shape
    return x.reshape(UNIT, m // UNIT, n).transpose(0, 1).reshape(m, n)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_make_up_the_product(shape):
    p = Case.of("matmul", **shape).problem(Target.named("H100"))
    if ODD.reasons(p):
        pytest.skip("none of its")
    given = MATMUL.operands(p)
    drawn = torch.Generator().manual_seed(p.m * p.n + p.k)
    batch = (p.batch,) if p.batched else ()
    a = torch.randn(*batch, p.m, p.k, dtype=torch.float64, generator=drawn)
    b = torch.randn(*batch, p.k, p.n, dtype=torch.float64, generator=drawn)
    configs = {(c["MODE"], c["BLOCK_M"], c["BLOCK_N"], c.get("SWAP", False)): c for c in ODD.legal_configs(p)}
    for config in configs.values():
        *_, call = host.call(p, config, given, 1.0)
        cfg, args = call.constants["cfg"], call.arguments
        first, second = (b.mT, a.mT) if cfg.SWAP else (a, b)
        memory = torch.full((1 << 20,), float("nan"), dtype=torch.float64)
        torch.as_strided(memory, first.shape, sides(config, given)[0].strides).copy_(first)
        first, second = (one if p.batched else one[None] for one in (first, second))
        copied = ordered(second)
        assert list(args["b_desc"].shape[1:]) == [copied.shape[2], copied.shape[1]]
        for z in range(p.batch or 1):
            for row in range(0, args["tiles_m"] * cfg.PARTS * cfg.GM, cfg.GM):
                acc = torch.zeros(cfg.GM, second.shape[-1], dtype=torch.float64)
                for number in range(-(-p.k // STEP)):
                    x = lines(args, cfg, memory, z * args["z_a"], row + z * args["rows"], number * STEP)
                    acc += x @ copied[z, number * LINE :][:LINE]
                want = first[z, row : row + cfg.GM] @ second[z]
                assert torch.allclose(in_order(acc)[: len(want)], want), (config, row)
