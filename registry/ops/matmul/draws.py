"""Random products that no grid holds: sizes log-uniform and not rounded, and the layers of published models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from registry.ops.parts.cases import Case
from registry.ops.parts.draws import log_uniform
from registry.ops.parts.models import MODELS, Model

MOST_FLOPS = 4e12
MOST_BYTES = 4 << 30


def draw(rng: random.Random) -> Case:
    """One product: half of them of any size, half a layer of a model at any number of tokens."""
    return _drawn(rng, lambda: {"dtype": "float16" if rng.random() < 0.2 else "bfloat16"})


def float32(rng: random.Random) -> Case:
    """The same of 32 bits, which torch rounds to tf32 or not, as it was told."""
    return _drawn(rng, lambda: {"dtype": "float32", "ieee": rng.random() < 0.2})


def quantised(rng: random.Random, dtype: str) -> Case:
    """The same of 8 bits, with scales, and sizes that libraries can take. Whole numbers may go without."""

    def kind() -> dict[str, Any]:
        scaling = rng.choice(("rowwise", "rowwise", "scalar") if dtype != "int8" else ("", "", "rowwise"))
        return {"dtype": dtype, "layout": "nt", "scaling": scaling, **({"out_dtype": "bfloat16"} if scaling else {})}

    return _drawn(rng, kind, multiple=16)


def float8(rng: random.Random) -> Case:
    return quantised(rng, "float8_e4m3fn")


def batched(rng: random.Random) -> Case:
    """Several small products at once, one in five of them of 32 bits."""
    while True:
        batch, m = log_uniform(rng, 2, 256), log_uniform(rng, 1, 4096)
        n, k, layout = log_uniform(rng, 16, 4096), log_uniform(rng, 16, 4096), rng.choice(("nn", "nt", "tn"))
        dtype = rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32"))
        if rng.random() < 0.5:  # as sizes of heads and hidden layers are
            n, k = _up_to(n, 64), _up_to(k, 64)
        if 2.0 * batch * m * n * k <= MOST_FLOPS / 4 and 2 * batch * (m * n + m * k + n * k) <= MOST_BYTES / 2:
            return Case.of("matmul", b=batch, m=m, n=n, k=k, layout=layout, dtype=dtype)


def epilogue(rng: random.Random) -> Case:
    """With a bias, an activation or both: four in seven of 16 bits, the others of 32 or 8 bits or several at once."""
    plain = rng.choice((draw, draw, draw, draw, float32, batched, float8))(rng)
    activation, bias = rng.choice((("", True), ("gelu", True), ("silu", False), ("relu", True), ("gelu", False)))
    return Case.of("matmul", **plain.sizes, bias=bias, activation=activation)


DRAWS = {
    "random": draw,
    "batched": batched,
    "float32": float32,
    "float8": float8,
    "int8": lambda rng: quantised(rng, "int8"),
    "epilogue": epilogue,
}


def _drawn(rng: random.Random, kind: Callable[[], dict[str, Any]], multiple: int = 1) -> Case:
    while True:
        m, n, k, layout = _any_size(rng) if rng.random() < 0.5 else _layer(rng)
        n, k = _up_to(n, multiple), _up_to(k, multiple)
        if 2.0 * m * n * k <= MOST_FLOPS and 2 * (m * n + m * k + n * k) <= MOST_BYTES:
            return Case.of("matmul", **{"m": m, "n": n, "k": k, "layout": layout, **kind()})


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _any_size(rng: random.Random) -> tuple[int, int, int, str]:
    m, n, k = log_uniform(rng, 1, 16384), log_uniform(rng, 16, 16384), log_uniform(rng, 16, 16384)
    return m, n, k, rng.choice(("nn", "nt", "tn"))


def _layer(rng: random.Random) -> tuple[int, int, int, str]:
    model = rng.choice(MODELS)
    first = model.inner * (2 if model.gated and rng.random() < 0.5 else 1)
    n, k = rng.choice(_widths(model, first))
    return log_uniform(rng, 1, 16384), n, k, "nt"


def _widths(model: Model, first: int) -> tuple[tuple[int, int], ...]:
    """N and K of a model's four products, the first of its MLP this wide."""
    heads = model.heads * model.head_dim
    qkv = heads + 2 * model.heads_kv * model.head_dim
    return (qkv, model.hidden), (model.hidden, heads), (first, model.hidden), (model.hidden, model.inner)


_LAYERS = frozenset(widths for model in MODELS for times in (1, 2) for widths in _widths(model, times * model.inner))


def of_a_model(case: Case) -> bool:
    """Whether a product is a layer of a published model."""
    sizes = case.sizes
    return sizes.get("layout") == "nt" and (sizes["n"], sizes["k"]) in _LAYERS
