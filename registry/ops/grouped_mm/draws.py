"""Sizes of groups, as routers make them, and random grouped products of published mixtures of experts."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from registry.ops.parts.cases import Case
from registry.ops.parts.draws import log_uniform

SPREADS = ("even", "random", "skewed", "empty", "short", "one")
"""All of one size; as tokens choose experts at random; few with most of it; two of three with nothing; a quarter left
over behind the last one; all in one."""
MOST_FLOPS = 4e12
MOST_BYTES = 16 << 30


def ends_of(spread: str, groups: int, size: int) -> list[int]:
    """The offsets of groups that are spread so; the same for the same arguments. "lying" ones fall and leave `size`."""
    rng = random.Random(f"{spread} {groups} {size}")
    if spread == "lying":
        return [rng.randint(-size, 2 * size) for _ in range(groups)]
    whole = size * 3 // 4 if spread == "short" else size
    weights = [1.0] * groups
    if spread == "skewed":
        weights = [1.0 / (1 + i) for i in range(groups)]
        rng.shuffle(weights)
    elif spread == "empty":
        weights = [float(i % 3 == 1) for i in range(groups)]
    elif spread == "one":
        weights = [float(i == groups // 2) for i in range(groups)]
    if spread in ("random", "empty", "skewed"):
        sizes = [0] * groups
        for i in rng.choices(range(groups), weights if any(weights) else None, k=whole):
            sizes[i] += 1
        return [sum(sizes[: i + 1]) for i in range(groups)]
    total, found = sum(weights), 0.0
    ends = []
    for weight in weights:
        found += weight
        ends.append(int(whole * found / total))
    return ends


class Experts(NamedTuple):
    """The shapes of a mixture of experts: hidden size, inner size of one expert, experts, and experts for a token."""

    hidden: int
    inner: int
    groups: int
    chosen: int


EXPERTS = (
    Experts(4096, 14336, 8, 2),  # Mixtral 8x7B
    Experts(5120, 8192, 16, 1),  # Llama 4 Scout
    Experts(4096, 6400, 16, 2),  # Phi-3.5 MoE
    Experts(2880, 2880, 32, 4),  # gpt-oss 20B
    Experts(2048, 1408, 64, 6),  # DeepSeek-V2 Lite
    Experts(2048, 1024, 64, 8),  # OLMoE
    Experts(2048, 768, 128, 8),  # Qwen 3 30B
    Experts(4096, 1536, 128, 8),  # Qwen 3 235B
    Experts(7168, 2048, 256, 8),  # DeepSeek-V3
)
"""Experts of published models. The larger ones are split over several GPUs where they run."""


def float8(rng: random.Random) -> Case:
    """The first products of expert layers quantised to fp8."""
    while True:
        sizes = draw(rng).sizes
        if sizes.get("layout", "nt") == "nt" and sizes.get("form", "rows") == "rows" and not sizes.get("gated"):
            return Case.of("grouped_mm", **sizes | {"dtype": "float8_e4m3fn", "scaling": "rowwise"})


def epilogue(rng: random.Random) -> Case:
    """With a bias, rows that are gathered on the way, a gate of 8 bits, or several of these."""
    while True:
        eight = rng.random() < 0.4
        sizes = (float8 if eight else draw)(rng).sizes
        more: dict[str, Any] = {name: True for name in ("bias", "gather") if rng.random() < 0.5}
        more |= {"gated": True, "activation": "silu"} if eight and rng.random() < 0.5 else {}
        if more and sizes.get("form", "rows") == "rows":
            return Case.of("grouped_mm", **sizes | more)


def draw(rng: random.Random) -> Case:
    """One product of an expert layer: gate and up, fused or not, down, or a gradient; 1 to 32768 tokens."""
    while True:
        one = rng.choice(EXPERTS)
        groups = max(1, one.groups // rng.choice((1, 1, 2, 4, 8)))
        m = log_uniform(rng, 1, 32768) * one.chosen
        fused = rng.random() < 0.3
        n, k = (one.hidden, one.inner) if rng.random() < 0.4 else (one.inner * (1 if fused else 2), one.hidden)
        gated = fused and n == one.inner
        form, layout = rng.choice((("rows", "nt"), ("rows", "nt"), ("rows", "nn"), ("inner", "tn")))
        what: dict[str, Any] = {"activation": "silu", "gated": True} if gated and form == "rows" else {}
        sizes: dict[str, Any] = {"m": m, "n": n, "k": k} if form == "rows" else {"m": k, "n": n, "k": m}
        wide = 2 * n if what else n
        moved = 2 * (groups * wide * k + m * (k + n))
        if 2.0 * m * wide * k <= MOST_FLOPS and moved <= MOST_BYTES:
            spread = rng.choice(("even", "random", "skewed", "empty"))
            return Case.of("grouped_mm", e=groups, form=form, layout=layout, spread=spread, **sizes, **what)
