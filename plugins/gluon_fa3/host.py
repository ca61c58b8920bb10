"""The host side: from a problem and a config to a grid, four tensor maps and the kernel's scalars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from registry.ops.attention.calls import FORWARD, out_of, row_sums, tensor_map
from registry.plugins.gluon_fa3.traits import PANEL, ROWS, Traits, traits_of, window_bounds
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS
from registry.toolbox.sections import ROUNDS, section_of

KV_SECTION = 32 << 20  # bytes of K and V that a section of heads may take: what stays in a 50 MB L2 cache
LOG2E = math.log2(math.e)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.gluon_fa3.kernel import attention_forward

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    # How scores become base-2 exponents. A scale <= 0 would turn the row maximum around, so it is applied before.
    score = "softcap" if problem.softcap else "plain" if scale > 0 else "scaled"
    t = traits_of(problem, config, score=score)
    left, right = window_bounds(problem.causal, problem.window)
    row_blocks = -(-problem.seqlen_q // t.block_m)
    heads, group = problem.batch * problem.heads_q, problem.heads_q // problem.heads_kv
    tiles = row_blocks * heads
    slots = problem.target.sm_count * t.blocks_per_sm
    grid = min(slots, tiles)
    unlike = slots if t.longest_first else 0
    if grid == tiles:  # one tile a block: there is nothing to draw
        t = dataclasses.replace(t, schedule="static")
    # softcap is cap * tanh(x / cap) = cap - 2 cap / (1 + 2^(2 x log2(e) / cap))
    factor = 2 * LOG2E / problem.softcap if problem.softcap else LOG2E
    arguments = {
        "q_map": tensor_map(q, ROWS, PANEL),
        "k_map": tensor_map(k, t.block_n, PANEL),
        "v_map": tensor_map(v, t.block_n, PANEL),
        "o_map": tensor_map(out, ROWS, PANEL),
        "lse": row_sums(q, "lse" if problem.lse else ""),
        "counter": Zeroes(COUNTER_WORDS) if t.dynamic else StandIn((COUNTER_WORDS,), "int32"),
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "left": left,
        "right": right,
        "heads_q": problem.heads_q,
        "group": group,
        "tiles": tiles,
        "row_blocks": row_blocks,
        "heads": heads,
        "section_heads": heads_in_turns(problem, heads // group, row_blocks * group, unlike) * group,
        "scale": PerCall("scale", factor),
        "cap": problem.softcap * LOG2E,
    }
    return [Call(attention_forward, (grid,), arguments, {"T": t}, options(t))]


def heads_in_turns(problem: Any, heads: int, tiles: int, slots: int) -> int:
    """Key heads, each of so many tiles, whose tiles take turns: all that fit the L2 cache, but where tiles are unlike
    (then `slots` says how many run at once) no more than keep the SMs busy. The longest tiles of a section come first
    and read all of its keys, so that many heads ask for much memory at once and then for none."""
    fitting = KV_SECTION // (problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * 2)
    if slots:
        fitting = min(fitting, math.ceil(ROUNDS * slots / tiles))
    return section_of(heads, fitting, tiles, slots)


def options(t: Traits) -> dict[str, int]:
    """Compiler options. Left alone, a single consumer group would be given all registers of an SM."""
    return {"num_warps": 4, "maxnreg": t.launch_registers} if t.groups == 1 else {"num_warps": 4}


HOST = Host(FORWARD, call)
