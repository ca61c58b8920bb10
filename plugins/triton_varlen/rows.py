"""The rows of a tile: which query and which head each of them is, and where they lie in q, out and the row sums."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_varlen.scores import Rows, finish, in_half


class Tile(NamedTuple):
    """Rows of a sequence: token in the packed tensors and query head of each, and which of them there are; the token
    and head that the tile begins at, and how far each row is from them."""

    token_M: Any
    head_M: Any
    there_M: Any
    first_token: Any
    first_head: Any
    near_token_M: Any
    near_head_M: Any


@triton.jit
def rows_of(first_row, head_kv, sequence, slopes_ptr, BLOCK_M: tl.constexpr, cfg: tl.constexpr):
    """(Tile, Rows) of the rows from first_row on."""
    GROUP: tl.constexpr = cfg.GROUP  # a number: quotients by it are cheap
    row_M = first_row + tl.arange(0, BLOCK_M)
    query_M = row_M // GROUP
    there_M = row_M < sequence.queries * GROUP
    near_head_M = row_M - query_M * GROUP
    head_M = head_kv * GROUP + near_head_M
    first = first_row // GROUP
    shift = sequence.keys - sequence.queries  # of a diagonal
    last_row = tl.minimum(first_row + BLOCK_M, sequence.queries * GROUP) - 1
    slope_M = query_M * 0.0
    if cfg.ALIBI:
        slope_M = tl.load(slopes_ptr + head_M, mask=there_M, other=0.0).to(tl.float32) * 1.4426950408889634
    rows = Rows(query_M + shift, slope_M, first + shift, last_row // GROUP + shift, slope_M)
    token_M = sequence.q_start + query_M
    tile = Tile(token_M, head_M, there_M, sequence.q_start + first, head_kv * GROUP, query_M - first, near_head_M)
    return tile, rows


@triton.jit
def load_queries(ptr, tile, rows, row, head, cfg: tl.constexpr):
    """(q, rows), as products with the keys want them."""
    q_MD = load_rows(ptr, tile, row, head, cfg.D, cfg.PADDED_D, cfg)
    unit_M = rows.slope_M * 0.0 + 1.0
    if (cfg.PER_HEAD or cfg.PER_KEY) and q_MD.dtype == tl.bfloat16:
        q_MD, unit_M = in_half(q_MD)
    return q_MD, Rows(rows.diagonal_M, rows.slope_M, rows.first, rows.last, unit_M)


@triton.jit
def _pointers(ptr, tile, row, head, PADDED: tl.constexpr, cfg: tl.constexpr):
    d_D = tl.arange(0, PADDED)[None, :]
    if cfg.Q_WIDE:
        return ptr + (tile.token_M.to(tl.int64) * row + tile.head_M * head)[:, None] + d_D
    else:  # 64 bits for where the tile begins, 32 for what is in it
        offsets_M = tile.near_token_M * row.to(tl.int32) + tile.near_head_M * head.to(tl.int32)
        return ptr + (tile.first_token.to(tl.int64) * row + tile.first_head * head) + (offsets_M[:, None] + d_D)


@triton.jit
def load_rows(ptr, tile, row, head, COLUMNS: tl.constexpr, PADDED: tl.constexpr, cfg: tl.constexpr):
    """[M, columns], zero where there is no row or column."""
    inside = tile.there_M[:, None] & (tl.arange(0, PADDED) < COLUMNS)[None, :]
    return tl.load(_pointers(ptr, tile, row, head, PADDED, cfg), mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, tile, row, head, x_MV, COLUMNS: tl.constexpr, PADDED: tl.constexpr, cfg: tl.constexpr):
    inside = tile.there_M[:, None] & (tl.arange(0, PADDED) < COLUMNS)[None, :]
    tl.store(_pointers(ptr, tile, row, head, PADDED, cfg), x_MV.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def sums_at(ptr, tile, total_q):
    """Addresses in a row sum [heads, tokens]."""
    return ptr + tile.head_M.to(tl.int64) * total_q + tile.token_M


@triton.jit
def load_sinks(sinks_ptr, tile, max_M, cfg: tl.constexpr):
    """[M]: the sinks of the rows' heads, in powers of two; anything where there are none."""
    if cfg.SINKS:
        return tl.load(sinks_ptr + tile.head_M, mask=tile.there_M, other=0.0).to(tl.float32) * 1.4426950408889634
    else:
        return max_M


@triton.jit
def store_parts(ptr, tile, row, head, x_MV, odd_MV, cfg: tl.constexpr):
    """Even and odd columns of the output, or all of it."""
    if cfg.PAIRED:
        d_V = tl.arange(0, cfg.PADDED_V // 2) * 2
        offsets_M = tile.token_M.to(tl.int64) * row + tile.head_M * head
        inside = tile.there_M[:, None] & (d_V < cfg.V)[None, :]
        pointers = ptr + offsets_M[:, None] + d_V[None, :]
        tl.store(pointers, x_MV.to(ptr.dtype.element_ty), mask=inside)
        tl.store(pointers + 1, odd_MV.to(ptr.dtype.element_ty), mask=inside)
    else:
        store_rows(ptr, tile, row, head, x_MV, cfg.V, cfg.PADDED_V, cfg)


class Destination(NamedTuple):
    """Where rows are written, and what is added to them last."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    row: Any
    head: Any
    total_q: Any


@triton.jit
def write(results, keys, tile, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """Normalise rows that have seen all their keys, once, and store them."""
    factor_M, lse_M = finish(max_M, sum_M, load_sinks(results.sinks_ptr, tile, max_M, cfg), cfg)
    if cfg.PER_HEAD:
        factor_M *= tl.load(keys.v_scale_ptr)
    acc_MV *= factor_M[:, None]
    odd_MV *= factor_M[:, None]
    store_parts(results.out_ptr, tile, results.row, results.head, acc_MV, odd_MV, cfg)
    if cfg.LSE:
        tl.store(sums_at(results.lse_ptr, tile, results.total_q), lse_M, mask=tile.there_M)
