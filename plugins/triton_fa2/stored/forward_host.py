"""The host side of attention by way of memory: chunks of heads and rows, and for each their P and what it weighs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.ops.attention.calls import FORWARD, out_of, row_sums, tensor_map
from registry.plugins.triton_fa2.host import LOG2_E, bounds
from registry.plugins.triton_fa2.stored.configs import (
    GROUPS,
    HELD,
    SLICE,
    OutputTraits,
    ScoresTraits,
    slices_a_turn,
    tiles_of,
)
from registry.plugins.triton_fa2.stored.host import chunks_of, kept_map
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS, Zeroes


def forward(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    # Here, for plain Triton runs where Gluon does not.
    from registry.plugins.triton_fa2.stored.specialised_output import specialised_output
    from registry.plugins.triton_fa2.stored.specialised_scores import specialised_scores

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    high, wide, columns = (config[name] for name in ("WEIGHTS_M", "WEIGHTS_N", "COLUMNS"))
    tiles_q, tiles_k = tiles_of(problem, config)
    left, right = bounds(problem)
    slices = -(-problem.head_dim // SLICE)
    masks = dict(HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0)
    scores = ScoresTraits(
        BLOCK_N=wide,
        STAGES=config["weights_stages"],
        TURN=slices_a_turn(slices, config["weights_stages"]),
        HELD=HELD,
        SLICES=slices,
        SOFTCAP=problem.softcap != 0.0,
        LSE=problem.lse,
        **masks,
    )
    output = OutputTraits(
        BLOCK_N=wide,
        STAGES=config["product_stages"],
        COLUMNS=columns,
        FIRST=(first := 1 << (columns.bit_length() - 1)),
        REST=columns - first,
        PARTS=-(-problem.head_dim_v // columns),
        **masks,
    )
    chunks = [*chunks_of(problem.batch * problem.heads_q, tiles_q, 2 * high * tiles_k * wide)]
    rows = max(c.heads * c.tiles for c in chunks) * high
    p = StandIn((rows, tiles_k * wide), q.dtype, name="weights")
    references = StandIn((tiles_k, rows), "float32", name="references")
    inverses = StandIn((rows,), "float32", name="inverses")
    found = []
    for chunk in chunks:
        items = chunk.heads * chunk.tiles
        kept = dict(references=references, inverses=inverses)
        place = dict(
            counter=Zeroes(COUNTER_WORDS),
            heads_q=problem.heads_q,
            group=problem.heads_q // problem.heads_kv,
            first_head=chunk.head,
            first_tile_q=chunk.tile,
            tiles_q=chunk.tiles,
            tiles_k=tiles_k,
            items=items,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            window_left=left,
            window_right=right,
        )
        arguments = dict(
            q_map=tensor_map(q, high // GROUPS, SLICE),
            k_map=tensor_map(k, wide, SLICE),
            p_map=kept_map(p),
            **kept,
            lse=row_sums(q, "lse" if problem.lse else ""),
            **place,
            # tanh(x) is 1 - 2 / (1 + exp2(2 log2(e) x))
            scale_log2=PerCall("scale", 2 * LOG2_E / problem.softcap if problem.softcap else LOG2_E),
            softcap_log2=problem.softcap * LOG2_E,
        )
        grid = (min(items, problem.target.sm_count),)
        found.append(Call(specialised_scores, grid, arguments, {"T": scores}, {"num_warps": 4}))
        arguments = dict(
            p_map=kept_map(p), v_map=tensor_map(v, SLICE, SLICE), out_map=tensor_map(out, SLICE, SLICE), **kept, **place
        )
        grid = (min(items * output.PARTS, problem.target.sm_count),)
        found.append(Call(specialised_output, grid, arguments, {"T": output}, {"num_warps": 4}))
    return found


GLUON = Host(FORWARD, forward)
