"""What attention in Triton has alike, dense or ragged: tiles by the GPU's matrix instructions, gradients in two passes,
and when asynchronous copies cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry.contract.capability import Reason

Config = Mapping[str, Any]
TILE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
QUERY = ("QUERY_M", "QUERY_N", "query_warps", "query_stages")
KEY = ("KEY_M", "KEY_N", "key_warps", "key_stages")

# (query pass, key pass, dK and dV apart), by what the compiler says of registers and spills.
MMA_BACKWARD = {
    64: [((64, 64, 4, 2), (32, 64, 4, 2), False), ((64, 64, 8, 1), (32, 64, 4, 1), False)],
    128: [((64, 64, 8, 2), (32, 64, 8, 2), False), ((64, 32, 8, 1), (32, 64, 8, 1), False)],
    256: [((32, 32, 4, 2), (32, 64, 8, 1), True), ((32, 32, 8, 1), (32, 64, 8, 1), True)],
}
# float32 runs on the tensor cores as tf32, or by ordinary FMAs (ieee), which hold whole rows of a tile in registers:
# the gradients hold two such rows, so heads wider than IEEE_BACKWARD_WIDTH would spill in every tile that was tried.
TF32_FORWARD = {64: [(64, 32, 8, 1)], 128: [(64, 32, 8, 1)], 256: [(32, 16, 4, 1)]}
TF32_BACKWARD = {
    64: [((32, 32, 4, 1), (16, 32, 4, 1), True)],
    128: [((32, 32, 4, 1), (16, 16, 4, 1), True)],
    256: [((16, 16, 4, 1), (16, 16, 4, 1), True)],
}
IEEE_BACKWARD = {64: [((8, 16, 4, 1), (16, 8, 4, 1), True)], 128: [((8, 16, 8, 1), (16, 16, 8, 1), True)]}
IEEE_BACKWARD_WIDTH = 128


def family(sm: int) -> str:
    """The matrix instructions of a compute capability."""
    return "wgmma" if sm == 90 else "tcgen05" if 100 <= sm < 120 else "mma"


def padded(head_dim: int) -> int:
    """The tile width that holds a head dim: the next power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def options_of(config: Config, which: tuple[str, ...] = TILE) -> dict[str, int]:
    """Triton's launch options of one kernel of a config."""
    return {"num_warps": config[which[2]], "num_stages": config[which[3]]}


def float32_backward(problem: Any, columns: int) -> list[Any]:
    """Tiles of gradients of float32, of so wide heads."""
    return IEEE_BACKWARD[min(IEEE_BACKWARD_WIDTH, columns)] if problem.ieee else TF32_BACKWARD[columns]


def backward_configs_of(tiles: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip((*QUERY, *KEY, "KEY_SPLIT"), (*query, *key, apart), strict=True)) for query, key, apart in tiles]


def copy_reasons(problem: Any, config: Config, *, written: tuple[str, ...] = ()) -> Iterator[Reason]:
    """Why a pipelined config cannot run: cp.async moves 4, 8 or 16 bytes, so a tile must lie in runs of at least 4.

    The compiler knows of a pointer that it is a multiple of 16 bytes, or nothing; of strides it knows STRIDE_UNIT. A
    run of one 16-bit element is not an error to Triton: it drops the pipeline silently, and such a config would not be
    what its Design says. A config with one stage runs on any strides. Operands that are `written` are not copied.
    """
    if max(config.get(name, 1) for name in ("num_stages", "query_stages", "key_stages")) == 1:
        return
    for fact in problem.operands:
        if fact.itemsize >= 4 or fact.name in written:
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


def ieee_backward_reasons(problem: Any, columns: int) -> Iterator[Reason]:
    """No gradients of float32 without tf32 where their rows, so wide, do not fit the registers."""
    if problem.dtype == "float32" and problem.ieee and columns > IEEE_BACKWARD_WIDTH:
        field = "head_dim" if problem.head_dim > IEEE_BACKWARD_WIDTH else "head_dim_v"
        allowed = f"up to {IEEE_BACKWARD_WIDTH} in float32 without tf32: wider rows spill registers"
        fix = 'torch.set_float32_matmul_precision("high") permits tf32, which runs up to 256'
        yield Reason("registers", field, getattr(problem, field), allowed, fix)
