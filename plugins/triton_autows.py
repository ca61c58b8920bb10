"""The FlashAttention-2 body with Triton's automatic warp specialization: what the compiler does alone.

`tl.range(..., warp_specialize=True)` asks the compiler to split the loop into a producer of tiles and their consumers.
On Hopper it does so under narrow conditions; otherwise it fails, leaves the loop as it is, or lets two warp groups do
the same work. docs/autows.md lists each case with its proof. This body stays inside of the conditions:

    num_warps == 4 exactly         it adds the other warp groups itself: 384 threads in all
    descriptors made in the kernel those made on the host cannot be split between two consumers
    one loop                       so the mask is applied to every block of keys, not only to those on its edge
    128 rows                       64 for each of two consumers; of 64 rows both would compute all
    rows counted from the tile     for the second consumer the compiler moves the descriptor's first row by 64, and with
                                   it every vector made from that value: row numbers would be moved twice

The last one was found on an H200: the log-sum-exp of rows 64 to 127 of each tile was never written. What a problem may
ask for and the compiler cannot do is an erratum, by Triton's version. tests/plugins/test_triton_autows_compile.py
proves from the machine code that what is legal is specialised, and that what is an erratum is not. The benchmarks
place it beside triton_fa2 (the same body without) and gluon_fa3 (a pipeline written out).

Shape suffixes: M query rows, N keys of a tile, D head dim, V head dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.attention.calls import FORWARD, out_of, row_sums
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.designs import MOST_ALONG_Y

LOG2_E = 1.4426950408889634
UNIT_BYTES = 16  # what descriptors ask of strides


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)


@triton.jit(do_not_specialize=["heads_q", "group", "seqlen_q", "seqlen_k", "window_left", "window_right"])
def attention_autows(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    # Strides of rows, heads and batches, in units of UNIT elements: that is how the compiler knows them for aligned.
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_row: tl.int64,
    heads_q,
    group,
    seqlen_q,
    seqlen_k,
    scale_log2,
    softcap_log2,
    window_left,
    window_right,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_V: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = tl.program_id(1) // heads_q
    head = tl.program_id(1) % heads_q
    head_kv = head // group
    first_row = tl.program_id(0) * BLOCK_M
    # What lies beyond a tensor's rows and columns is read as zeros and not written: head dims need not fill a tile.
    q = tl.make_tensor_descriptor(
        q_ptr + (batch * q_batch + head * q_head) * UNIT, [seqlen_q, HEAD_DIM], [q_row * UNIT, 1], [BLOCK_M, PADDED_D]
    )
    k = tl.make_tensor_descriptor(
        k_ptr + (batch * k_batch + head_kv * k_head) * UNIT,
        [seqlen_k, HEAD_DIM],
        [k_row * UNIT, 1],
        [BLOCK_N, PADDED_D],
    )
    v = tl.make_tensor_descriptor(
        v_ptr + (batch * v_batch + head_kv * v_head) * UNIT,
        [seqlen_k, HEAD_DIM_V],
        [v_row * UNIT, 1],
        [BLOCK_N, PADDED_V],
    )
    out = tl.make_tensor_descriptor(
        out_ptr + (batch * out_batch + head * out_head) * UNIT,
        [seqlen_q, HEAD_DIM_V],
        [out_row * UNIT, 1],
        [BLOCK_M, PADDED_V],
    )
    # Vectors count from the tile; what they are compared with is moved instead, as a scalar.
    rows_M, keys_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    diagonal = first_row + seqlen_k - seqlen_q  # the last key that a causal mask shows to the tile's first row
    start, end = 0, seqlen_k
    if HAS_LEFT:
        start = tl.maximum(diagonal - window_left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(diagonal + window_right + BLOCK_M, seqlen_k)
    q_MD = q.load([first_row, 0])
    acc_MV = tl.zeros([BLOCK_M, PADDED_V], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.range(start, end, BLOCK_N, warp_specialize=True):
        k_ND = k.load([n, 0])
        scores_MN = tl.dot(q_MD, k_ND.T)
        if SOFTCAP:
            scores_MN = tanh(scores_MN * scale_log2) * softcap_log2
            factor = 1.0
        else:
            factor = scale_log2
        if RAGGED:
            scores_MN = tl.where((keys_N < seqlen_k - n)[None, :], scores_MN, float("-inf"))
        if HAS_RIGHT:
            allowed_N = keys_N + (n - diagonal - window_right)
            scores_MN = tl.where(allowed_N[None, :] <= rows_M[:, None], scores_MN, float("-inf"))
        if HAS_LEFT:
            allowed_N = keys_N + (n - diagonal + window_left)
            scores_MN = tl.where(allowed_N[None, :] >= rows_M[:, None], scores_MN, float("-inf"))
        # The scale is positive, so the maximum can be scaled instead of each score: one FMA per score below.
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * factor)
        if HAS_LEFT or HAS_RIGHT:
            # A row that has seen no key yet would subtract -inf from -inf.
            finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        else:
            finite_max_M = new_max_M
        p_MN = tl.exp2(scores_MN * factor - finite_max_M[:, None])
        rescale_M = tl.exp2(max_M - finite_max_M)
        sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
        acc_MV = acc_MV * rescale_M[:, None]
        v_NV = v.load([n, 0])
        acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV)
        max_M = new_max_M
    if LSE:  # -inf where a row saw no key
        lse_M = (max_M + tl.log2(sum_M)) * 0.6931471805599453  # to natural logarithms
        lse_ptr += tl.program_id(1).to(tl.int64) * seqlen_q + first_row
        tl.store(lse_ptr + rows_M, lse_M, mask=rows_M < seqlen_q - first_row)
    if HAS_LEFT or HAS_RIGHT:
        sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out.store([first_row, 0], (acc_MV / sum_M[:, None]).to(out_ptr.dtype.element_ty))


# --- the host side ------------------------------------------------------------------------------------------------


def _bounds(problem: Any) -> tuple[int, int]:
    """(left, right) of the mask, -1 where that side hides nothing."""
    left, right = problem.window or (-1, -1)
    right = 0 if problem.causal else right
    return -1 if left >= problem.seqlen_k - 1 else left, -1 if right >= problem.seqlen_q - 1 else right


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    unit = UNIT_BYTES // q.dtype.itemsize
    # The stride of a single row may be anything; a descriptor wants it sensible.
    strides = {
        f"{name}_{dim}": (operand.strides[number] if operand.shape[number] > 1 else operand.shape[3]) // unit
        for name, operand in (("q", q), ("k", k), ("v", v), ("out", out))
        for number, dim in enumerate(("batch", "head", "row"))
    }
    left, right = _bounds(problem)
    factor = 1.0 / problem.softcap if problem.softcap else LOG2_E
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=row_sums(q, "lse") if problem.lse else None,
        **strides,
        heads_q=problem.heads_q,
        group=problem.heads_q // problem.heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        scale_log2=PerCall("scale", factor) if scale > 0 else 1e-30 * factor,  # -inf * 0 would be NaN
        softcap_log2=problem.softcap * LOG2_E,
        window_left=left,
        window_right=right,
    )
    constants = dict(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        PADDED_D=triton.next_power_of_2(problem.head_dim),
        PADDED_V=triton.next_power_of_2(problem.head_dim_v),
        UNIT=unit,
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        RAGGED=problem.seqlen_k % config["BLOCK_N"] != 0,
        SOFTCAP=problem.softcap != 0.0,
        LSE=problem.lse,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
    )
    grid = (triton.cdiv(problem.seqlen_q, config["BLOCK_M"]), problem.batch * problem.heads_q)
    options = {"num_warps": 4, "num_stages": config["num_stages"]}
    return [Call(attention_autows, grid, arguments, constants, options)]


HOST = Host(FORWARD, call)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that the kernel makes."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **given: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Through Triton's own launch, which asks for that memory."""
    if scale < 0:  # the kernel takes maxima before it scales
        q, scale = -q, -scale
    triton.set_allocator(_scratch)
    found: tuple[torch.Tensor, torch.Tensor | None] = HOST.run(q, k, v, scale=scale, **given)
    return found


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Q, the staged output, K and V once a stage; and at most so much for barriers between producer and consumers."""
    rows, stages = config["BLOCK_M"], config["num_stages"]
    columns = sum(triton.next_power_of_2(d) for d in (problem.head_dim, problem.head_dim_v))
    return getattr(torch, problem.dtype).itemsize * columns * (rows + config["BLOCK_N"] * stages) + 512


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    if (heads := problem.batch * problem.heads_q) > MOST_ALONG_Y:
        yield Reason("range", "batch", heads, f"at most {MOST_ALONG_Y} heads in all batches: the grid ends there")


def design(config: Mapping[str, Any]) -> Design:
    """Two consumers of 64 rows each, and a producer."""
    tile = (config["BLOCK_M"], config["BLOCK_N"])
    stages = config["num_stages"]
    return Design(warp_groups=2, pipeline_stages=stages, warp_specialized=True, pipeline_tasks=2, tile=tile)


CONFIGS = [  # at least two stages: of a loop with one, Triton 3.9 makes no producer
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2},  # fits a head dim of 256
]


@hookimpl
def registry_variants() -> list[Variant]:
    return [
        Variant(
            "triton_autows",
            op="attention",
            run=attention,
            builds=HOST.builds,
            requires=Requires(
                arch=("sm90",),
                dtypes=("float16", "bfloat16", "float32"),
                head_dim=(64, 256),
                head_dim_multiple=8,
                head_dim_v=(64, 256),
                head_dim_v_multiple=8,
                layouts=("bhsd", "bshd", "strided"),
                base_alignment=16,
                stride_alignment=16,
                causal=True,
                window=True,
                softcap=True,
                gqa=True,
                lse=True,
                cross_length=True,
                deterministic=True,
                toolchain={"triton": ">=3.6,<4"},
                shared_memory=shared_memory,
                rule=rule,
            ),
            design=design(CONFIGS[0]),
            design_of=design,
            configs=CONFIGS,
            summary="FlashAttention-2 as Triton specialises it by itself on Hopper",
        )
    ]
