"""Rows at odd distances across K: what boxes of several tensor maps bring, multiplied and moved as the kernel does."""

from __future__ import annotations

import pytest
import torch
from test_matmul_odd import brought

from registry import Target
from registry.ops.matmul.calls import MATMUL
from registry.ops.parts.cases import Case
from registry.plugins import gluon_matmul_ws
from registry.plugins.gluon_matmul_ws.across import host
from registry.plugins.gluon_matmul_ws.across.copy import UNIT, blocks_of
from registry.plugins.gluon_matmul_ws.host import sides

ACROSS = next(one for one in gluon_matmul_ws.registry_variants() if one.name == "gluon_matmul_across")
TARGET = Target.named("H100")
SHAPES = [
    dict(m=m, n=n, k=k, layout=layout, **more)
    for layout in ("nn", "tn", "tt")
    for m, n, k, more in (
        (131, 67, 65, {}),
        (5, 301, 130, {}),
        (300, 3, 9, {}),
        (142, 70, 598, {}),
        (132, 132, 1100, {}),
        (136, 71, 51, dict(b=2)),
        (72, 131, 64, dict(b=3)),
        (128, 202, 330, {}),
    )
]


def phase_of(t, pitch, classes):
    """When the rows t, t + classes ... of K have their turn: those first whose boxes begin farthest before them."""
    return classes - 1 - t * (pitch // (UNIT // classes)) % classes


def by_phases(first, pitch, classes, block=64):
    """[..., K] as its copy holds it: K phase by phase."""
    k = first.shape[-1]
    blocks = blocks_of(k, block, classes)
    found = torch.zeros(*first.shape[:-1], classes * blocks * block, dtype=first.dtype)
    for place in range(k):
        at = phase_of(place % classes, pitch, classes) * blocks * block + place // classes
        found[..., at] = first[..., place]
    return found


def laid(values, like):
    """Memory that holds these values where an operand has them, and NaN elsewhere."""
    memory = torch.full((1 << 20,), float("nan"), dtype=torch.float64)
    torch.as_strided(memory, values.shape, like.strides).copy_(values)
    return memory


def multiplied(args, cfg, memory, copied, z, top, col):
    """One consumer's part of a tile."""
    classes, per = cfg.CLASSES, args["per_phase"]
    acc = torch.zeros(cfg.GM, cfg.N0, dtype=torch.float64)
    for phase in range(classes):
        if phase:
            acc = torch.roll(acc, -UNIT // classes, 1)
        t = (classes - 1 - phase) * (args["pitch"] // (UNIT // classes)) % classes
        assert phase_of(t, args["pitch"], classes) == phase
        for number in range(per):
            down = number * cfg.BK
            left = t * args["pitch"] // 8 * 8 + col
            b = brought(args[f"b{phase}"], memory[1], z * args["z_b"], down, left)
            if cfg.A_T:
                a = brought(args[f"a{phase}"], memory[0], z * args["z_a"], down, t * args["a_pitch"] + top).T
            else:
                a = torch.zeros(cfg.GM, cfg.BK, dtype=torch.float64)
                rows = copied[z * args["z_a"], top : top + cfg.GM, (phase * per + number) * cfg.BK :][:, : cfg.BK]
                a[: len(rows)] = rows
            acc += a @ b
    return acc


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_classes_make_up_the_product(shape):
    p = Case.of("matmul", **shape).problem(TARGET)
    if ACROSS.reasons(p):
        pytest.skip("none of its")
    given = MATMUL.operands(p)
    drawn = torch.Generator().manual_seed(p.m * p.n + p.k)
    batch = (p.batch,) if p.batched else ()
    a = torch.randn(*batch, p.m, p.k, dtype=torch.float64, generator=drawn)
    b = torch.randn(*batch, p.k, p.n, dtype=torch.float64, generator=drawn)
    configs = {(c["MODE"], c["BLOCK_M"], c["BLOCK_N"], c.get("SWAP", False)): c for c in ACROSS.legal_configs(p)}
    for config in configs.values():
        *_, call = host.call(p, config, given, 1.0)
        cfg, args = call.constants["cfg"], call.arguments
        first, second = (b.mT, a.mT) if cfg.SWAP else (a, b)
        memory = [laid(one, like) for one, like in zip((first, second), sides(config, given), strict=True)]
        first, second = (one if p.batched else one[None] for one in (first, second))
        copied = by_phases(first, args["pitch"], cfg.CLASSES, cfg.BK)
        if not cfg.A_T:
            assert list(args["a0"].shape[1:]) == list(copied.shape[1:])
        wide = cfg.N0 - host.LOST
        for z in range(p.batch or 1):
            for top in range(0, args["tiles_m"] * cfg.PARTS * cfg.GM, cfg.GM):
                for col in range(0, args["tiles_n"] * wide, wide):
                    want = first[z, top : top + cfg.GM] @ second[z, :, col : col + wide]
                    acc = multiplied(args, cfg, memory, copied, z, top, col)
                    assert torch.allclose(acc[: want.shape[0], : want.shape[1]], want), (config, top, col)


def operand(rows, columns, *, turned, **batch):
    """A first factor as a problem has it."""
    layout = "tn" if turned else "nn"
    p = Case.of("matmul", m=rows, n=67, k=columns, layout=layout, **batch).problem(TARGET)
    return sides({"SWAP": False, "BLOCK_N": 64}, MATMUL.operands(p))[0]


def test_only_rows_of_a_line_or_more_are_read_in_place():
    assert host.in_place(operand(64, 99, turned=True))
    assert host.in_place(operand(128, 99, turned=True, b=2))
    assert not host.in_place(operand(56, 99, turned=True))
    assert not host.in_place(operand(67, 99, turned=True))
    assert not host.in_place(operand(64, 96, turned=False))


def test_rows_at_even_distances_are_for_others():
    p = Case.of("matmul", m=64, n=64, k=64).problem(TARGET)
    assert [reason.code for reason in ACROSS.reasons(p)] == ["alignment"]


def test_eight_rows_are_the_least():
    assert ACROSS.reasons(Case.of("matmul", m=64, n=67, k=7).problem(TARGET))
    assert not ACROSS.reasons(Case.of("matmul", m=64, n=67, k=8).problem(TARGET))


@pytest.mark.parametrize("name", ["gluon_matmul_across", "gluon_matmul_odd"])
@pytest.mark.parametrize(
    "wrong", [{"BLOCK_K": 128}, {"STAGES": 1}, {"STORES": 0}, {"BLOCK_N": 96}, {"SPLIT": 2}], ids=str
)
def test_configs_that_no_kernel_can_be_are_refused(name, wrong):
    variant = next(one for one in gluon_matmul_ws.registry_variants() if one.name == name)
    p = Case.of("matmul", m=515, n=515, k=515).problem(TARGET)
    config = variant.legal_configs(p)[0]
    assert not variant.refusals(p, config)
    assert "config" in {reason.code for reason in variant.refusals(p, {**config, **wrong})}
