"""Random products that no grid holds: sizes log-uniform and not rounded, and the layers of published models."""

from __future__ import annotations

import random

from registry.ops.parts.cases import Case
from registry.ops.parts.draws import log_uniform
from registry.ops.parts.models import MODELS

MOST_FLOPS = 4e12
MOST_BYTES = 4 << 30


def draw(rng: random.Random) -> Case:
    """One product: half of them of any size, half a layer of a model at any number of tokens."""
    while True:
        m, n, k, layout = _any_size(rng) if rng.random() < 0.5 else _layer(rng)
        if 2.0 * m * n * k <= MOST_FLOPS and 2 * (m * n + m * k + n * k) <= MOST_BYTES:
            dtype = "float16" if rng.random() < 0.2 else "bfloat16"
            return Case.of("matmul", m=m, n=n, k=k, layout=layout, dtype=dtype)


def _any_size(rng: random.Random) -> tuple[int, int, int, str]:
    m, n, k = log_uniform(rng, 1, 16384), log_uniform(rng, 16, 16384), log_uniform(rng, 16, 16384)
    return m, n, k, rng.choice(("nn", "nt", "tn"))


def _layer(rng: random.Random) -> tuple[int, int, int, str]:
    model = rng.choice(MODELS)
    heads = model.heads * model.head_dim
    qkv = heads + 2 * model.heads_kv * model.head_dim
    first = model.inner * (2 if model.gated and rng.random() < 0.5 else 1)
    n, k = rng.choice(((qkv, model.hidden), (model.hidden, heads), (first, model.hidden), (model.hidden, model.inner)))
    return log_uniform(rng, 1, 16384), n, k, "nt"
