"""What the launches of the gradients are given alike, of dense tensors and of packed sequences: host.py of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.plugins.gluon_fa3.backward.traits import KEYS, TERM_COLUMNS, SumsTraits, SweepTraits
from registry.plugins.gluon_fa3.host import LOG2E
from registry.plugins.gluon_fa3.traits import padded, window_bounds
from registry.toolbox.call import Operands, PerCall, Zeroes
from registry.toolbox.hopper import linear, swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS

BEFORE_ROWS = 16
TensorMap = Callable[[StandIn, int, int], TensorDescriptor]
Arguments = dict[str, Any]


def block_map(workspace: StandIn, swizzle: bool = False) -> TensorDescriptor:
    """Of a workspace [blocks, rows, columns]: one block a box."""
    _, rows, columns = workspace.shape
    block = [1, rows, columns]
    layout = swizzled(block, workspace.dtype) if swizzle else linear(3, workspace.dtype)
    return TensorDescriptor(workspace, list(workspace.shape), [rows * columns, columns, 1], block, layout)


def statistics(blocks: int, block_m: int, folded: bool) -> StandIn:
    """The workspace of LSE and delta: as terms, or in float32."""
    kind = ((blocks, block_m, TERM_COLUMNS), "bfloat16") if folded else ((blocks, 2, block_m), "float32")
    return StandIn(*kind, name="stats")


def strides(name: str, operand: StandIn, *dims: str) -> dict[str, int]:
    """Of the first dimensions, called so. A dimension of one element may carry any stride."""
    found = zip(dims, operand.shape, operand.strides, strict=False)
    return {f"{name}_{dim}": 0 if size == 1 else stride for dim, size, stride in found}


def before(
    problem: Any,
    block_m: int,
    given: Operands,
    stats: StandIn,
    sums: StandIn | None = None,
    turns: StandIn | None = None,
    folded: bool = False,
    more_sums: int = 0,
) -> tuple[Arguments, Arguments]:
    """(arguments, constants) of the first kernel, which leaves the statistics, and zeroes."""
    arguments = {
        "out_ptr": given["out"],
        "do_ptr": given["grad_out"],
        "lse_ptr": given["lse"],
        "dlse_ptr": given.get("grad_lse"),
        "stats_ptr": stats,
        "sums_ptr": sums,
        "turns_ptr": turns,
        "more_sums": more_sums,
        "scale": PerCall("scale"),
    }
    constants = {
        "KEYS": more_sums > 0,
        "FOLDED": folded,
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": padded(problem.head_dim),
        "PADDED_V": padded(problem.head_dim_v),
        "GRAD_LSE": problem.grad_lse,
        "SUMS": sums is not None,
        "TURNS": bool(turns and turns.name),
        "BLOCK_M": block_m,
        "ROWS": BEFORE_ROWS,
    }
    return arguments, constants


def main(
    t: SumsTraits,
    given: Operands,
    outputs: tuple[StandIn, ...],
    workspaces: tuple[StandIn, StandIn, StandIn],
    tensor_map: TensorMap,
) -> Arguments:
    """Operands of the kernel of all three gradients; `workspaces` are statistics, sums and turns."""
    _, dk, dv = outputs
    stats, sums, turns = workspaces
    return {
        "q_map": tensor_map(given["q"], t.block_m, t.head),
        "k_map": tensor_map(given["k"], t.block_n, t.head),
        "v_map": tensor_map(given["v"], t.block_n, t.head_v),
        "do_map": tensor_map(given["grad_out"], t.block_m, t.head_v),
        "stats_map": block_map(stats, swizzle=t.folded),
        "dq_map": block_map(sums),
        "dk_map": tensor_map(dk, KEYS, t.head),
        "dv_map": tensor_map(dv, KEYS, t.head_v),
        "turns": turns,
        "counter": Zeroes(COUNTER_WORDS) if t.drawn else StandIn((COUNTER_WORDS,), "int32"),
    }


def after(problem: Any, t: SumsTraits, sums: StandIn, outputs: tuple[StandIn, ...]) -> tuple[Arguments, Arguments]:
    """(arguments, constants) of the last kernel."""
    dq, dk, dv = outputs
    arguments = {"sums_ptr": sums, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "scale": PerCall("scale")}
    constants = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": t.head,
        "PADDED_V": t.head_v,
        "BLOCK_M": t.block_m,
        "COLUMNS": t.dq_columns,
        "KEYS": t.parts > 1,
    }
    return arguments, constants


def sweep(t: SweepTraits, given: Operands, out: StandIn, stats: StandIn, tensor_map: TensorMap) -> Arguments:
    """Operands of the kernel of one gradient."""
    x, y, u, w = (
        given[name] for name in (("q", "grad_out", "k", "v") if t.of_queries else ("k", "v", "q", "grad_out"))
    )
    return {
        "x_map": tensor_map(x, KEYS, t.x_columns),
        "y_map": tensor_map(y, KEYS, t.w_columns),
        "u_map": tensor_map(u, t.block, t.x_columns),
        "w_map": tensor_map(w, t.block, t.w_columns),
        "stats_map": block_map(stats),
        "out_map": tensor_map(out, KEYS, t.out_columns),
        "stats": stats,
    }


def scores(problem: Any, group: int, row_blocks: int, section_heads: int) -> Arguments:
    """What scores take, and the order of tiles."""
    left, right = window_bounds(problem.causal, problem.window)
    return {
        "left": left,
        "right": right,
        "group": group,
        "row_blocks": row_blocks,
        "section_heads": section_heads,
        "scale": PerCall("scale"),
        # softcap is cap * tanh(x / cap), and tanh(y) = 1 - 2 / (1 + 2^(2 y log2(e)))
        "scale_log2": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }
