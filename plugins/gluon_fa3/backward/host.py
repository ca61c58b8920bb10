"""The host side of the backward: the launches of each method, and the workspaces between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.ops.attention.calls import BACKWARD, dense_like, tensor_map
from registry.plugins.gluon_fa3.backward import arguments as of
from registry.plugins.gluon_fa3.backward.arguments import BEFORE_ROWS, Arguments, statistics, strides
from registry.plugins.gluon_fa3.backward.sections import heads_in_turns
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, sweeps_of, traits_of
from registry.plugins.gluon_fa3.traits import UNLIMITED, window_bounds
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.launch import StandIn

SECTION = 32 << 20  # bytes of the other side that a section of heads may take: what stays in a 50 MB L2 cache
OPTIONS = {"num_warps": 4, "launch_pdl": True}
DIMS = ("batch", "head", "row")
Outputs = tuple[StandIn, ...]


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v = (given[name] for name in ("q", "k", "v"))
    outputs = tuple(dense_like(x, f"d{x.name}") for x in (q, k, v))
    if config["method"] == "sweeps":
        return _sweeps(problem, config, given, outputs)
    return _one_kernel(problem, config, given, outputs)


def _one_kernel(problem: Any, config: Mapping[str, Any], given: Operands, outputs: Outputs) -> list[Call]:
    from registry.plugins.gluon_fa3.backward.kernel import attention_backward
    from registry.plugins.gluon_fa3.backward.sums import after

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
    more = key_units * KEYS * t.dq_columns // (BEFORE_ROWS * t.head)
    first, stats = _before(problem, t.block_m, given, sums, turns, t.folded, more)
    section = heads_in_turns(problem, heads * t.parts, key_blocks, group * problem.seqlen_q, t.ordered)
    arguments = {
        **of.main(t, given, outputs, (stats, sums, turns), tensor_map),
        "heads_kv": problem.heads_kv * t.parts,
        "key_blocks": key_blocks,
        **_sizes(problem, row_blocks, heads * t.parts, group, section),
        "last_first": int(not t.ordered and _ends_early(problem)),
    }
    tiles = key_blocks * heads * t.parts
    grid = min(tiles, problem.target.sm_count) if t.drawn else tiles
    main = Call(attention_backward, (grid,), arguments, {"T": t}, OPTIONS)
    arguments, constants = of.after(problem, t, sums, outputs)
    arguments |= {
        **strides("dq", dq, *DIMS),
        **strides("dk", dk, *DIMS),
        **strides("dv", dv, *DIMS),
        "seqlen_q": problem.seqlen_q,
        "heads_q": problem.heads_q,
        "row_blocks": row_blocks,
        "seqlen_k": problem.seqlen_k,
        "heads_kv": problem.heads_kv,
        "key_blocks": key_blocks,
        "units": units,
    }
    return [first, main, Call(after, (units + key_units,), arguments, constants, OPTIONS)]


def _sweeps(problem: Any, config: Mapping[str, Any], given: Operands, outputs: Outputs) -> list[Call]:
    from registry.plugins.gluon_fa3.backward.sweep import attention_gradient

    block_m = config["BLOCK_M"]
    first, stats = _before(problem, block_m, given)
    made, group = [first], _group(problem)
    for t, out in zip(sweeps_of(problem, config), outputs, strict=True):
        own, rows, others = problem.heads_kv, problem.seqlen_k, problem.seqlen_q * group
        if t.of_queries:
            own, rows, others = problem.heads_q, problem.seqlen_q, problem.seqlen_k
        tiles, heads = -(-rows // t.rows), problem.batch * own
        section = max(SECTION // (others * 2 * (t.head + t.head_v)), 1)
        arguments = {
            **of.sweep(t, given, out, stats, tensor_map),
            "heads_own": own,
            "tiles": tiles,
            **_sizes(problem, -(-problem.seqlen_q // block_m), heads, group, section),
            "last_first": int(_starts_late(problem) if t.of_queries else _ends_early(problem)),
        }
        made.append(Call(attention_gradient, (tiles * heads,), arguments, {"T": t}, OPTIONS))
    return made


def _before(problem: Any, block_m: int, given: Operands, *sums: Any) -> tuple[Call, StandIn]:
    """The first launch, and the statistics that it leaves; `sums` as in arguments.py."""
    from registry.plugins.gluon_fa3.backward.sums import before

    row_blocks = -(-problem.seqlen_q // block_m)
    blocks = problem.batch * problem.heads_q * row_blocks
    stats = statistics(blocks, block_m, bool(sums and sums[2]))
    arguments, constants = of.before(problem, block_m, given, stats, *sums)
    arguments |= {
        **strides("out", given["out"], *DIMS),
        **strides("do", given["grad_out"], *DIMS),
        "seqlen_q": problem.seqlen_q,
        "heads_q": problem.heads_q,
        "row_blocks": row_blocks,
    }
    return Call(before, (blocks * (block_m // BEFORE_ROWS),), arguments, constants, OPTIONS), stats


def _sizes(problem: Any, row_blocks: int, heads: int, group: int, section_heads: int) -> Arguments:
    lengths = {"seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "heads": heads}
    return lengths | of.scores(problem, group, row_blocks, min(section_heads, heads))


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


HOST = Host(BACKWARD, call, contiguous=("lse", "grad_lse"))
