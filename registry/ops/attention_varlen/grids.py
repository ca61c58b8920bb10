"""The grids of shapes worth measuring: decoding and prefill from pages, training on packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from registry.ops.parts.cases import Case

PAGED: dict[str, Any] = {"kv": "paged", "page": 64, "d": 128}
SERVED = (
    (1, 32, 8, 1024),
    (1, 32, 8, 8192),
    (1, 32, 8, 131072),
    (16, 32, 8, 4096),
    (64, 32, 8, 4096),
    (8, 64, 8, 32768),
    (128, 64, 8, 1024),
)
"""(sequences, query heads, key heads, keys): one token each, as served models decode."""


def decode(op: str) -> list[Case]:
    """One query a sequence over pages of 64: all lengths alike, and mixed ones."""
    return [
        Case.of(op, b=b, hq=hq, hkv=hkv, sq=1, sk=sk, mix=mix, **PAGED)
        for b, hq, hkv, sk in SERVED
        for mix in ("uniform", "lognormal", "one")
        if b > 1 or mix == "uniform"
    ]


def caches(op: str) -> list[Case]:
    """Decoding from other caches: quantised ones, small and large pages, dense ones; a few queries at once."""
    small = [{**PAGED, "page": page} for page in (1, 16, 256)]
    kinds = [*small, {"kv": "cache", "d": 128}, {**PAGED, "kv_dtype": "float8_e4m3fn"}, {**PAGED, "kv_dtype": "int8"}]
    return [
        Case.of(op, b=b, hq=32, hkv=8, sq=sq, sk=4096, mix="lognormal", **kind)
        for kind in kinds
        for b, sq in ((16, 1), (64, 1), (16, 4))
    ]


def prefill(op: str) -> list[Case]:
    """Prompts, and chunks of them, into pages; causal."""
    shapes = ((1, 2048, 2048), (8, 1024, 1024), (1, 512, 16384), (16, 256, 4096), (4, 4096, 4096))
    return [
        Case.of(op, b=b, hq=32, hkv=8, sq=sq, sk=sk, mix=mix, causal=True, **PAGED)
        for b, sq, sk in shapes
        for mix in ("uniform", "lognormal")
        if b > 1 or mix == "uniform"
    ]


def packed(op: str) -> list[Case]:
    """Training on packed sequences: even, lognormal, and one long among many short."""
    return [
        Case.of(op, b=b, hq=hq, hkv=hkv, sq=s, d=d, mix=mix, causal=causal)
        for hq, hkv, d in ((16, 16, 128), (32, 8, 128), (32, 32, 64), (8, 8, 256))
        for b, s in ((4, 4096), (16, 2048), (32, 512))
        for mix in ("uniform", "lognormal", "one")
        for causal in (True, False)
    ]


def quick(op: str) -> list[Case]:
    """A few minutes' worth: one shape of each kind."""
    training = [
        Case.of(op, b=8, hq=16, sq=2048, d=d, mix=mix, causal=True) for d in (64, 128) for mix in ("uniform", "one")
    ]
    if op.endswith("_backward"):
        return training
    heads: dict[str, Any] = {"hq": 32, "hkv": 8}
    serving = [Case.of(op, b=b, **heads, sq=1, sk=sk, mix="lognormal", **PAGED) for b, sk in ((1, 8192), (64, 4096))]
    return [*training, *serving, Case.of(op, b=4, **heads, sq=512, sk=4096, causal=True, **PAGED)]


def tiny(op: str) -> list[Case]:
    """Shapes that a CPU finishes at once: for trying the tool out and for its tests."""
    common: dict[str, Any] = {"hq": 2, "d": 16, "dtype": "float32"}
    found = [Case.of(op, b=3, sq=s, mix=mix, causal=True, **common) for s in (16, 48) for mix in ("uniform", "one")]
    if op.endswith("_backward"):
        return found
    return [*found, *(Case.of(op, b=2, sq=1, sk=s, kv="paged", page=16, **common) for s in (64, 96))]


Grid = Callable[[str], list[Case]]
FORWARD: dict[str, Grid] = {
    "quick": quick,
    "tiny": tiny,
    "decode": decode,
    "packed": packed,
    "prefill": prefill,
    "caches": caches,
}
BACKWARD: dict[str, Grid] = {"quick": quick, "tiny": tiny, "packed": packed}
