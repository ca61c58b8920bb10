"""The host side of gradients by way of memory: chunks of heads and keys, and for each P, dS and three products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import triton

from registry.ops.attention import calls
from registry.ops.attention.calls import dense_like, row_sums, tensor_map
from registry.ops.attention.triton_tiles import padded
from registry.plugins.triton_fa2.host import LOG2_E, bounds, sizes_of, strides_of
from registry.plugins.triton_fa2.stored.configs import (
    CHUNK,
    OUTER,
    SLICE,
    ProductTraits,
    WeightsTraits,
    rows_stay,
    slices_a_turn,
    tiles_of,
)
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import COUNTER_WORDS, Zeroes
from registry.toolbox.sections import section_of

ROWS_OF_DELTA = 16


class Chunk(NamedTuple):
    """Key heads and tiles of keys, of whose query heads P and dS are in memory at a time."""

    head: int
    heads: int
    tile: int
    tiles: int


def chunks_of(groups: int, tiles: int, tile_bytes: int) -> Iterator[Chunk]:
    """All of `groups` key heads and their `tiles` of keys, each of so many bytes of P and dS: whole heads where they
    fit, else some keys of one."""
    if groups * tiles * tile_bytes <= CHUNK:
        yield Chunk(0, groups, 0, tiles)
    elif (fit := CHUNK // (tiles * tile_bytes)) > 0:
        yield from (Chunk(first, count, 0, tiles) for first, count in _parts(groups, fit))
    else:
        for head in range(groups):
            for first, count in _parts(tiles, max(1, CHUNK // tile_bytes)):
                yield Chunk(head, 1, first, count)


def _parts(whole: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of parts of at most so many each, all about as large."""
    parts = -(-whole // most)
    for part in range(parts):
        first = part * whole // parts
        yield first, (part + 1) * whole // parts - first


class Between(NamedTuple):
    """What the calls of a problem have alike, and the memory between them."""

    given: Operands
    outputs: tuple[StandIn, ...]
    delta: StandIn
    p: StandIn
    ds: StandIn
    sums: StandIn
    left: int
    right: int


Step = Callable[[Any, Mapping[str, Any], Between, Chunk], Iterator[Call]]


def backward(steps: list[Step], problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v = given["q"], given["k"], given["v"]
    group = problem.heads_q // problem.heads_kv
    tiles_q, tiles_k = tiles_of(problem, config)
    rows = group * tiles_q * config["WEIGHTS_M"]
    chunks = [*chunks_of(problem.batch * problem.heads_kv, tiles_k, 4 * rows * config["WEIGHTS_N"])]
    most, keys = max(c.heads for c in chunks), max(c.tiles for c in chunks) * config["WEIGHTS_N"]
    p, ds = (StandIn((most * rows, keys), q.dtype, name=name) for name in ("weights", "grad_weights"))
    columns = triton.cdiv(problem.head_dim, config["COLUMNS"]) * config["COLUMNS"]
    sums = StandIn((rows, columns), "float32", name="" if chunks[0].tiles == tiles_k else "sums")
    outputs = tuple(dense_like(x, f"d{x.name}") for x in (q, k, v))
    kept = Between(given, outputs, row_sums(q, "delta"), p, ds, sums, *bounds(problem))
    found = [_deltas(problem, kept)]
    for chunk in chunks:
        for step in steps:
            found += step(problem, config, kept, chunk)
    return found


def _deltas(problem: Any, kept: Between) -> Call:
    from registry.plugins.triton_fa2.stored.weights import row_deltas

    out, grad_out = kept.given["out"], kept.given["grad_out"]
    strides, layout = _layout("out do", [out, grad_out])
    arguments = dict(
        out_ptr=out,
        do_ptr=grad_out,
        dlse_ptr=kept.given.get("grad_lse"),
        delta_ptr=kept.delta,
        **strides,
        heads_q=problem.heads_q,
        seqlen_q=problem.seqlen_q,
    )
    constants = dict(
        **layout,
        HEAD_DIM_V=problem.head_dim_v,
        PADDED_V=padded(problem.head_dim_v),
        GRAD_LSE=problem.grad_lse,
        BLOCK_M=ROWS_OF_DELTA,
    )
    grid = (triton.cdiv(problem.seqlen_q, ROWS_OF_DELTA) * problem.batch * problem.heads_q,)
    return Call(row_deltas, grid, arguments, constants, {"num_warps": 4})


def _place(problem: Any, config: Mapping[str, Any], chunk: Chunk, by_keys: bool = False) -> dict[str, int]:
    group = problem.heads_q // problem.heads_kv
    return dict(
        group=group,
        first_head=chunk.head * (1 if by_keys else group),
        first_tile_k=chunk.tile,
        tiles_q=tiles_of(problem, config)[0],
        tiles_k=chunk.tiles,
    )


def _masks(kept: Between) -> dict[str, bool]:
    return dict(HAS_LEFT=kept.left >= 0, HAS_RIGHT=kept.right >= 0)


def triton_weights(problem: Any, config: Mapping[str, Any], kept: Between, chunk: Chunk) -> Iterator[Call]:
    from registry.plugins.triton_fa2.stored.weights import attention_weights

    q, k, v, grad_out = (kept.given[name] for name in ("q", "k", "v", "grad_out"))
    strides, layout = _layout("q k v do", [q, k, v, grad_out])
    place = _place(problem, config, chunk)
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        do_ptr=grad_out,
        lse_ptr=kept.given["lse"],
        delta_ptr=kept.delta,
        p_ptr=kept.p,
        ds_ptr=kept.ds,
        **strides,
        **sizes_of(problem, kept.left, kept.right),
        **place,
        heads_q=problem.heads_q,
    )
    constants = dict(
        **layout,
        **_masks(kept),
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        ROWS_RAGGED=problem.seqlen_q % config["WEIGHTS_M"] != 0,
        KEYS_RAGGED=problem.seqlen_k % config["WEIGHTS_N"] != 0,
        SOFTCAP=problem.softcap != 0.0,
        BLOCK_M=config["WEIGHTS_M"],
        BLOCK_N=config["WEIGHTS_N"],
        BLOCK_K=config["WEIGHTS_K"],
    )
    options = {"num_warps": config["weights_warps"], "num_stages": config["weights_stages"]}
    grid = (chunk.heads * place["group"] * place["tiles_q"] * chunk.tiles,)
    yield Call(attention_weights, grid, arguments, constants, options)


def gluon_weights(problem: Any, config: Mapping[str, Any], kept: Between, chunk: Chunk) -> Iterator[Call]:
    # Here, for plain Triton runs where Gluon does not.
    from registry.plugins.triton_fa2.stored.specialised_weights import specialised_weights

    place = _place(problem, config, chunk)
    heads, tiles_q, rows = chunk.heads * place["group"], place["tiles_q"], config["WEIGHTS_M"] // 2
    sections = min(chunk.tiles, max(1, TURNS * problem.target.sm_count // (heads * tiles_q)))
    tiles_an_item = triton.cdiv(chunk.tiles, sections)
    items = heads * tiles_q * triton.cdiv(chunk.tiles, tiles_an_item)
    arguments = dict(
        q_map=tensor_map(kept.given["q"], rows, SLICE),
        k_map=tensor_map(kept.given["k"], config["WEIGHTS_N"], SLICE),
        v_map=tensor_map(kept.given["v"], config["WEIGHTS_N"], SLICE),
        do_map=tensor_map(kept.given["grad_out"], rows, SLICE),
        p_map=kept_map(kept.p),
        ds_map=kept_map(kept.ds),
        lse=kept.given["lse"],
        delta=kept.delta,
        counter=Zeroes(COUNTER_WORDS),
        heads_q=problem.heads_q,
        **place,
        tiles_an_item=tiles_an_item,
        items=items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        window_left=kept.left,
        window_right=kept.right,
        # tanh(x) is 1 - 2 / (1 + exp2(2 log2(e) x))
        scale_log2=PerCall("scale", 2 * LOG2_E / problem.softcap if problem.softcap else LOG2_E),
        softcap_log2=problem.softcap * LOG2_E or None,
    )
    traits = WeightsTraits(
        BLOCK_N=config["WEIGHTS_N"],
        STAGES=config["weights_stages"],
        ROWS_STAY=rows_stay(problem),
        TURN=slices_a_turn(-(-max(problem.head_dim, problem.head_dim_v) // SLICE), config["weights_stages"]),
        SOFTCAP=problem.softcap != 0.0,
        SLICES=-(-problem.head_dim // SLICE),
        SLICES_V=-(-problem.head_dim_v // SLICE),
        **_masks(kept),
    )
    grid = (min(items, problem.target.sm_count),)
    yield Call(specialised_weights, grid, arguments, {"T": traits}, {"num_warps": 4})


def kept_map(kept: StandIn) -> Any:
    """Boxes of 64 x 64, one behind the other: `kept_at` says which."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from registry.toolbox.hopper import swizzled

    box = [SLICE, SLICE]
    rows = math.prod(kept.shape) // SLICE
    return TensorDescriptor(kept, [rows, SLICE], [SLICE, 1], box, swizzled(box, kept.dtype))


TURNS = 24
"""Items of P and dS for each SM, at least, where a chunk has keys enough to divide."""
SECTION = 24 << 20
"""Bytes of Q, K and dO of the heads whose products run side by side: half of an L2."""


def gluon_products(problem: Any, config: Mapping[str, Any], kept: Between, chunk: Chunk) -> Iterator[Call]:
    from registry.plugins.triton_fa2.stored.specialised_product import specialised_products

    columns, group = config["COLUMNS"], problem.heads_q // problem.heads_kv
    tiles_q, tiles_k = tiles_of(problem, config)
    traits = ProductTraits(
        BLOCK_N=config["WEIGHTS_N"],
        STAGES=config["product_stages"],
        COLUMNS=columns,
        FIRST=(first := 1 << (columns.bit_length() - 1)),
        REST=columns - first,
        PARTS=triton.cdiv(problem.head_dim, columns),
        PARTS_V=triton.cdiv(problem.head_dim_v, columns),
        GROUP=group,
        **_masks(kept),
        ADDS=chunk.tile > 0,
        KEEPS=chunk.tile + chunk.tiles < tiles_k,
    )
    head_bytes = 2 * (group * problem.seqlen_q * (problem.head_dim + problem.head_dim_v))
    head_bytes += 2 * problem.seqlen_k * problem.head_dim
    unlike = problem.target.sm_count if problem.causal or problem.window is not None else 0
    items = traits.items(chunk.heads, chunk.tiles * (config["WEIGHTS_N"] // config["WEIGHTS_M"]), tiles_q)
    of = {"q": kept.given["q"], "k": kept.given["k"], "do": kept.given["grad_out"]}
    of |= {one.name: one for one in kept.outputs}
    arguments = dict(
        p_map=kept_map(kept.p),
        ds_map=kept_map(kept.ds),
        **{f"{name}_map": tensor_map(one, SLICE, SLICE) for name, one in of.items()},
        sums=kept.sums,
        counter=Zeroes(COUNTER_WORDS),
        heads_kv=problem.heads_kv,
        heads=chunk.heads,
        first_head=chunk.head,
        first_tile_k=chunk.tile,
        tiles_q=tiles_q,
        tiles_k=chunk.tiles,
        section_heads=section_of(chunk.heads, SECTION // head_bytes, items // chunk.heads, unlike),
        items=items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        window_left=kept.left,
        window_right=kept.right,
        scale=PerCall("scale"),
    )
    grid = (min(items, problem.target.sm_count),)
    yield Call(specialised_products, grid, arguments, {"T": traits}, {"num_warps": 4})


def triton_products(problem: Any, config: Mapping[str, Any], kept: Between, chunk: Chunk) -> Iterator[Call]:
    from registry.plugins.triton_fa2.stored.product import weighted_sums

    q, k, grad_out = (kept.given[name] for name in ("q", "k", "grad_out"))
    dq, dk, dv = kept.outputs
    tiles_k = tiles_of(problem, config)[1]
    for w, x, to, by_keys in ((kept.p, grad_out, dv, True), (kept.ds, q, dk, True), (kept.ds, k, dq, False)):
        strides, layout = _layout("x to", [x, to])
        place = _place(problem, config, chunk, by_keys)
        outer = min(OUTER, config["WEIGHTS_N" if by_keys else "WEIGHTS_M"])
        arguments = dict(
            w_ptr=w,
            x_ptr=x,
            to_ptr=to,
            sums_ptr=kept.sums,
            **strides,
            **place,
            heads_to=to.shape[1],
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            factor=1.0 if to is dv else PerCall("scale"),
            window_left=kept.left,
            window_right=kept.right,
        )
        inner = problem.seqlen_q if by_keys else problem.seqlen_k
        constants = dict(
            **layout,
            **_masks(kept),
            COLUMNS=to.shape[3],
            RAGGED=inner % config["INNER"] != 0,
            BY_KEYS=by_keys,
            GROUP=place["group"] if by_keys else 1,
            ADDS=not by_keys and chunk.tile > 0,
            KEEPS=not by_keys and chunk.tile + chunk.tiles < tiles_k,
            BLOCK_M=config["WEIGHTS_M"],
            BLOCK_N=config["WEIGHTS_N"],
            OUTER=outer,
            BLOCK_COLUMNS=config["COLUMNS"],
            INNER=config["INNER"],
        )
        rows = chunk.tiles * config["WEIGHTS_N"] if by_keys else place["tiles_q"] * config["WEIGHTS_M"] * place["group"]
        grid = (triton.cdiv(to.shape[3], config["COLUMNS"]) * chunk.heads * (rows // outer),)
        options = {"num_warps": config["product_warps"], "num_stages": config["product_stages"]}
        yield Call(weighted_sums, grid, arguments, constants, options)


def _layout(names: str, tensors: list[StandIn]) -> tuple[dict[str, int], dict[str, Any]]:
    """As `strides_of` gives it, of tensors with unit columns."""
    strides, layout = strides_of(names, tensors, outputs=0)
    rows = {name: stride for name, stride in strides.items() if not name.endswith("_col")}
    return rows, {name: layout[name] for name in ("STRIDE_UNIT", "WIDE")}


TRITON = Host(calls.BACKWARD, partial(backward, [triton_weights, triton_products]), contiguous=("lse", "grad_lse"))
GLUON = Host(calls.BACKWARD, partial(backward, [gluon_weights, gluon_products]), contiguous=("lse", "grad_lse"))
