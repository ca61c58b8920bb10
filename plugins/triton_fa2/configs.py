"""Which tiles, warps and stages are tried, and what they cost.

A config is chosen by two things: how wide the head is in registers (its width class), and which matrix instructions the
GPU has (its family): `mma` works on registers, `wgmma` (Hopper) and `tcgen05` (Blackwell) read shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Reason
from registry.ops.attention.triton_tiles import (
    KEY,
    MMA_BACKWARD,
    QUERY,
    TF32_FORWARD,
    TILE,
    Config,
    backward_configs_of,
    copy_reasons,
    family,
    float32_backward,
    ieee_backward_reasons,
    padded,
)
from registry.plugins.triton_fa2.shared_memory import MEASURED

# Fastest first, as measured on an H200 (benchmarks/results/h200); the lists for the other families only by what the
# compiler says of registers and spills. The last of each has one stage: it needs no asynchronous copy.
FORWARD_TILES = {
    "wgmma": {
        64: [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 1)],
        128: [(128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 1)],
        256: [(128, 64, 8, 2), (64, 32, 8, 1)],
        512: [(128, 32, 8, 2), (32, 16, 8, 1)],
        576: [(128, 64, 8, 1), (32, 16, 8, 1)],
    },
    "mma": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1)],
        128: [(64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 4, 1)],
        256: [(64, 32, 8, 2), (64, 32, 8, 1)],
        512: [(32, 32, 8, 2), (32, 16, 8, 1)],
        576: [(32, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 1)],
    },
    "tcgen05": {
        64: [(128, 64, 4, 2), (64, 64, 4, 1)],
        128: [(128, 64, 8, 2), (64, 64, 4, 1)],
        256: [(64, 32, 8, 2), (64, 32, 8, 1)],
        512: [(32, 32, 8, 2), (32, 16, 8, 1)],
        576: [(32, 32, 8, 2), (32, 16, 8, 1)],
    },
}
# (query pass, key pass, dK and dV apart)
BACKWARD_TILES = {
    "wgmma": {
        64: [
            ((64, 64, 4, 3), (64, 64, 4, 3), False),
            ((64, 64, 4, 3), (32, 64, 4, 3), False),
            ((64, 64, 4, 1), (32, 64, 4, 1), False),
        ],
        128: [((128, 64, 8, 3), (32, 128, 8, 3), False), ((64, 64, 8, 1), (32, 64, 8, 1), False)],
        256: [((128, 32, 8, 2), (32, 128, 8, 2), True), ((32, 32, 8, 1), (32, 32, 4, 1), True)],
    },
    "mma": MMA_BACKWARD,
}
BACKWARD_TILES["tcgen05"] = BACKWARD_TILES["mma"]
# With a cap's tanh, a window that is bounded to the left, or any mask on a wide head, more has to be held at once, and
# some of these tiles would spill. Those problems take the ones here instead; what is not here does not spill anyway.
CROWDED_FORWARD = {
    "wgmma": {
        128: [(128, 64, 8, 3), (64, 64, 4, 1)],
        256: [(128, 32, 8, 2), (64, 32, 8, 1)],
        576: [(128, 32, 8, 1), (32, 16, 8, 1)],
    },
    "mma": {64: [(64, 32, 4, 3), (64, 64, 8, 2), (64, 64, 4, 1)]},
}
CROWDED_BACKWARD = {
    "wgmma": {
        64: [((64, 64, 4, 3), (32, 64, 8, 3), False), ((64, 64, 4, 1), (32, 64, 4, 1), False)],
        128: [((128, 64, 8, 3), (32, 64, 8, 2), True), ((64, 64, 8, 1), (32, 64, 8, 1), True)],
        256: [((128, 32, 8, 2), (16, 64, 8, 2), True), ((32, 32, 8, 1), (32, 32, 4, 1), True)],
    },
    "mma": {
        64: [((64, 64, 8, 2), (32, 32, 4, 2), False), ((64, 64, 8, 1), (32, 64, 4, 1), False)],
        128: [((64, 64, 8, 2), (32, 32, 8, 2), False), ((64, 32, 8, 1), (32, 64, 8, 1), False)],
    },
}
CROWDED_BACKWARD["tcgen05"] = CROWDED_BACKWARD["mma"]
IEEE_FORWARD = {64: [(16, 16, 4, 1)], 128: [(8, 16, 4, 1)], 256: [(8, 16, 4, 1)]}
SHORT = 64
"""Queries and keys up to which Hopper's gradients are fastest with the tiles that come last, of one stage: a block or
two fill no ring, and small tiles waste less (1.1 to 2.5 times as fast on 200 random shapes)."""
WIDEST_TILE = 256
"""Heads up to here are one tile; wider ones two, where that is less than the next power of two."""


def width(problem: Any) -> int:
    """The wider of the two padded head dims."""
    columns = max(sum(head_tiles(problem.head_dim)), padded(problem.head_dim_v))
    return columns if columns <= WIDEST_TILE else max(512, columns)


def _tiles(problem: Any, usual: Mapping[str, Any], crowded: Mapping[str, Any]) -> list[Any]:
    kind, columns = family(problem.target.sm), max(64, width(problem))
    bounded = problem.window is not None and (problem.window[0] >= 0 or columns > WIDEST_TILE)
    full = problem.softcap or bounded or (problem.causal and columns > WIDEST_TILE)
    found: list[Any] | None = crowded.get(kind, {}).get(columns) if full else None
    return usual[kind][columns] if found is None else found


def forward_configs(problem: Any) -> list[dict[str, Any]]:
    if problem.dtype == "float32":
        tiles = (IEEE_FORWARD if problem.ieee else TF32_FORWARD)[min(max(64, width(problem)), WIDEST_TILE)]
    else:
        tiles = _tiles(problem, FORWARD_TILES, CROWDED_FORWARD)
    return [dict(zip(TILE, tile, strict=True)) for tile in tiles]


def backward_configs(problem: Any) -> list[dict[str, Any]]:
    if problem.dtype == "float32":
        found = float32_backward(problem, max(64, width(problem)))
    else:
        found = _tiles(problem, BACKWARD_TILES, CROWDED_BACKWARD)
        if problem.target.sm == 90 and max(problem.seqlen_q, problem.seqlen_k) <= SHORT:
            found = found[::-1]
    return backward_configs_of(found)


def head_tiles(head_dim: int) -> tuple[int, int]:
    """The widths of the two tiles that hold a row of q or k: a power of two, and what a wide head has beyond (or 0)."""
    whole = padded(head_dim)
    first, rest = whole // 2, padded(max(64, head_dim - whole // 2))
    return (first, rest) if head_dim > WIDEST_TILE and rest < first else (whole, 0)


# --- registers ----------------------------------------------------------------------------------------------------


def forward_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    """As for copies; and no wide heads of float32."""
    yield from copy_reasons(problem, config)
    if problem.dtype == "float32" and width(problem) > WIDEST_TILE:
        field = "head_dim" if problem.head_dim > WIDEST_TILE else "head_dim_v"
        allowed = f"up to {WIDEST_TILE} in float32: wider rows spill registers"
        yield Reason("registers", field, getattr(problem, field), allowed, "bfloat16 and float16 run wider heads")


def backward_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    """As for the forward pass; and no gradients of float32 without tf32 where their rows do not fit the registers."""
    yield from copy_reasons(problem, config)
    yield from ieee_backward_reasons(problem, width(problem))


# --- shared memory: shared_memory.py has what the compiler asks for, a test holds it to that -----------------------


def key(kernel: str, kind: str, dtype: str, ieee: bool, columns: int, tile: tuple[Any, ...]) -> str:
    kind = "any" if ieee else kind  # plain FMAs are the same everywhere
    return " ".join(map(str, (kernel, kind, "ieee" if ieee else dtype, columns, *tile)))


def bound(kernel: str, itemsize: int, columns: int, m: int, n: int, stages: int) -> int:
    """An upper bound for tiles that nobody measured: every tile that can be alive, once or once a stage."""
    moving, fixed = (n, m) if kernel != "key" else (m, n)
    return itemsize * columns * (2 * stages * moving + 2 * fixed) + m * n * itemsize + 16 * stages * moving + 2048


def _need(kernel: str, problem: Any, tile: tuple[Any, ...]) -> int:
    dtype, ieee, columns = problem.dtype, problem.ieee, width(problem)
    itemsize = 4 if dtype == "float32" else 2
    name = key(kernel, family(problem.target.sm), "tf32" if dtype == "float32" else "16 bit", ieee, columns, tile)
    found = MEASURED.get(name)
    m, n, _, stages = tile[:4]
    return bound(kernel, itemsize, columns, m, n, stages) if found is None else found


def forward_shared_memory(problem: Any, config: Config) -> int:
    return _need("forward", problem, tuple(config[name] for name in TILE))


def backward_shared_memory(problem: Any, config: Config) -> int:
    """The larger of the passes: they run one after the other."""
    query = tuple(config[name] for name in QUERY)
    key_tile = tuple(config[name] for name in KEY)
    kernels = ("key dk", "key dv") if config["KEY_SPLIT"] else ("key",)
    return max(_need("query", problem, query), *(_need(kernel, problem, key_tile) for kernel in kernels))
