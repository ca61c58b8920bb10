"""The host side: from a problem and a config to a grid, two tensor maps and the kernel's scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.attention_varlen.calls import FORWARD, out_of, row_sums
from registry.ops.attention_varlen.lengths import LENGTHS
from registry.plugins.gluon_decode.traits import DecodeTraits, traits_of
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn

LOG2E = math.log2(math.e)
OVERHEAD = 1
"""What beginning and ending a tile costs, in blocks of keys, where tiles differ."""
UNIT = 8
"""Elements that strides of q and out are counted in: 16 bytes."""
NOTHING = StandIn((1,), "int32")
"""A null pointer, for what a problem does not have."""


def tensor_map(operand: StandIn, t: DecodeTraits) -> TensorDescriptor:
    """[sequence or page, key, head, column] of a cache or of pages. A dimension of one element may carry any stride in
    torch; the map needs a multiple of 16 bytes."""
    unit = 16 // operand.dtype.itemsize
    legal = -(-operand.shape[3] // unit) * unit
    outer = [
        legal if size == 1 else stride for size, stride in zip(operand.shape[:3], operand.strides[:3], strict=True)
    ]
    block = [1, t.box, t.heads, t.panel]
    return TensorDescriptor(operand, list(operand.shape), [*outer, 1], block, swizzled(block, operand.dtype))


def _strides(operand: StandIn) -> tuple[int, int]:
    """Of rows and heads, in units; 0 where there is one of them, whose stride nobody needs."""
    row, head = (0 if n == 1 else step // UNIT for n, step in zip(operand.shape[:2], operand.strides[:2], strict=True))
    return row, head


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.gluon_decode.kernel import decode

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    t = traits_of(problem, config)
    groups = problem.heads_kv // t.heads
    programs = t.chunks * groups
    slots = 2 * programs  # of parts: each program begins in one tile, and ends in one
    (q_row, q_head), (out_row, out_head) = _strides(q), _strides(out)
    left, right = problem.window or (-1, -1)
    paged = problem.kv_layout == "paged"
    arguments = {
        "q": q,
        "k_map": tensor_map(k, t),
        "v_map": tensor_map(v, t),
        "out": out,
        "lse": row_sums(q, "lse" if problem.lse else ""),
        "parts": StandIn((slots * t.part_rows * t.head,), "float32", name="parts"),
        "sums": StandIn((slots * t.part_rows,), "float32", name="sums"),
        "counters": Zeroes(programs),
        "complaints": LENGTHS.argument,
        "cu_q": given["cu_seqlens_q"],
        "used": given["seqused_k"],
        "table": given.get("block_table", NOTHING),
        "sinks": given.get("sinks", NOTHING),
        "k_scale": given.get("k_scale", NOTHING),
        "v_scale": given.get("v_scale", NOTHING),
        "k_scale_head": given["k_scale"].strides[0] if problem.kv_scale == "head" else 0,
        "v_scale_head": given["v_scale"].strides[0] if problem.kv_scale == "head" else 0,
        "q_row": q_row,
        "q_head": q_head,
        "out_row": out_row,
        "out_head": out_head,
        "table_row": given["block_table"].strides[0] if paged else 0,
        "pages": k.shape[0],
        "batch": problem.batch,
        "total_q": problem.total_q,
        "room": given["block_table"].shape[1] * k.shape[1] if paged else k.shape[1],
        "most_q": problem.max_seqlen_q,
        "most_k": problem.max_seqlen_k,
        "overhead": OVERHEAD,
        "window_left": left,
        "window_right": 0 if problem.causal else right,
        # softcap is cap * tanh(x / cap) = cap - 2 cap / (1 + 2^(2 x log2(e) / cap))
        "scale": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }
    options = {"num_warps": 4, "maxnreg": t.launch_registers, "launch_pdl": True}
    return [Call(decode, (groups, t.chunks), arguments, {"T": t}, options)]


HOST = Host(FORWARD, call)
