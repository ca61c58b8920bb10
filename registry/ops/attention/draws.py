"""Random attentions that no grid holds: any lengths and heads, and published models at any batch and length."""

from __future__ import annotations

import random
from typing import Any

from registry.ops.parts.cases import Case
from registry.ops.parts.draws import log_uniform
from registry.ops.parts.models import MODELS

MOST_FLOPS = 4e12
MOST_BYTES = 4 << 30
HEAD_DIMS = (32, 64, 64, 80, 96, 128, 128, 128, 192, 256)


def draw(rng: random.Random, op: str = "attention", kind: str = "") -> Case:
    """One attention: half of any sizes, half a model's; some with few queries over many keys, as decoders ask. Of 16
    bits, or of 32, which take four times as long, and as it comes or deterministic."""
    while True:
        shape = _any_size(rng) if rng.random() < 0.5 else _model(rng)
        shape.update(_lengths(rng, op))
        flops = (16.0 if kind == "float32" else 4.0) * shape["b"] * shape["hq"] * shape["s"] * shape["sk"] * shape["d"]
        each = shape["b"] * shape["d"] * (4 if kind == "float32" else 2)
        if flops <= MOST_FLOPS and each * (shape["hq"] * shape["s"] + shape["hkv"] * shape["sk"]) <= MOST_BYTES:
            if kind == "deterministic":
                shape["deterministic"] = True
            dtype = kind if kind == "float32" else ("float16" if rng.random() < 0.2 else "bfloat16")
            return Case.of(op, **shape, dtype=dtype)


def _lengths(rng: random.Random, op: str) -> dict[str, Any]:
    s = log_uniform(rng, 16, 16384)
    kind = rng.random()
    if kind < 0.7 or op != "attention":
        return {"s": s, "sk": s, "causal": rng.random() < 0.6}
    if kind < 0.85:  # decoding and short prompts over a cache
        return {"s": log_uniform(rng, 1, 64), "sk": log_uniform(rng, 64, 65536), "causal": rng.random() < 0.5}
    return {"s": s, "sk": log_uniform(rng, 16, 16384), "causal": False}


def _any_size(rng: random.Random) -> dict[str, Any]:
    group = rng.choice((1, 1, 1, 2, 4, 8))
    hkv = log_uniform(rng, 1, 32)
    return {"b": log_uniform(rng, 1, 32), "hq": hkv * group, "hkv": hkv, "d": rng.choice(HEAD_DIMS)}


def _model(rng: random.Random) -> dict[str, Any]:
    model = rng.choice(MODELS)
    found: dict[str, Any] = {
        "b": log_uniform(rng, 1, 32),
        "hq": model.heads,
        "hkv": model.heads_kv,
        "d": model.head_dim,
    }
    if model.softcap:
        found["softcap"] = model.softcap
    if model.window is not None and rng.random() < 0.5:
        found["window"] = (model.window, 0)
    return found


_HEADS = frozenset((model.heads, model.heads_kv, model.head_dim) for model in MODELS)


def of_a_model(case: Case) -> bool:
    """Whether an attention has the heads of a published model."""
    sizes = case.sizes
    return (sizes["hq"], sizes.get("hkv", sizes["hq"]), sizes["d"]) in _HEADS
