"""The launches of packed gradients: the lists of blocks, then those of the dense ones (backward/host.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.plugins.gluon_fa3.backward import host as dense
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, SumsTraits, SweepTraits
from registry.plugins.gluon_fa3.host import COUNTER_WORDS, LOG2E
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.plugins.gluon_fa3.varlen.host import blocks_of, chunk_of, list_call, tensor_map
from registry.plugins.gluon_fa3.varlen.kernel import attention_packed_backward, attention_packed_gradient
from registry.plugins.gluon_fa3.varlen.sums import after_packed, before_packed
from registry.toolbox.call import Call, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn

BEFORE_ROWS = 32  # a program finds its sequence first, which is worth more rows than where none is looked for


def one_kernel(problem: Any, t: SumsTraits, given: Operands) -> list[Call]:
    dq, dk, dv = _outputs(given)
    row_blocks = blocks_of(problem.total_q, problem.batch, t.block_m)
    key_blocks = blocks_of(problem.total_k, problem.batch, t.block_n)
    blocks, group = problem.heads_q * row_blocks, problem.heads_q // problem.heads_kv // t.parts
    units, heads = GROUPS * blocks, problem.heads_kv * t.parts
    of_a_tile = GROUPS * (t.head + t.head_v) // t.dq_columns if t.parts > 1 else 0
    key_units = problem.heads_kv * key_blocks * of_a_tile
    stats = dense.statistics(blocks, t.block_m, t.folded)
    sums = StandIn((units + key_units, t.dq_columns // 4, 256), "float32", name="sums")
    turns = StandIn((units,), "int32", name="turns" if t.ordered else "")
    left, right = window_bounds(problem.causal, problem.window)
    last_first = not t.ordered and left < UNLIMITED <= right
    listed = list_call(problem, given, t.block_n, t.block_m, of_keys=True, last_first=last_first)
    key_list = listed.arguments["row_blocks"]
    head_bytes = max(group * problem.max_seqlen_q, 1) * (6 * t.head + 2 * t.head_v)
    section = dense.section_of(problem, -(-problem.max_seqlen_k // t.block_n), head_bytes, t.ordered)
    arguments = {
        "q_map": tensor_map(given["q"], t.block_m, t.head),
        "k_map": tensor_map(given["k"], t.block_n, t.head),
        "v_map": tensor_map(given["v"], t.block_n, t.head_v),
        "do_map": tensor_map(given["grad_out"], t.block_m, t.head_v),
        "stats_map": dense.block_map(stats, swizzle=t.folded),
        "dq_map": dense.block_map(sums),
        "dk_map": tensor_map(dk, KEYS, t.head),
        "dv_map": tensor_map(dv, KEYS, t.head_v),
        "turns": turns,
        "counter": Zeroes(COUNTER_WORDS) if t.drawn else StandIn((COUNTER_WORDS,), "int32"),
        "key_blocks": key_list,
        "heads_kv": heads,
        **_scores(problem, group, row_blocks, min(section, heads)),
    }
    tiles = key_blocks * heads
    grid = (min(tiles, problem.target.sm_count) if t.drawn else tiles,)
    main = Call(attention_packed_backward, grid, arguments, {"T": t}, dense.OPTIONS)
    more = key_units * KEYS * t.dq_columns // (BEFORE_ROWS * t.head)
    first = _before(problem, t.block_m, given, stats, sums, turns, t.folded, more)
    arguments = {
        "sums_ptr": sums,
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "cu_q": given["cu_seqlens_q"],
        "key_blocks": key_list,
        **_strides("dq", dq),
        **_strides("dk", dk),
        **_strides("dv", dv),
        "batch": problem.batch,
        "total_q": problem.total_q,
        "row_blocks": row_blocks,
        "heads_kv": problem.heads_kv,
        "units": units,
        "scale": PerCall("scale"),
    }
    constants = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": t.head,
        "PADDED_V": t.head_v,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
        "COLUMNS": t.dq_columns,
        "CHUNK": chunk_of(problem.batch),
        "KEYS": t.parts > 1,
    }
    return [listed, first, main, Call(after_packed, (units + key_units,), arguments, constants, dense.OPTIONS)]


def sweeps(problem: Any, block_m: int, kernels: list[SweepTraits], given: Operands) -> list[Call]:
    row_blocks = blocks_of(problem.total_q, problem.batch, block_m)
    stats = dense.statistics(problem.heads_q * row_blocks, block_m, folded=False)
    left, right = window_bounds(problem.causal, problem.window)
    rows = kernels[0].rows
    keys = list_call(problem, given, rows, block_m, of_keys=True, last_first=left < UNLIMITED <= right, name="keys")
    queries = list_call(
        problem, given, rows, own=block_m, of_keys=False, last_first=right < UNLIMITED <= left, name="queries"
    )
    made = [keys, queries, _before(problem, block_m, given, stats)]
    group = problem.heads_q // problem.heads_kv
    for t, out in zip(kernels, _outputs(given), strict=True):
        names = ("q", "grad_out", "k", "v") if t.of_queries else ("k", "v", "q", "grad_out")
        x, y, u, w = (given[name] for name in names)
        listed, heads, total, others = keys, problem.heads_kv, problem.total_k, problem.max_seqlen_q * group
        if t.of_queries:
            listed, heads, total, others = queries, problem.heads_q, problem.total_q, problem.max_seqlen_k
        section = max(dense.SECTION // max(others * 2 * (t.head + t.head_v), 1), 1)
        arguments = {
            "x_map": tensor_map(x, KEYS, t.x_columns),
            "y_map": tensor_map(y, KEYS, t.w_columns),
            "u_map": tensor_map(u, t.block, t.x_columns),
            "w_map": tensor_map(w, t.block, t.w_columns),
            "stats_map": dense.block_map(stats),
            "out_map": tensor_map(out, KEYS, t.out_columns),
            "stats": stats,
            "listed": listed.arguments["row_blocks"],
            "heads_own": heads,
            **_scores(problem, group, row_blocks, min(section, heads)),
        }
        tiles = blocks_of(total, problem.batch, t.rows)
        made.append(Call(attention_packed_gradient, (tiles * heads,), arguments, {"T": t}, dense.OPTIONS))
    return made


def _outputs(given: Operands) -> tuple[StandIn, ...]:
    return tuple(StandIn(given[x].shape, given[x].dtype, name=f"d{x}") for x in "qkv")


def _before(
    problem: Any,
    block_m: int,
    given: Operands,
    stats: StandIn,
    sums: StandIn | None = None,
    turns: StandIn | None = None,
    folded: bool = False,
    more_sums: int = 0,
) -> Call:
    """The launch that leaves the statistics, and zeroes."""
    out, grad_out = given["out"], given["grad_out"]
    row_blocks = blocks_of(problem.total_q, problem.batch, block_m)
    arguments = {
        "out_ptr": out,
        "do_ptr": grad_out,
        "lse_ptr": given["lse"],
        "dlse_ptr": given.get("grad_lse"),
        "stats_ptr": stats,
        "sums_ptr": sums,
        "turns_ptr": turns,
        "cu_q": given["cu_seqlens_q"],
        **_strides("out", out),
        **_strides("do", grad_out),
        "batch": problem.batch,
        "total_q": problem.total_q,
        "row_blocks": row_blocks,
        "more_sums": more_sums,
        "scale": PerCall("scale"),
    }
    constants = {
        "HEAD_DIM_V": problem.head_dim_v,
        "PADDED": padded(problem.head_dim),
        "PADDED_V": padded(problem.head_dim_v),
        "GRAD_LSE": problem.grad_lse,
        "SUMS": sums is not None,
        "TURNS": bool(turns and turns.name),
        "FOLDED": folded,
        "BLOCK_M": block_m,
        "ROWS": BEFORE_ROWS,
        "CHUNK": chunk_of(problem.batch),
        "KEYS": more_sums > 0,
    }
    programs = problem.heads_q * row_blocks * (block_m // BEFORE_ROWS)
    return Call(before_packed, (programs,), arguments, constants, dense.OPTIONS)


def _scores(problem: Any, group: int, row_blocks: int, section_heads: int) -> dict[str, Any]:
    left, right = window_bounds(problem.causal, problem.window)
    return {
        "left": left,
        "right": right,
        "group": group,
        "row_blocks": row_blocks,
        "section_heads": section_heads,
        "scale": PerCall("scale"),
        "scale_log2": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }


def _strides(name: str, operand: StandIn) -> Mapping[str, int]:
    """A dimension of one element may carry any stride."""
    found = zip(("row", "head"), operand.shape[:2], operand.strides[:2], strict=True)
    return {f"{name}_{dim}": 0 if size == 1 else stride for dim, size, stride in found}
