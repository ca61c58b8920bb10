"""The launches of packed gradients: the lists of blocks, then those of the dense ones (backward/host.py)."""

from __future__ import annotations

from typing import Any

from registry.ops.attention_varlen.calls import row_sums, sink_call
from registry.plugins.gluon_fa3.backward import arguments as of
from registry.plugins.gluon_fa3.backward import host as dense
from registry.plugins.gluon_fa3.backward.arguments import strides
from registry.plugins.gluon_fa3.backward.sections import heads_in_turns
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, SumsTraits, SweepTraits
from registry.plugins.gluon_fa3.traits import UNLIMITED, window_bounds
from registry.plugins.gluon_fa3.varlen.host import blocks_of, chunk_of, list_call, tensor_map
from registry.toolbox.call import Call, Operands
from registry.toolbox.launch import StandIn

DIMS = ("row", "head")
BEFORE_ROWS = 32  # a program finds its sequence first, which is worth more rows than where none is looked for


def one_kernel(problem: Any, t: SumsTraits, given: Operands) -> list[Call]:
    from registry.plugins.gluon_fa3.varlen.kernel import attention_packed_backward
    from registry.plugins.gluon_fa3.varlen.sums import after_packed

    dq, dk, dv = outputs = _outputs(given)
    row_blocks = blocks_of(problem.total_q, problem.batch, t.block_m)
    key_blocks = blocks_of(problem.total_k, problem.batch, t.block_n)
    blocks, group = problem.heads_q * row_blocks, problem.heads_q // problem.heads_kv // t.parts
    units, heads = GROUPS * blocks, problem.heads_kv * t.parts
    of_a_tile = GROUPS * (t.head + t.head_v) // t.dq_columns if t.parts > 1 else 0
    key_units = problem.heads_kv * key_blocks * of_a_tile
    stats = of.statistics(blocks, t.block_m, t.folded)
    sums = StandIn((units + key_units, t.dq_columns // 4, 256), "float32", name="sums")
    turns = StandIn((units,), "int32", name="turns" if t.ordered else "")
    left, right = window_bounds(problem.causal, problem.window)
    last_first = not t.ordered and left < UNLIMITED <= right
    listed = list_call(problem, given, t.block_n, t.block_m, of_keys=True, last_first=last_first)
    key_list = listed.arguments["row_blocks"]
    longest = -(-problem.max_seqlen_k // t.block_n)
    section = heads_in_turns(problem, heads, longest, group * problem.max_seqlen_q, t.ordered)
    arguments = {
        **of.main(t, given, outputs, (stats, sums, turns), tensor_map),
        "key_blocks": key_list,
        "heads_kv": heads,
        **of.scores(problem, group, row_blocks, section),
    }
    tiles = key_blocks * heads
    grid = (min(tiles, problem.target.sm_count) if t.drawn else tiles,)
    main = Call(attention_packed_backward, grid, arguments, {"T": t}, dense.OPTIONS)
    more = key_units * KEYS * t.dq_columns // (BEFORE_ROWS * t.head)
    first = _before(problem, t.block_m, given, stats, sums, turns, t.folded, more)
    arguments, constants = of.after(problem, t, sums, outputs)
    arguments |= {
        "cu_q": given["cu_seqlens_q"],
        "key_blocks": key_list,
        **strides("dq", dq, *DIMS),
        **strides("dk", dk, *DIMS),
        **strides("dv", dv, *DIMS),
        "batch": problem.batch,
        "total_q": problem.total_q,
        "row_blocks": row_blocks,
        "heads_kv": problem.heads_kv,
        "units": units,
    }
    constants |= {"BLOCK_N": t.block_n, "CHUNK": chunk_of(problem.batch)}
    last = Call(after_packed, (units + key_units,), arguments, constants, dense.OPTIONS)
    return [listed, first, main, last, *_of_sinks(problem, given)]


def sweeps(problem: Any, block_m: int, kernels: list[SweepTraits], given: Operands) -> list[Call]:
    from registry.plugins.gluon_fa3.varlen.kernel import attention_packed_gradient

    row_blocks = blocks_of(problem.total_q, problem.batch, block_m)
    stats = of.statistics(problem.heads_q * row_blocks, block_m, folded=False)
    left, right = window_bounds(problem.causal, problem.window)
    rows = kernels[0].rows
    keys = list_call(problem, given, rows, block_m, of_keys=True, last_first=left < UNLIMITED <= right, name="keys")
    queries = list_call(
        problem, given, rows, own=block_m, of_keys=False, last_first=right < UNLIMITED <= left, name="queries"
    )
    made = [keys, queries, _before(problem, block_m, given, stats)]
    group = problem.heads_q // problem.heads_kv
    for t, out in zip(kernels, _outputs(given), strict=True):
        listed, heads, total, others = keys, problem.heads_kv, problem.total_k, problem.max_seqlen_q * group
        if t.of_queries:
            listed, heads, total, others = queries, problem.heads_q, problem.total_q, problem.max_seqlen_k
        section = max(dense.SECTION // max(others * 2 * (t.head + t.head_v), 1), 1)
        arguments = {
            **of.sweep(t, given, out, stats, tensor_map),
            "listed": listed.arguments["row_blocks"],
            "heads_own": heads,
            **of.scores(problem, group, row_blocks, min(section, heads)),
        }
        tiles = blocks_of(total, problem.batch, t.rows)
        made.append(Call(attention_packed_gradient, (tiles * heads,), arguments, {"T": t}, dense.OPTIONS))
    return [*made, *_of_sinks(problem, given)]


def _of_sinks(problem: Any, given: Operands) -> list[Call]:
    """The launch that adds up their gradient, from what the first one left."""
    return [sink_call(problem, given, row_sums(given["q"], "delta"))] if problem.sinks else []


def _outputs(given: Operands) -> tuple[StandIn, ...]:
    return tuple(StandIn(given[x].shape, given[x].dtype, name=f"d{x}") for x in "qkv")


def _before(problem: Any, block_m: int, given: Operands, *workspaces: Any) -> Call:
    """The launch that leaves the statistics, and zeroes."""
    from registry.plugins.gluon_fa3.varlen.sums import before_packed

    row_blocks = blocks_of(problem.total_q, problem.batch, block_m)
    arguments, constants = of.before(problem, block_m, given, *workspaces)
    arguments |= {
        "cu_q": given["cu_seqlens_q"],
        **strides("out", given["out"], *DIMS),
        **strides("do", given["grad_out"], *DIMS),
        "batch": problem.batch,
        "total_q": problem.total_q,
        "row_blocks": row_blocks,
    }
    # Without sinks nothing: what was measured without them was given no more.
    arguments |= {
        "delta_ptr": row_sums(given["q"], "delta") if problem.sinks else None,
        "cu_k": given["cu_seqlens_k"] if problem.sinks else None,
        "total_k": problem.total_k if problem.sinks else None,
    }
    constants |= {"ROWS": BEFORE_ROWS, "CHUNK": chunk_of(problem.batch)} | ({"SINKS": True} if problem.sinks else {})
    programs = problem.heads_q * row_blocks * (block_m // BEFORE_ROWS)
    return Call(before_packed, (programs,), arguments, constants, dense.OPTIONS)
