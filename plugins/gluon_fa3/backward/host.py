"""The host side of the backward: three launches, and the workspaces between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.attention.calls import BACKWARD, dense_like
from registry.plugins.gluon_fa3.backward.kernel import attention_backward
from registry.plugins.gluon_fa3.backward.sums import after, before
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, Traits, traits_of
from registry.plugins.gluon_fa3.host import LOG2E, tensor_map
from registry.plugins.gluon_fa3.traits import UNLIMITED, window_bounds
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.hopper import linear
from registry.toolbox.launch import StandIn

SECTION = 32 << 20  # bytes of Q, dO and dQ's sums that a section of heads may take: what stays in a 50 MB L2 cache
BEFORE_ROWS = 16


def _flat_map(workspace: StandIn) -> TensorDescriptor:
    """Of a workspace [blocks, rows, columns]: one block a box, unswizzled."""
    _, rows, columns = workspace.shape
    block = [1, rows, columns]
    return TensorDescriptor(
        workspace, list(workspace.shape), [rows * columns, columns, 1], block, linear(3, torch.float32)
    )


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v, out, grad_out, lse = (given[name] for name in ("q", "k", "v", "out", "grad_out", "lse"))
    dq, dk, dv = (dense_like(x, f"d{x.name}") for x in (q, k, v))
    t = traits_of(problem, config)
    row_blocks = -(-problem.seqlen_q // t.block_m)
    blocks = problem.batch * problem.heads_q * row_blocks
    stats = StandIn((blocks, 2, t.block_m), "float32", name="stats")
    sums = StandIn((GROUPS * blocks, t.dq_columns // 4, 256), "float32", name="sums")
    sizes = {"seqlen_q": problem.seqlen_q, "heads_q": problem.heads_q, "row_blocks": row_blocks}
    return [
        _before(problem, t, out, grad_out, lse, given.get("grad_lse"), stats, sums, blocks, sizes),
        _main(problem, t, (q, k, v, grad_out), stats, sums, dk, dv, row_blocks),
        _after(problem, t, sums, dq, blocks, sizes),
    ]


def _before(problem, t: Traits, out, grad_out, lse, grad_lse, stats, sums, blocks, sizes) -> Call:  # type: ignore[no-untyped-def]
    arguments = {
        "out_ptr": out,
        "do_ptr": grad_out,
        "lse_ptr": lse,
        "dlse_ptr": grad_lse,
        "stats_ptr": stats,
        "sums_ptr": sums,
        **_strides("out", out),
        **_strides("do", grad_out),
        **sizes,
    }
    constants = {
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": t.head,
        "PADDED_V": t.head_v,
        "GRAD_LSE": problem.grad_lse,
        "BLOCK_M": t.block_m,
        "ROWS": BEFORE_ROWS,
    }
    grid = (blocks * (t.block_m // BEFORE_ROWS),)
    return Call(before, grid, arguments, constants, {"num_warps": 4, "launch_pdl": True})


def _main(problem, t: Traits, inputs, stats, sums, dk, dv, row_blocks) -> Call:  # type: ignore[no-untyped-def]
    q, k, v, grad_out = inputs
    left, right = window_bounds(problem.causal, problem.window)
    key_blocks = -(-problem.seqlen_k // t.block_n)
    heads = problem.batch * problem.heads_kv
    head_bytes = problem.seqlen_q * (problem.heads_q // problem.heads_kv) * (6 * t.head + 2 * t.head_v)
    arguments = {
        "q_map": tensor_map(q, t.block_m, t.head),
        "k_map": tensor_map(k, t.block_n, t.head),
        "v_map": tensor_map(v, t.block_n, t.head_v),
        "do_map": tensor_map(grad_out, t.block_m, t.head_v),
        "stats_map": _flat_map(stats),
        "dq_map": _flat_map(sums),
        "dk_map": tensor_map(dk, KEYS, t.head),
        "dv_map": tensor_map(dv, KEYS, t.head_v),
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "left": left,
        "right": right,
        "heads_kv": problem.heads_kv,
        "group": problem.heads_q // problem.heads_kv,
        "row_blocks": row_blocks,
        "key_blocks": key_blocks,
        "heads": heads,
        "section_heads": min(max(SECTION // head_bytes, 1), heads),
        "last_first": int(left < UNLIMITED <= right),
        "scale": PerCall("scale"),
        # softcap is cap * tanh(x / cap), and tanh(y) = 1 - 2 / (1 + 2^(2 y log2(e)))
        "scale_log2": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }
    return Call(attention_backward, (key_blocks * heads,), arguments, {"T": t}, {"num_warps": 4, "launch_pdl": True})


def _after(problem, t: Traits, sums, dq, blocks, sizes) -> Call:  # type: ignore[no-untyped-def]
    arguments = {"sums_ptr": sums, "dq_ptr": dq, **_strides("dq", dq), **sizes, "scale": PerCall("scale")}
    constants = {"HEAD_DIM": problem.head_dim, "PADDED": t.head, "BLOCK_M": t.block_m, "COLUMNS": t.dq_columns}
    return Call(after, (GROUPS * blocks,), arguments, constants, {"num_warps": 4, "launch_pdl": True})


def _strides(name: str, operand: StandIn) -> dict[str, int]:
    """A dimension of one element may carry any stride."""
    found = zip(("batch", "head", "row"), operand.shape[:3], operand.strides[:3], strict=True)
    return {f"{name}_{dim}": 0 if size == 1 else stride for dim, size, stride in found}


HOST = Host(BACKWARD, call, contiguous=("lse", "grad_lse"))
