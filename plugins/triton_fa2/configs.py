"""Which tiles, warps and stages are tried, what they cost, and when asynchronous copies cannot be used.

A config is chosen by two things: how wide the head is in registers (its width class), and which matrix instructions the
GPU has (its family): `mma` works on registers, `wgmma` (Hopper) and `tcgen05` (Blackwell) read shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Design, Reason
from registry.plugins.triton_fa2.shared_memory import MEASURED

Config = Mapping[str, Any]
FORWARD = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
QUERY = ("QUERY_M", "QUERY_N", "query_warps", "query_stages")
KEY = ("KEY_M", "KEY_N", "key_warps", "key_stages")

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
    "mma": {
        64: [((64, 64, 4, 2), (32, 64, 4, 2), False), ((64, 64, 8, 1), (32, 64, 4, 1), False)],
        128: [((64, 64, 8, 2), (32, 64, 8, 2), False), ((64, 32, 8, 1), (32, 64, 8, 1), False)],
        256: [((32, 32, 4, 2), (32, 64, 8, 1), True), ((32, 32, 8, 1), (32, 64, 8, 1), True)],
    },
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
# float32 runs on the tensor cores as tf32, or by ordinary FMAs (ieee), which hold whole rows of a tile in registers:
# the gradients hold two such rows, so heads wider than IEEE_BACKWARD_WIDTH would spill in every tile that was tried.
TF32_FORWARD = {64: [(64, 32, 8, 1)], 128: [(64, 32, 8, 1)], 256: [(32, 16, 4, 1)]}
TF32_BACKWARD = {
    64: [((32, 32, 4, 1), (16, 32, 4, 1), True)],
    128: [((32, 32, 4, 1), (16, 16, 4, 1), True)],
    256: [((16, 16, 4, 1), (16, 16, 4, 1), True)],
}
IEEE_FORWARD = {64: [(16, 16, 4, 1)], 128: [(8, 16, 4, 1)], 256: [(8, 16, 4, 1)]}
IEEE_BACKWARD = {64: [((8, 16, 4, 1), (16, 8, 4, 1), True)], 128: [((8, 16, 8, 1), (16, 16, 8, 1), True)]}
IEEE_BACKWARD_WIDTH = 128
SHORT = 64
"""Queries and keys up to which Hopper's gradients are fastest with the tiles that come last, of one stage: a block or
two fill no ring, and small tiles waste less (1.1 to 2.5 times as fast on 200 random shapes)."""
WIDEST_TILE = 256
"""Heads up to here are one tile; wider ones two, where that is less than the next power of two."""


def family(sm: int) -> str:
    """The matrix instructions of a compute capability."""
    return "wgmma" if sm == 90 else "tcgen05" if 100 <= sm < 120 else "mma"


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
    return [dict(zip(FORWARD, tile, strict=True)) for tile in tiles]


def backward_configs(problem: Any) -> list[dict[str, Any]]:
    if problem.dtype == "float32":
        columns = max(64, width(problem))
        found = IEEE_BACKWARD[min(IEEE_BACKWARD_WIDTH, columns)] if problem.ieee else TF32_BACKWARD[columns]
    else:
        found = _tiles(problem, BACKWARD_TILES, CROWDED_BACKWARD)
        if problem.target.sm == 90 and max(problem.seqlen_q, problem.seqlen_k) <= SHORT:
            found = found[::-1]
    return [dict(zip((*QUERY, *KEY, "KEY_SPLIT"), (*query, *key, apart), strict=True)) for query, key, apart in found]


def padded(head_dim: int) -> int:
    """The tile width that holds a head dim: the next power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def head_tiles(head_dim: int) -> tuple[int, int]:
    """The widths of the two tiles that hold a row of q or k: a power of two, and what a wide head has beyond (or 0)."""
    whole = padded(head_dim)
    first, rest = whole // 2, padded(max(64, head_dim - whole // 2))
    return (first, rest) if head_dim > WIDEST_TILE and rest < first else (whole, 0)


def options(config: Config, which: tuple[str, ...]) -> dict[str, int]:
    """Triton's launch options of one kernel of a config."""
    return {"num_warps": config[which[2]], "num_stages": config[which[3]]}


def forward_design(config: Config) -> Design:
    return Design(
        warp_groups=max(1, config["num_warps"] // 4),
        pipeline_stages=config["num_stages"],
        tile=(config["BLOCK_M"], config["BLOCK_N"]),
    )


def backward_design(config: Config) -> Design:
    """The key pass is the longer one: its traits stand for both."""
    return Design(
        warp_groups=max(1, config["key_warps"] // 4),
        pipeline_stages=config["key_stages"],
        tile=(config["KEY_M"], config["KEY_N"]),
    )


# --- asynchronous copies ------------------------------------------------------------------------------------------


def copy_reasons(problem: Any, config: Config) -> Iterator[Reason]:
    """Why a pipelined config cannot run: cp.async moves 4, 8 or 16 bytes, so a tile must lie in runs of at least 4.

    The compiler knows of a pointer that it is a multiple of 16 bytes, or nothing; of strides it knows STRIDE_UNIT. A
    run of one 16-bit element is not an error to Triton: it drops the pipeline silently, and such a config would not be
    what its Design says. A config with one stage runs on any strides.
    """
    if max(config.get(name, 1) for name in ("num_stages", "query_stages", "key_stages")) == 1:
        return
    for fact in problem.operands:
        if fact.itemsize >= 4:
            continue
        allowed = "runs of at least 4 bytes for cp.async (or a config with 1 stage)"
        if not fact.unit_inner_stride:
            fix = f"call .contiguous() on {fact.name}: its inner stride is {fact.strides[-1]}"
            yield Reason("async_copy", "unit_inner_stride", fact.strides[-1], allowed, fix, fact.name)
        elif fact.stride_alignment < 4:
            dim, worst = next((d, s) for d, s in fact.outer_strides() if s % 4)
            what = f"its stride of {worst} bytes in dimension {dim} is no multiple of 4"
            fix = f"call .contiguous() on {fact.name}: {what}"
            yield Reason("async_copy", "stride_alignment", f"{worst} bytes", allowed, fix, fact.name)
        if fact.base_alignment < 16:
            got = f"{fact.base_alignment} bytes"
            fix = f"call .clone() on {fact.name}: its storage offset leaves the base aligned to {got}"
            yield Reason("async_copy", "base_alignment", got, "multiples of 16 bytes", fix, fact.name)


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
    if problem.dtype == "float32" and problem.ieee and width(problem) > IEEE_BACKWARD_WIDTH:
        field = "head_dim" if problem.head_dim > IEEE_BACKWARD_WIDTH else "head_dim_v"
        allowed = f"up to {IEEE_BACKWARD_WIDTH} in float32 without tf32: wider rows spill registers"
        fix = 'torch.set_float32_matmul_precision("high") permits tf32, which runs up to 256'
        yield Reason("registers", field, getattr(problem, field), allowed, fix)


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
    return _need("forward", problem, tuple(config[name] for name in FORWARD))


def backward_shared_memory(problem: Any, config: Config) -> int:
    """The larger of the passes: they run one after the other."""
    query = tuple(config[name] for name in QUERY)
    key_tile = tuple(config[name] for name in KEY)
    kernels = ("key dk", "key dv") if config["KEY_SPLIT"] else ("key",)
    return max(_need("query", problem, query), *(_need(kernel, problem, key_tile) for kernel in kernels))
