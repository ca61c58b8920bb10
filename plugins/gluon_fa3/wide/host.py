"""The host side of wide heads: a grid, four tensor maps and the kernel's scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from registry.ops.attention.calls import FORWARD, out_of, row_sums, tensor_map
from registry.plugins.gluon_fa3.host import LOG2E, heads_in_turns
from registry.plugins.gluon_fa3.traits import PANEL, ROWS, window_bounds
from registry.plugins.gluon_fa3.wide.traits import traits_of
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.gluon_fa3.wide.kernel import attention_wide

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    score = "softcap" if problem.softcap else "plain" if scale > 0 else "scaled"  # see ../host.py
    t = traits_of(problem, config, score=score)
    left, right = window_bounds(problem.causal, problem.window)
    row_blocks = -(-problem.seqlen_q // t.block_m)
    heads, group = problem.batch * problem.heads_q * t.halves, problem.heads_q // problem.heads_kv * t.halves
    tiles, slots = row_blocks * heads, problem.target.sm_count
    grid = min(slots, tiles)
    unlike = slots if t.longest_first else 0
    if grid == tiles:  # one tile a block: there is nothing to draw
        t = dataclasses.replace(t, schedule="static")
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
        "heads_q": problem.heads_q * t.halves,
        "group": group,
        "tiles": tiles,
        "row_blocks": row_blocks,
        "heads": heads,
        "section_heads": heads_in_turns(problem, heads // group, row_blocks * group, unlike) * group,
        "scale": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
    }
    return [Call(attention_wide, (grid,), arguments, {"T": t}, {"num_warps": 4})]


HOST = Host(FORWARD, call)
