"""The host side: tensor maps in which each sequence ends by itself, the list of row blocks, and one launch over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.attention_varlen.calls import FORWARD, out_of, row_sums
from registry.ops.attention_varlen.lengths import LENGTHS
from registry.plugins.gluon_fa3.host import KV_SECTION, LOG2E, options
from registry.plugins.gluon_fa3.places import OUTER_SIZE, OUTER_STRIDE
from registry.plugins.gluon_fa3.traits import PADDING, PANEL, ROWS_LIMIT, Traits, window_bounds
from registry.plugins.gluon_fa3.varlen.configs import (
    BESIDE,
    MOST_MORE,
    outer_rows,
    places_of,
    row_stride,
    sets_of,
    traits_of,
)
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS

CHUNK = 1024  # sequences looked at together
PARTS_TOGETHER = 8  # shares that are added up at once


def tensor_map(operand: StandIn, rows: int, columns: int, side_by_side: int = 1) -> TensorDescriptor:
    """[2^30, end, head, row, column] of rows [row, head, column], or of those of a whole cache: see places.py. A box
    has so many rows of some heads. A dimension of one element may carry any stride in torch; the map needs a multiple
    of 16 bytes."""
    heads, width = operand.shape[-2:]
    row, head = row_stride(operand), operand.strides[-2] if heads > 1 else -(-width // 8) * 8
    block = [1, 1, side_by_side, rows, columns]
    return TensorDescriptor(
        operand,
        [OUTER_SIZE, OUTER_SIZE, heads, ROWS_LIMIT, width],
        [OUTER_STRIDE - row, row, head, row, 1],
        block,
        swizzled(block, operand.dtype),
    )


def blocks_of(rows: int, batch: int, block: int) -> int:
    """Row blocks that sequences of any lengths can need, if each has blocks of its own."""
    return rows // block + batch


def chunk_of(batch: int) -> int:
    """Sequences looked at together."""
    return min(CHUNK, max(32, 1 << (batch - 1).bit_length()))


def list_call(
    problem: Any,
    given: Operands,
    rows: int,
    others: int = 1,
    *,
    of_keys: bool,
    last_first: bool,
    own: int = 0,
    name: str = "row_blocks",
) -> Call:
    """What makes the list of blocks of so many rows each; `others`, `own`: rows of the other side, or of this one, in a
    block of a workspace."""
    from registry.plugins.gluon_fa3.varlen.tile_list import WORDS, list_row_blocks

    sides = [
        (given[f"cu_seqlens_{x}"], getattr(problem, f"total_{x}"), getattr(problem, f"max_seqlen_{x}")) for x in "qk"
    ]
    (cu_rows, total_rows, most_rows), (cu_others, total_others, most_others) = sides[::-1] if of_keys else sides
    room, chunk = blocks_of(total_rows, problem.batch, rows), chunk_of(problem.batch)
    arguments = {
        "cu_rows": cu_rows,
        "cu_others": cu_others,
        "row_blocks": StandIn(((room + 1) * WORDS.value,), "int32", name=name),
        "complaints": LENGTHS.argument,
        "batch": problem.batch,
        "total_rows": total_rows,
        "total_others": total_others,
        "most_rows": most_rows,
        "most_others": most_others,
        "room": room,
    }
    constants = {"ROWS": rows, "OTHERS": others, "OWN": own, "OF_KEYS": of_keys, "LAST_FIRST": last_first}
    constants |= {"CHUNK": chunk, "EARLY": True}
    return Call(list_row_blocks, (problem.batch,), arguments, constants, {"num_warps": 4 if chunk > 128 else 1})


def cached_list_call(problem: Any, given: Operands, rows: int) -> Call:
    """The same where keys lie in a cache or on pages."""
    from registry.plugins.gluon_fa3.varlen.cached_list import list_cached_row_blocks
    from registry.plugins.gluon_fa3.varlen.tile_list import WORDS

    room, chunk = blocks_of(problem.total_q, problem.batch, rows), chunk_of(problem.batch)
    table, pages, page_rows = paging_of(problem, given)
    arguments = {
        "cu_q": given["cu_seqlens_q"],
        "used": given["seqused_k"],
        "table": table,
        "row_blocks": StandIn(((room + 1) * WORDS.value,), "int32", name="row_blocks"),
        "complaints": LENGTHS.argument,
        "batch": problem.batch,
        "total_q": problem.total_q,
        "slots": table.shape[1] * problem.page_size if problem.page_size else given["k"].shape[1],
        "most_q": problem.max_seqlen_q,
        "most_k": problem.max_seqlen_k,
        "room": room,
        "table_row": table.strides[0],
        "pages": pages,
        "sequence_rows": page_rows,
    }
    constants = {"ROWS": rows, "PAGE": problem.page_size, "CHUNK": chunk, "EARLY": True}
    warps = {"num_warps": 4 if chunk > 128 or problem.page_size else 1}
    return Call(list_cached_row_blocks, (problem.batch,), arguments, constants, warps)


def shares_call(problem: Any, given: Operands, t: Traits) -> Call:
    """The same where keys are shared out."""
    from registry.plugins.gluon_fa3.varlen.share_list import list_shares

    packed, chunk = problem.kv_layout == "packed", chunk_of(problem.batch)
    table, pages, page_rows = paging_of(problem, given)
    slots = table.shape[1] * problem.page_size if problem.page_size else given["k"].shape[1]
    arguments = {
        "cu_q": given["cu_seqlens_q"],
        "lengths": given["cu_seqlens_k" if packed else "seqused_k"],
        "table": table,
        "row_blocks": list_of(problem, t),
        "complaints": LENGTHS.argument,
        "batch": problem.batch,
        "total_q": problem.total_q,
        "total_k": problem.total_k if packed else slots,
        "most_q": problem.max_seqlen_q,
        "most_k": problem.max_seqlen_k,
        "room": room_of(problem, t),
        "places": places_of(problem, t),
        "part_rows": part_rows(problem, t),
        "left": window_bounds(problem.causal, problem.window)[0],
        "table_row": table.strides[0],
        "pages": pages,
        "sequence_rows": page_rows,
    }
    constants = {"ROWS": t.block_m, "N": t.block_n, "PACKED": packed, "PAGE": problem.page_size}
    constants["BESIDE"] = BESIDE[min(t.groups, 2)]
    warps = {"num_warps": 4 if chunk > 128 or problem.page_size else 1}
    return Call(list_shares, (problem.batch,), arguments, {**constants, "CHUNK": chunk, "EARLY": True}, warps)


def more_blocks(problem: Any, t: Traits) -> int:
    """Row blocks that sharing keys out adds at most."""
    return MOST_MORE * places_of(problem, t) if t.shared_out else 0


def room_of(problem: Any, t: Traits) -> int:
    """Entries that lists have room for."""
    return blocks_of(problem.total_q, problem.batch, t.block_m) + more_blocks(problem, t)


def list_of(problem: Any, t: Traits) -> StandIn:
    """The list itself; where keys are shared out with words of each token."""
    from registry.plugins.gluon_fa3.varlen.share_list import TOKEN_WORDS
    from registry.plugins.gluon_fa3.varlen.tile_list import WORDS

    words = problem.total_q * TOKEN_WORDS.value if t.shared_out else 0
    return StandIn(((room_of(problem, t) + 1) * WORDS.value + words,), "int32", name="row_blocks")


def part_rows(problem: Any, t: Traits) -> int:
    """Rows of a head that shares leave at most: see share_list.py."""
    return int(problem.total_q + t.block_m * more_blocks(problem, t))


def paging_of(problem: Any, given: Operands) -> tuple[StandIn, int, int]:
    """(block table, or none; pages, or sequences of the cache; rows from one to the next)."""
    k = given["k"]
    table = given["block_table"] if problem.page_size else StandIn((1, 1), "int32")
    return table, k.shape[0], outer_rows(k) or 0


def attention_call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> Call:
    from registry.plugins.gluon_fa3.varlen.kernel import attention_packed, attention_paged

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    score = "softcap" if problem.softcap else "plain" if scale > 0 else "scaled"  # see gluon_fa3/host.py
    t = traits_of(problem, config, score=score)
    left, right = window_bounds(problem.causal, problem.window)
    group = sets_of(problem, t)
    sets = problem.heads_kv * group
    kv_bytes = problem.max_seqlen_k * (problem.head_dim + problem.head_dim_v) * 2
    grid = min(problem.target.sm_count * t.blocks_per_sm, room_of(problem, t) * sets)
    arguments = {
        "q_map": tensor_map(q, t.rows, PANEL, t.box_heads),
        "k_map": tensor_map(k, t.box, PANEL),
        "v_map": tensor_map(v, t.box, PANEL),
        "o_map": tensor_map(out, t.rows, PANEL, t.box_heads),
        "lse": parts_of(problem, t) if t.shared_out else row_sums(q, "lse" if problem.lse else ""),
        "counter": Zeroes(COUNTER_WORDS) if t.dynamic else StandIn((COUNTER_WORDS,), "int32"),
        "row_blocks": list_of(problem, t),
        "pitch": part_rows(problem, t) if t.shared_out else problem.total_q,
        "left": left,
        "right": right,
        "heads_q": sets,
        "group": group,
        "section_heads": min(max(KV_SECTION // kv_bytes, 1) * group, sets),
        "scale": PerCall("scale", 2 * LOG2E / problem.softcap if problem.softcap else LOG2E),
        "cap": problem.softcap * LOG2E,
        "sinks": given["sinks"] if t.sinks else None,
    }
    kernel = attention_paged if t.page else attention_packed
    if t.page:
        table, pages, page_rows = paging_of(problem, given)
        arguments |= {"table": table, "table_row": table.strides[0], "pages": pages, "page_rows": page_rows}
    return Call(kernel, (grid,), arguments, {"T": t}, {**options(t), "launch_pdl": True})


def parts_of(problem: Any, t: Traits) -> StandIn:
    """What tiles leave whose keys are shared out: see parts.py."""
    return StandIn((problem.heads_q * part_rows(problem, t) * (t.values + PADDING),), "float32", name="parts")


def add_call(problem: Any, config: Mapping[str, Any], given: Operands) -> Call:
    from registry.plugins.gluon_fa3.varlen.parts import add_parts

    q, out, t = given["q"], out_of(given), traits_of(problem, config)
    arguments = {
        "parts": parts_of(problem, t),
        "row_blocks": list_of(problem, t),
        "out": out,
        "lse": row_sums(q, "lse" if problem.lse else ""),
        "total_q": problem.total_q,
        "room": room_of(problem, t),
        "part_rows": part_rows(problem, t),
        "out_row": out.strides[0],
        "out_head": out.strides[1],
        "columns": problem.head_dim_v,
        "sinks": given.get("sinks"),
    }
    block = 1 << (t.values - 1).bit_length()
    constants = {"WIDTH": t.values, "BLOCK": block, "PADDING": PADDING, "LSE": problem.lse}
    constants |= {"SINKS": True} if problem.sinks else {}
    constants |= {"TOGETHER": PARTS_TOGETHER}
    return Call(add_parts, (problem.total_q, problem.heads_q), arguments, constants, {"num_warps": 1})


def _scheduled(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    attention = attention_call(problem, config, given, scale)
    return [attention, add_call(problem, config, given)] if config.get("shared_out") else [attention]


def _alone(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    return [*_list(problem, config, given, scale), *_scheduled(problem, config, given, scale)]


def _list(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    t = traits_of(problem, config)
    rows = t.block_m
    if t.shared_out:
        return [shares_call(problem, given, t)]
    if problem.kv_layout != "packed":
        return [cached_list_call(problem, given, rows)]
    return [list_call(problem, given, rows, of_keys=False, last_first=True)]


ALONE = Host(FORWARD, _alone)
SCHEDULED = Host(dataclasses.replace(FORWARD, optional=(*FORWARD.optional, "row_blocks")), _scheduled)
LIST = Host(dataclasses.replace(FORWARD, tensors=("q", "k"), results=("row_blocks",), scale=False), _list)


def prepare(problem: Any, config: Mapping[str, Any]) -> Callable[..., Any]:
    alone, scheduled = ALONE.prepare(problem, config), SCHEDULED.prepare(problem, config)

    def launch(*tensors: Any, schedule: Any = None, **given: Any) -> Any:
        if schedule is None:
            return alone(*tensors, **given)
        return scheduled(*tensors, row_blocks=schedule, **given)

    return launch


def run(*tensors: Any, schedule: Any = None, **given: Any) -> Any:
    if schedule is None:
        return ALONE.run(*tensors, **given)
    return SCHEDULED.run(*tensors, row_blocks=schedule, **given)


def schedule(problem: Any, config: Mapping[str, Any]) -> Callable[..., Any]:
    """The list of a step, which its layers share."""
    return LIST.prepare(problem, config)
