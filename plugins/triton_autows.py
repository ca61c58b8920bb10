"""The FlashAttention-2 body with Triton's automatic warp specialization: what the compiler does alone.

`tl.range(..., warp_specialize=True)` asks the compiler to split the loop into a producer of tiles and their
consumers. On Hopper, Triton 3.6 does so under narrow conditions, and silently leaves the loop as it is otherwise:

    num_warps == 4 exactly          it adds the other warp groups itself: 384 threads in all
    descriptors made in the kernel  no partition of the data is found for descriptors made on the host
    one loop, no `else`             a second (masked) loop stops the compiler with an assertion: so full attention only
    head dim 64 or 128              256 needs 262 KB of shared memory
    no log-sum-exp                  measured on an H200: the output is right, but a store of one value a row leaves
                                    NaN from row 64 of each tile of 128 on, as the compiler splits a tile in two

The declaration says exactly that; without an LSE there is no training either. tests/test_triton_autows_compile.py
proves from the machine code that the warps are specialised, and benchmarks place it beside triton_fa2 (the same body
without) and gluon_fa3 (a pipeline written out).

Shape suffixes: M query rows, N keys of a tile, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from registry import Design, Requires, Variant, hookimpl
from registry.compiling import Build
from registry.launch import StandIn
from registry.ops.attention import new_out

LOG2_E = 1.4426950408889634


@triton.jit
def attention_autows(
    q_ptr, k_ptr, v_ptr, out_ptr,
    # Strides of rows, heads and batches, in units of 8 elements (16 bytes): descriptors ask for that.
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int64, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    heads_q, group, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1) // heads_q
    head = tl.program_id(1) % heads_q
    head_kv = head // group
    first_row = tl.program_id(0) * BLOCK_M
    q = tl.make_tensor_descriptor(
        q_ptr + (batch * q_batch + head * q_head) * 8, [seqlen_q, HEAD_DIM], [q_row * 8, 1], [BLOCK_M, HEAD_DIM]
    )
    k = tl.make_tensor_descriptor(
        k_ptr + (batch * k_batch + head_kv * k_head) * 8, [seqlen_k, HEAD_DIM], [k_row * 8, 1], [BLOCK_N, HEAD_DIM]
    )
    v = tl.make_tensor_descriptor(
        v_ptr + (batch * v_batch + head_kv * v_head) * 8, [seqlen_k, HEAD_DIM], [v_row * 8, 1], [BLOCK_N, HEAD_DIM]
    )
    out = tl.make_tensor_descriptor(
        out_ptr + (batch * out_batch + head * out_head) * 8, [seqlen_q, HEAD_DIM], [out_row * 8, 1], [BLOCK_M, HEAD_DIM]
    )
    q_MD = q.load([first_row, 0])
    acc_MD = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.range(0, seqlen_k, BLOCK_N, warp_specialize=True):
        k_ND = k.load([n, 0])
        scores_MN = tl.dot(q_MD, k_ND.T)
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * scale_log2)
        p_MN = tl.exp2(scores_MN * scale_log2 - new_max_M[:, None])
        rescale_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
        acc_MD = acc_MD * rescale_M[:, None]
        v_ND = v.load([n, 0])
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD)
        max_M = new_max_M
    out.store([first_row, 0], (acc_MD / sum_M[:, None]).to(out_ptr.dtype.element_ty))


# --- the host side ------------------------------------------------------------------------------------------------


def _call(q: Any, k: Any, v: Any, out: Any, scale: float, config: Mapping[str, Any]) -> tuple[Any, ...]:
    batch, heads, seqlen_q, head_dim = q.shape
    strides = {
        f"{name}_{dim}": tensor.stride(number) // 8 if tensor.shape[number] > 1 else 0
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))
        for number, dim in enumerate(("batch", "head", "row"))
    }
    # A row stride of one single row may be anything; a descriptor wants it sensible.
    for name in ("q_row", "k_row", "v_row", "out_row"):
        strides[name] = strides[name] or head_dim // 8
    arguments = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, **strides, heads_q=heads, group=heads // k.shape[1],
        seqlen_q=seqlen_q, seqlen_k=k.shape[2], scale_log2=scale * LOG2_E,
    )  # fmt: skip
    constants = dict(HEAD_DIM=head_dim, BLOCK_M=config["BLOCK_M"], BLOCK_N=config["BLOCK_N"])
    return (triton.cdiv(seqlen_q, config["BLOCK_M"]), batch * heads), arguments, constants


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that the kernel makes."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, config: Mapping[str, Any],
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Full attention over lengths that are multiples of the key block. It has no LSE to return."""
    if scale < 0:  # the kernel takes maxima before it scales
        q, scale = -q, -scale
    out = new_out(q, v)
    grid, arguments, constants = _call(q, k, v, out, scale, config)
    triton.set_allocator(_scratch)
    attention_autows[grid](**arguments, **constants, num_warps=4, num_stages=config["num_stages"])
    return out, None


def builds(problem: Any, config: Mapping[str, Any]) -> list[Build]:
    """What a call would compile."""
    q, k, v = (StandIn.of(fact) for fact in problem.operands[:3])
    meta = [torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device="meta") for t in (q, v)]
    out = new_out(*meta)
    grid, arguments, constants = _call(q, k, v, StandIn(out.shape, out.dtype, out.stride()), 1.0, config)
    options = {"num_warps": 4, "num_stages": config["num_stages"]}
    return [Build.of(attention_autows, arguments, constants=constants, options=options, arch=problem.target)]


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Q, the staged output, K and V once a stage, and the barriers between producer and consumers."""
    m, n, stages = config["BLOCK_M"], config["BLOCK_N"], config["num_stages"]
    return 2 * problem.head_dim * (2 * m + 2 * n * stages) + 120 * stages + 176


@hookimpl
def registry_variants() -> list[Variant]:
    return [
        Variant(
            "triton_autows", op="attention", run=attention, builds=builds,
            requires=Requires(
                arch=("sm90",), dtypes=("float16", "bfloat16"), head_dim=(64, 128), head_dim_multiple=64,
                layouts=("bhsd", "bshd", "strided"), base_alignment=16, stride_alignment=16, seqlen_k_multiple=128,
                gqa=True, cross_length=True, deterministic=True, toolchain={"triton": ">=3.6,<3.7"},
                shared_memory=shared_memory,
            ),
            design=Design(
                warp_groups=2, pipeline_stages=2, warp_specialized=True, pipeline_tasks=2, tile=(128, 128)
            ),
            configs=[
                {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2}, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2},
            ],
            summary="FlashAttention-2 as Triton specialises it by itself on Hopper (full attention, no LSE)",
        ),
    ]  # fmt: skip
