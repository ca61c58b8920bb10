"""The host side of the backward: the launches of each method, and the workspaces between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.attention.calls import BACKWARD, dense_like
from registry.plugins.gluon_fa3.backward.kernel import attention_backward
from registry.plugins.gluon_fa3.backward.sums import after, before
from registry.plugins.gluon_fa3.backward.sweep import attention_gradient
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, TERM_COLUMNS, sweeps_of, traits_of
from registry.plugins.gluon_fa3.host import COUNTER_WORDS, LOG2E, tensor_map
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.hopper import linear, swizzled
from registry.toolbox.launch import StandIn

SHARE_A_HEAD = 8  # blocks
SECTION = 32 << 20  # bytes of Q, dO and dQ's sums that a section of heads may take: what stays in a 50 MB L2 cache
BEFORE_ROWS = 16
OPTIONS = {"num_warps": 4, "launch_pdl": True}
Outputs = tuple[StandIn, ...]


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


def section_of(problem: Any, key_blocks: int, head_bytes: int, ordered: bool) -> int:
    """Heads whose tiles take turns. With an eighth of the SMs, some blocks work on one head at a time, and share what
    they read and add to in the L2 cache. In a fixed order they wait for each other, so that short heads are better
    more at once: a quarter, or what fits the cache; `head_bytes` is what the tiles of one head read besides their own.
    """
    sm_count = problem.target.sm_count
    shared = max(sm_count // SHARE_A_HEAD, 1)
    if not ordered:
        return shared
    return max(shared, min(sm_count * SHARE_A_HEAD // max(key_blocks, 1), sm_count // 4), SECTION // head_bytes)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v = (given[name] for name in ("q", "k", "v"))
    outputs = tuple(dense_like(x, f"d{x.name}") for x in (q, k, v))
    if config["method"] == "sweeps":
        return _sweeps(problem, config, given, outputs)
    return _one_kernel(problem, config, given, outputs)


def _one_kernel(problem: Any, config: Mapping[str, Any], given: Operands, outputs: Outputs) -> list[Call]:
    t = traits_of(problem, config)
    dq, dk, dv = outputs
    row_blocks = -(-problem.seqlen_q // t.block_m)
    blocks = problem.batch * problem.heads_q * row_blocks
    key_blocks = -(-problem.seqlen_k // t.block_n)
    heads, group = problem.batch * problem.heads_kv, _group(problem) // t.parts
    units = GROUPS * blocks
    key_units = heads * key_blocks * GROUPS * (t.head + t.head_v) // t.dq_columns if t.parts > 1 else 0
    sums = StandIn((units + key_units, t.dq_columns // 4, 256), "float32", name="sums")
    turns = StandIn((GROUPS * blocks,), "int32", name="turns" if t.ordered else "")
    head_bytes = max(group * problem.seqlen_q, 1) * (6 * t.head + 2 * t.head_v)
    more = key_units * KEYS * t.dq_columns // (BEFORE_ROWS * t.head)
    first, stats = _before(problem, t.block_m, given, sums, turns, t.folded, more)
    arguments = {
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
        "heads_kv": problem.heads_kv * t.parts,
        "key_blocks": key_blocks,
        **_sizes(problem, row_blocks, heads * t.parts, group, section_of(problem, key_blocks, head_bytes, t.ordered)),
        "last_first": int(not t.ordered and _ends_early(problem)),
    }
    tiles = key_blocks * heads * t.parts
    grid = min(tiles, problem.target.sm_count) if t.drawn else tiles
    main = Call(attention_backward, (grid,), arguments, {"T": t}, OPTIONS)
    arguments = {
        "sums_ptr": sums,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        **_strides("dq", dq),
        **_strides("dk", dk),
        **_strides("dv", dv),
        "seqlen_q": problem.seqlen_q,
        "heads_q": problem.heads_q,
        "row_blocks": row_blocks,
        "seqlen_k": problem.seqlen_k,
        "heads_kv": problem.heads_kv,
        "key_blocks": key_blocks,
        "units": units,
        "scale": PerCall("scale"),
    }
    constants = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": t.head,
        "PADDED_V": t.head_v,
        "BLOCK_M": t.block_m,
        "COLUMNS": t.dq_columns,
        "KEYS": t.parts > 1,
    }
    return [first, main, Call(after, (units + key_units,), arguments, constants, OPTIONS)]


def _sweeps(problem: Any, config: Mapping[str, Any], given: Operands, outputs: Outputs) -> list[Call]:
    block_m = config["BLOCK_M"]
    first, stats = _before(problem, block_m, given)
    made = [first]
    for t, out in zip(sweeps_of(problem, config), outputs, strict=True):
        names = ("q", "grad_out", "k", "v") if t.of_queries else ("k", "v", "q", "grad_out")
        x, y, u, w = (given[name] for name in names)
        own, rows, others = problem.heads_kv, problem.seqlen_k, problem.seqlen_q * _group(problem)
        if t.of_queries:
            own, rows, others = problem.heads_q, problem.seqlen_q, problem.seqlen_k
        tiles, heads = -(-rows // t.rows), problem.batch * own
        arguments = {
            "x_map": tensor_map(x, KEYS, t.x_columns),
            "y_map": tensor_map(y, KEYS, t.w_columns),
            "u_map": tensor_map(u, t.block, t.x_columns),
            "w_map": tensor_map(w, t.block, t.w_columns),
            "stats_map": block_map(stats),
            "out_map": tensor_map(out, KEYS, t.out_columns),
            "stats": stats,
            "heads_own": own,
            "tiles": tiles,
            **_sizes(
                problem,
                -(-problem.seqlen_q // block_m),
                heads,
                _group(problem),
                max(SECTION // (others * 2 * (t.head + t.head_v)), 1),
            ),
            "last_first": int(_starts_late(problem) if t.of_queries else _ends_early(problem)),
        }
        made.append(Call(attention_gradient, (tiles * heads,), arguments, {"T": t}, OPTIONS))
    return made


def _before(
    problem: Any,
    block_m: int,
    given: Operands,
    sums: StandIn | None = None,
    turns: StandIn | None = None,
    folded: bool = False,
    more_sums: int = 0,
) -> tuple[Call, StandIn]:
    """The first launch, and the statistics that it leaves."""
    out, grad_out = given["out"], given["grad_out"]
    row_blocks = -(-problem.seqlen_q // block_m)
    blocks = problem.batch * problem.heads_q * row_blocks
    stats = statistics(blocks, block_m, folded)
    arguments = {
        "out_ptr": out,
        "do_ptr": grad_out,
        "lse_ptr": given["lse"],
        "dlse_ptr": given.get("grad_lse"),
        "stats_ptr": stats,
        "sums_ptr": sums,
        "turns_ptr": turns,
        **_strides("out", out),
        **_strides("do", grad_out),
        "seqlen_q": problem.seqlen_q,
        "heads_q": problem.heads_q,
        "row_blocks": row_blocks,
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
    return Call(before, (blocks * (block_m // BEFORE_ROWS),), arguments, constants, OPTIONS), stats


def _sizes(problem: Any, row_blocks: int, heads: int, group: int, section_heads: int) -> dict[str, Any]:
    left, right = window_bounds(problem.causal, problem.window)
    return {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "left": left,
        "right": right,
        "group": group,
        "row_blocks": row_blocks,
        "heads": heads,
        "section_heads": min(section_heads, heads),
        "scale": PerCall("scale"),
        # softcap is cap * tanh(x / cap), and tanh(y) = 1 - 2 / (1 + 2^(2 y log2(e)))
        "scale_log2": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }


def _group(problem: Any) -> int:
    return int(problem.heads_q // problem.heads_kv)


def _ends_early(problem: Any) -> bool:
    """Whether only a left bound cuts: then the last keys are seen by the most queries."""
    left, right = window_bounds(problem.causal, problem.window)
    return left < UNLIMITED <= right


def _starts_late(problem: Any) -> bool:
    """Whether only a right bound cuts: then the last queries see the most keys."""
    left, right = window_bounds(problem.causal, problem.window)
    return right < UNLIMITED <= left


def _strides(name: str, operand: StandIn) -> dict[str, int]:
    """A dimension of one element may carry any stride."""
    found = zip(("batch", "head", "row"), operand.shape[:3], operand.strides[:3], strict=True)
    return {f"{name}_{dim}": 0 if size == 1 else stride for dim, size, stride in found}


HOST = Host(BACKWARD, call, contiguous=("lse", "grad_lse"))
