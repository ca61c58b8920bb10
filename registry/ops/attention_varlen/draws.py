"""Random ragged batches that no grid holds: decoding, prefill and training, any sizes and published models."""

from __future__ import annotations

import random
from typing import Any

from registry.ops.attention_varlen.arguments import KV_SCALES
from registry.ops.attention_varlen.mixes import MIXES
from registry.ops.parts.cases import Case
from registry.ops.parts.draws import log_uniform
from registry.ops.parts.models import MODELS

MOST_FLOPS = 2e12
MOST_BYTES = 4 << 30
FEW = 8
"""Queries of decoding, at most."""
PAGES = (16, 32, 64, 64, 128, 256)


def draw(rng: random.Random, op: str = "attention_varlen") -> Case:
    """One batch: half of them decoding, the others prefill over pages or packed sequences."""
    while True:
        model = rng.choice(MODELS)
        shape: dict[str, Any] = {"hq": model.heads, "hkv": model.heads_kv, "d": model.head_dim}
        shape |= {"b": log_uniform(rng, 1, 256), "mix": rng.choice(list(MIXES))}
        kind = rng.random()
        if op.endswith("_backward") or kind < 0.3:
            shape |= {"sq": log_uniform(rng, 16, 16384), "causal": rng.random() < 0.8}
            shape["sk"] = shape["sq"]
        else:
            sk = log_uniform(rng, 64, 131072)
            few = rng.random() < 0.75
            shape |= {"sq": rng.choice((1, 1, 1, 2, 4, 8)) if few else log_uniform(rng, 16, min(sk, 4096)), "sk": sk}
            shape |= {"causal": True, "kv": "paged", "page": rng.choice(PAGES)}
        if model.softcap:
            shape["softcap"] = model.softcap
        if model.window is not None and rng.random() < 0.5:
            shape["window"] = (model.window, 0)
        if _affordable(shape):
            return Case.of(op, **shape, dtype="float16" if rng.random() < 0.2 else "bfloat16")


def cached(rng: random.Random) -> Case:
    """Caches that are not of pages of 16 bits: whole ones, those of narrow numbers, pages of a few keys."""
    while True:
        words = draw(rng).sizes
        if words.get("kv") == "paged":
            layout: dict[str, Any] = rng.choice(({"kv": "cache", "page": None}, {"page": rng.choice((1, 2, 8))}, {}))
            if rng.random() < 0.5 or not layout:
                layout = layout | {"kv_dtype": rng.choice(("float8_e4m3fn", "int8")), "scales": rng.choice(KV_SCALES)}
            kept = {name: value for name, value in (words | layout).items() if value is not None}
            return Case.of("attention_varlen", **kept)


def prompts(rng: random.Random) -> Case:
    """Prompts, or their next pieces, over what was cached before: on pages, or in whole caches."""
    while True:
        words = draw(rng).sizes
        if words.get("kv") == "paged" and words["sq"] > FEW:
            cache = rng.random() < 0.25
            kept = {name: value for name, value in words.items() if not (cache and name == "page")}
            return Case.of("attention_varlen", **kept | ({"kv": "cache"} if cache else {}))


def biased(rng: random.Random, op: str = "attention_varlen") -> Case:
    """With a sink for each head, half of them in a short window, or with slopes."""
    words = draw(rng, op).sizes
    words.pop("softcap", None)
    if rng.random() < 0.3:
        return Case.of(op, **words, alibi=True)
    return Case.of(op, **words | ({"window": (127, 0)} if rng.random() < 0.5 else {}), sinks=True)


def _affordable(shape: dict[str, Any]) -> bool:
    lengths = MIXES[shape["mix"]](shape["b"], shape["sk"])
    pairs = sum(n * max(1, shape["sq"] * n // shape["sk"]) for n in lengths)
    kv_bytes: int = 4 * shape["hkv"] * shape["d"] * sum(lengths)
    return 4.0 * pairs * shape["hq"] * shape["d"] <= MOST_FLOPS and kv_bytes <= MOST_BYTES
