"""Which tiles, warps and stages are tried, what they cost, and when asynchronous copies cannot be used.

A config is chosen by how wide the head is in registers (its width class) and by the matrix instructions of the GPU (its
family): `mma` works on registers, `wgmma` (Hopper, from 64 rows on) and `tcgen05` (Blackwell) read shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from registry import Reason
from registry.ops.attention import triton_tiles
from registry.ops.attention.triton_tiles import (
    MMA_BACKWARD,
    TF32_FORWARD,
    TILE,
    Config,
    backward_configs_of,
    family,
    float32_backward,
    ieee_backward_reasons,
    options_of,
    padded,
)

# Best first, as measured on an H200 for wgmma (see prefill.py, split.py and query_pass.py); the lists for the other
# families only by what the compiler says of registers and spills. The last of each has one stage: it needs no
# asynchronous copy.
PREFILL_TILES = {
    "wgmma": {
        64: [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 1)],
        128: [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 1)],
        256: [(128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)],
    },
    "mma": {
        64: [(64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 1)],
        128: [(64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 4, 1)],
        256: [(64, 32, 8, 2), (64, 32, 8, 1)],
    },
}
PREFILL_TILES["tcgen05"] = PREFILL_TILES["mma"]
# A scale for each key means that values are multiplied in float32 (tf32): twice the registers.
TOKEN_TILES = {
    64: [(64, 64, 8, 3), (64, 32, 8, 1)],
    128: [(64, 32, 8, 3), (64, 32, 8, 1)],
    256: [(32, 32, 8, 2), (32, 16, 8, 1)],
}
# (query pass, key pass, dK and dV apart)
BACKWARD_TILES = {
    "wgmma": {
        64: [((64, 64, 4, 3), (64, 64, 4, 2), False), ((64, 64, 4, 1), (32, 64, 4, 1), False)],
        128: [
            ((128, 64, 8, 2), (32, 128, 8, 2), False),
            ((128, 64, 8, 2), (64, 128, 8, 2), False),  # 9% faster although its loop spills: for tables to choose
            ((64, 64, 8, 1), (32, 64, 8, 1), False),
        ],
        256: [((128, 32, 8, 2), (32, 128, 8, 2), True), ((32, 32, 8, 1), (32, 32, 4, 1), True)],
    },
    "mma": MMA_BACKWARD,
}
BACKWARD_TILES["tcgen05"] = BACKWARD_TILES["mma"]
IEEE_TILES = {64: [(16, 16, 4, 1)], 128: [(16, 16, 4, 1)], 256: [(16, 16, 8, 1)]}

# Rows of a tile where keys are split -> (BLOCK_N, warps, stages, programs an SM, least blocks a program).
SPLIT_TILES = {
    64: [(64, 4, 5, 2, 2), (128, 4, 4, 2, 1), (64, 4, 3, 4, 2), (64, 4, 1, 2, 2)],
    128: [(64, 4, 3, 2, 1), (64, 4, 4, 2, 1), (64, 4, 1, 2, 2)],
    256: [(32, 4, 4, 2, 2), (32, 4, 3, 2, 2), (32, 4, 1, 2, 2)],
}
# The same for keys and values of 8 bits.
QUANTISED_TILES = {**SPLIT_TILES, 128: [(64, 2, 3, 4, 2), (64, 2, 4, 4, 2), (64, 4, 3, 2, 2), (64, 4, 1, 2, 2)]}
SPLIT_ROWS = 64


def width(problem: Any) -> int:
    """The wider of the two padded head dims, from 64 on."""
    return max(64, padded(max(problem.head_dim, problem.head_dim_v)))


def reads_shared(problem: Any, config: Config) -> bool:
    """Whether the matrix instructions read keys and values from shared memory, not from registers."""
    return family(problem.target.sm) != "mma" and config["BLOCK_M"] >= 64


# Where K and V take turns in one buffer of shared memory and V's rows are swizzled more narrowly than K's, ptxas 12.8
# loses the address of V's tile on Hopper, and the product reads other memory. They take turns where there is one stage,
# and, whatever the stages, where 8-bit tiles are converted on their way. So V's tile is then as wide as K's swizzle.
SWIZZLE = 128
"""Bytes of the widest swizzle."""


def value_width(problem: Any, config: Config) -> int:
    """Columns of a tile of values."""
    columns = max(32 if problem.kv_scale else 16, padded(problem.head_dim_v))
    in_turns = reads_shared(problem, config) if problem.kv_scale else config["num_stages"] == 1
    return max(columns, _swizzled(problem)) if in_turns and problem.dtype != "float32" else columns


def in_pairs(problem: Any, config: Config) -> bool:
    """Whether 8-bit values may be read as pairs of columns: each half of a tile has to be wide enough too."""
    return not reads_shared(problem, config) or value_width(problem, config) // 2 >= _swizzled(problem)


def _swizzled(problem: Any) -> int:
    """Columns of values that are as many bytes as K's swizzle."""
    item = 4 if problem.kv_scale == "token" else _itemsize(problem.dtype)
    return min(SWIZZLE, padded(problem.head_dim) * _itemsize(problem.dtype)) // item


def split_options(config: Config) -> dict[str, int]:
    """The same, with registers for as many programs as are to be on an SM together."""
    return options_of(config) | ({"maxnreg": registers(config)} if registers(config) < 255 else {})


def registers(config: Config) -> int:
    """Of each thread, where so many programs are on an SM."""
    return min(255, 65536 // (32 * config["num_warps"] * config["PER_SM"]) // 8 * 8)


def prefill_configs(problem: Any) -> list[dict[str, Any]]:
    if problem.dtype == "float32":
        tiles = (IEEE_TILES if problem.ieee else TF32_FORWARD)[width(problem)]
    else:
        tiles = PREFILL_TILES[family(problem.target.sm)][width(problem)]
        if problem.kv_scale == "token":
            tiles = TOKEN_TILES[width(problem)]
    return [dict(zip(TILE, tile, strict=True)) for tile in tiles]


def split_configs(problem: Any) -> list[dict[str, Any]]:
    """A tile has as many rows as a key head has (query, head) pairs at most, up to SPLIT_ROWS."""
    group = problem.heads_q // problem.heads_kv
    rows = min(SPLIT_ROWS, padded(problem.max_seqlen_q * group))
    if problem.dtype == "float32":
        tiles = [
            (16 if problem.ieee else min(m, rows), n, warps, stages, 2, 2)
            for m, n, warps, stages in (IEEE_TILES if problem.ieee else TF32_FORWARD)[width(problem)]
        ]
    else:
        found = (QUANTISED_TILES if problem.kv_scale else SPLIT_TILES)[width(problem)]
        token = problem.kv_scale == "token"
        rows = min(rows, 32) if token else rows
        tiles = [_fitted(rows, min(n, 32) if token else n, 8 if token else warps, *rest) for n, warps, *rest in found]
    return [dict(zip((*TILE, "PER_SM", "LEAST"), tile, strict=True)) for tile in dict.fromkeys(tiles)]


def _fitted(rows: int, n: int, warps: int, stages: int, per_sm: int, least: int) -> tuple[int, ...]:
    """The tile with as many warps as its rows need, and no more of them on an SM than have registers there."""
    warps = max(warps, rows // 8)
    return rows, n, warps, stages, min(per_sm, 12 // warps), least


def backward_configs(problem: Any) -> list[dict[str, Any]]:
    columns = width(problem)
    if problem.dtype == "float32":
        found = float32_backward(problem, columns)
    else:
        found = BACKWARD_TILES[family(problem.target.sm)][columns]
    return backward_configs_of(found)


# --- asynchronous copies ------------------------------------------------------------------------------------------


def copy_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    return triton_tiles.copy_reasons(problem, config, written=("out",))


def backward_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    """As for the forward pass; and no gradients of float32 without tf32 where their rows do not fit the registers."""
    yield from copy_reasons(problem, config)
    yield from ieee_backward_reasons(problem, width(problem))


def quantised_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    """float8_e4m3fn is converted by instructions that sm80 and sm86 do not have."""
    yield from copy_reasons(problem, config)
    if problem.kv_dtype == "float8_e4m3fn" and problem.target.sm < 89:
        yield Reason(
            "kv_dtype", "kv_dtype", problem.kv_dtype, f"int8, or float8_e4m3fn from sm89 on, on {problem.target.arch}"
        )


# --- shared memory --------------------------------------------------------------------------------------------------


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "float8_e4m3fn": 1, "int8": 1}.get(dtype, 2)


def forward_shared_memory(problem: Any, config: Config) -> int:
    """An upper bound of what the compiler asks for."""
    item, kv_item = _itemsize(problem.dtype), _itemsize(problem.kv_dtype)
    columns = padded(problem.head_dim) + padded(problem.head_dim_v)
    m, n, stages = config["BLOCK_M"], config["BLOCK_N"], config["num_stages"]
    reads_shared = family(problem.target.sm) != "mma" and m >= 64
    buffers = max(1, stages if reads_shared else stages - 1)
    moving, held = kv_item * columns * n * buffers, item * m * (padded(problem.head_dim) + n)
    need = moving + held + 16 * (m + n) * stages + 2048
    if kv_item != item and reads_shared:  # converted tiles
        need += item * columns * n
    if problem.kv_scale == "token":  # probabilities, and values in float32
        need += 4 * n * (m + padded(problem.head_dim_v))
    return need


def backward_shared_memory(problem: Any, config: Config) -> int:
    """The same for the larger of the passes: they run one after the other."""
    item, columns = _itemsize(problem.dtype), padded(problem.head_dim) + padded(problem.head_dim_v)
    query = (config["QUERY_M"], config["QUERY_N"], config["query_stages"])
    key = (config["KEY_N"], config["KEY_M"], config["key_stages"])
    return max(
        item * columns * (held + moving * stages) + 2 * item * held * moving + 16 * (held + moving) * stages + 2048
        for held, moving, stages in (query, key)
    )
