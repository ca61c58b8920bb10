"""The named grids of shapes. Each is a function of the op.

A sweep takes its cases in order, and a budget may end it anywhere: the grids that matter most come first, and every
beginning of a grid is a fair sample of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from registry.errors import InvalidArgument
from registry.ops.parts.cases import Case, from_file, spread, unique

_ATTENTION = ("attention", "attention_backward")
TOKENS = 16384
HIDDEN = 2048


def paper18(op: str) -> list[Case]:
    """FlashAttention-3's figure 5: bf16, 16k tokens, hidden size 2048; head dims, lengths, full and causal."""
    return [
        Case.of(op, b=TOKENS // s, hq=HIDDEN // d, s=s, d=d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (1024, 4096, 16384)
    ]


def lengths(op: str) -> list[Case]:
    """The lengths and head counts between those of paper18, where rules draw their borders. Fills the held-out set."""
    return [
        Case.of(op, b=max(1, tokens // s), hq=HIDDEN // d, s=s, d=d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s, tokens in ((512, TOKENS), (1536, TOKENS), (2048, TOKENS), (3072, 12288), (8192, TOKENS), (2048, 4096))
    ]


def gqa(op: str) -> list[Case]:
    """Grouped heads as served models have them: 32 or 64 query heads over 8, or over 1, head dim 128."""
    shapes = (
        (1, 32, 8, 8192),
        (4, 32, 8, 4096),
        (8, 32, 8, 2048),
        (2, 64, 8, 4096),
        (16, 32, 8, 1024),
        (4, 32, 1, 4096),
    )
    return [
        Case.of(op, b=b, hq=hq, hkv=hkv, s=s, d=128, causal=causal)
        for b, hq, hkv, s in shapes
        for causal in (False, True)
    ]


def single(op: str) -> list[Case]:
    """One sequence at a time, too small to fill the chip: few heads, short lengths, and a query of one token."""
    prompts = [Case.of(op, b=1, hq=h, s=s, d=128, causal=True) for h in (8, 16, 32) for s in (256, 1024, 4096)]
    prompts += [Case.of(op, b=1, hq=h, s=s, d=64) for h in (12, 16) for s in (197, 512, 2048)]
    if op == "attention_backward":
        return prompts
    decode = [Case.of(op, b=b, hq=32, hkv=8, s=1, sk=sk, d=128) for b in (1, 16, 64) for sk in (1024, 8192, 32768)]
    return prompts + decode


def training(op: str) -> list[Case]:
    """What training runs: paper18, grouped heads at usual lengths, and a few short ones. Made for the backward."""
    grouped = ((16, 1024, True), (16, 1024, False), (8, 2048, True), (4, 4096, True), (4, 4096, False), (1, 8192, True))
    short = ((32, 16, 512, 128, True), (32, 32, 512, 64, True), (1, 16, 512, 64, False), (4, 16, 256, 128, True))
    return [
        *paper18(op),
        *(Case.of(op, b=b, hq=32, hkv=8, s=s, d=128, causal=causal) for b, s, causal in grouped),
        *(Case.of(op, b=b, hq=hq, s=s, d=d, causal=causal) for b, hq, s, d, causal in short),
    ]


def quick(op: str) -> list[Case]:
    """A few minutes' worth: one shape of each kind."""
    if op == "matmul":
        sizes = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (16, 4096, 4096), (4096, 14336, 4096))
        return [Case.of(op, m=m, n=n, k=k) for m, n, k in sizes]
    return [
        Case.of(op, b=TOKENS // s, hq=HIDDEN // d, s=s, d=d, causal=causal)
        for d, s, causal in (
            (64, 1024, True),
            (64, 4096, False),
            (128, 4096, True),
            (128, 16384, False),
            (256, 4096, True),
        )
    ]


def tiny(op: str) -> list[Case]:
    """Shapes that a CPU finishes at once: for trying the tool out and for its tests."""
    if op == "matmul":
        return [
            Case.of(op, m=m, n=64, k=64, dtype="float32", layout=layout) for m in (16, 128) for layout in ("nn", "nt")
        ]
    return [Case.of(op, hq=2, s=s, d=16, causal=causal, dtype="float32") for s in (32, 96) for causal in (False, True)]


def llm(op: str) -> list[Case]:
    """The linear layers of decoder models: fused QKV, output, gate and up, down; few, some and many tokens."""
    layers = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (8192, 10240), (8192, 57344), (28672, 8192))
    tokens = (1, 16, 32, 64, 128, 256, 1024, 4096, 16384)
    return [Case.of(op, m=m, n=n, k=k, layout="nt") for k, n in layers for m in tokens]


_LAYERS = ((4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192))


def fp8(op: str) -> list[Case]:
    """Linear layers quantised to fp8, as servers run them: a scale for each token and output channel, or for all."""
    kind: dict[str, Any] = {"dtype": "float8_e4m3fn", "layout": "nt"}
    tokens = (1, 16, 64, 128, 512, 2048, 8192)
    scalings = ("rowwise", "scalar")
    return [Case.of(op, m=m, n=n, k=k, scaling=s, **kind) for k, n in _LAYERS for m in tokens for s in scalings]


def fused(op: str) -> list[Case]:
    """The first layers of MLPs, with the bias and the activation that follow them."""
    tokens = (16, 128, 512, 2048, 8192)
    first: dict[str, Any] = {"layout": "nt", "bias": True}
    found = [Case.of(op, m=m, n=4 * k, k=k, activation="gelu", **first) for k in (1024, 4096) for m in tokens]
    found += [Case.of(op, m=m, n=14336, k=4096, layout="nt", activation="silu") for m in tokens]
    return found + [Case.of(op, m=m, n=4096, k=4096, activation="relu", **first) for m in tokens]


def squares(op: str) -> list[Case]:
    """Square products, in the layouts of a forward and of both gradients, and sizes that no tile divides."""
    plain = [Case.of(op, m=s, n=s, k=s, layout=t) for s in (512, 1024, 2048, 4096, 8192) for t in ("nn", "nt", "tn")]
    return plain + [Case.of(op, m=s, n=s, k=s) for s in (1000, 3000, 5000, 16384)]


GRIDS: dict[str, tuple[tuple[str, ...], Callable[[str], list[Case]]]] = {
    "quick": ((*_ATTENTION, "matmul"), quick),
    "tiny": ((*_ATTENTION, "matmul"), tiny),
    "training": (("attention_backward",), training),
    "paper18": (_ATTENTION, paper18),
    "gqa": (_ATTENTION, gqa),
    "single": (_ATTENTION, single),
    "lengths": (_ATTENTION, lengths),
    "llm": (("matmul",), llm),
    "squares": (("matmul",), squares),
    "fp8": (("matmul",), fp8),
    "fused": (("matmul",), fused),
}
"""name -> (the ops it is for, its cases). In the order that "all" measures them."""


def names(op: str | None = None) -> list[str]:
    return [name for name, (ops, _) in GRIDS.items() if op is None or op in ops]


def grid(op: str, name: str) -> list[Case]:
    """The cases of a grid, or of several: "paper18+gqa"; "all" is everything but the trial grids."""
    wanted = [n for n in names(op) if n not in ("tiny", "quick")] if name == "all" else name.split("+")
    found: list[Case] = []
    for one in wanted:
        if one not in names(op):
            raise InvalidArgument("grid", repr(one), ", ".join([*names(op), "all"]) + f" for {op}, joined by +")
        found += spread(GRIDS[one][1](op))
    return unique(found)


def select(
    op: str, *, grid_name: str | None = None, shapes: Path | None = None, recorded: Path | None = None
) -> list[Case]:
    """The cases that the command line asks for; without any, the quick grid."""
    found: list[Case] = []
    for path in (shapes, recorded):
        found += from_file(op, path) if path is not None else []
    if grid_name or not found:
        found += grid(op, grid_name or "quick")
    return unique(found)
