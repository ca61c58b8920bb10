"""The kernels before and after that of the gradients, over packed sequences: see backward/sums.py.

Each sequence has row blocks of its own in the workspaces, found without a list (tile_list.find_block), and one that no
row needs, whose rows see nothing: a tile of keys without queries reads it. It adds to that block's sums, too, which
nobody zeroes or reads: where sequences are short, such blocks are half of all.
"""

import triton
import triton.language as tl

from registry.plugins.gluon_fa3.backward.sums import (
    after_previous_kernel,
    part_of_block,
    prepare_rows,
    put_in_order,
    zero_more,
    zero_sums,
)
from registry.plugins.gluon_fa3.varlen.tile_list import WORDS, find_block, range_of

SIZES = ["batch", "total_q", "row_blocks", "more_sums", "heads_kv", "units"]


@triton.jit(do_not_specialize=[*SIZES[:4], "total_k"])
def before_packed(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, turns_ptr, cu_q,
    out_row: tl.int64, out_head: tl.int64, do_row: tl.int64, do_head: tl.int64, batch, total_q, row_blocks, more_sums,
    scale, delta_ptr, cu_k, total_k,
    HEAD_DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, GRAD_LSE: tl.constexpr, SUMS: tl.constexpr,
    TURNS: tl.constexpr, FOLDED: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, SINKS: tl.constexpr = False,
):  # fmt: skip
    """ROWS of a block of BLOCK_M rows of a head; of the zeroes, `more_sums` times as many as those have, divided among
    all. Where there are sinks, delta is left for their gradient, too."""
    PARTS: tl.constexpr = BLOCK_M // ROWS
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS
    h = block // row_blocks
    after_previous_kernel()
    m, begin, length, b = find_block(block - h * row_blocks, cu_q, batch, total_q, BLOCK_M, CHUNK)
    rows = m * BLOCK_M + part * ROWS + tl.arange(0, ROWS)
    out_ptr += begin * out_row + h * out_head
    do_ptr += begin * do_row + h * do_head
    pointers = (out_ptr, do_ptr, lse_ptr, dlse_ptr)
    place = h.to(tl.int64) * total_q + begin + rows
    seeing = rows < length
    if SINKS:  # where a sequence has no keys LSE is the sink, and the sweep for dQ has one key that is not hidden
        first_key, end = range_of(cu_k, b, batch, total_k)
        seeing &= end > first_key
    delta = prepare_rows(
        pointers, (stats_ptr, sums_ptr, turns_ptr), out_row, do_row, rows, rows < length, seeing, place, block, part,
        scale, HEAD_DIM_V, PADDED, PADDED_V, GRAD_LSE, False, TURNS, FOLDED, SINKS, BLOCK_M, ROWS,
    )  # fmt: skip
    if SINKS:
        tl.store(delta_ptr + place, delta, mask=rows < length)
    if SUMS:  # noqa: SIM102 - Triton would build what follows an `and`, too
        if m * BLOCK_M < length:
            zero_sums(sums_ptr, block, part, PADDED, BLOCK_M, ROWS)
    if KEYS:
        zero_more(sums_ptr, more_sums, ROWS * PADDED)


@triton.jit(do_not_specialize=SIZES[:3] + SIZES[4:])
def after_packed(
    sums_ptr, dq_ptr, dk_ptr, dv_ptr, cu_q, key_blocks,
    dq_row: tl.int64, dq_head: tl.int64, dk_row: tl.int64, dk_head: tl.int64, dv_row: tl.int64, dv_head: tl.int64,
    batch, total_q, row_blocks, heads_kv, units, scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """64 rows and COLUMNS columns of dQ: what one group of the main kernel handed over in one step. After those
    `units`, of tiles that were divided, as many of dK and dV."""
    unit = tl.program_id(0)
    after_previous_kernel()
    if not KEYS or unit < units:
        part = unit % 2
        block = unit // 2
        h = block // row_blocks
        m, begin, length, _ = find_block(block - h * row_blocks, cu_q, batch, total_q, BLOCK_M, CHUNK)
        dq_ptr += begin * dq_row + h * dq_head
        first_row, first_column = part_of_block(part, m * BLOCK_M, BLOCK_M, COLUMNS)
        if first_row < length:
            put_in_order(
                sums_ptr, dq_ptr, dq_row, unit, first_row, first_column, length, scale, HEAD_DIM, COLUMNS
            )  # fmt: skip
    else:
        K_UNITS: tl.constexpr = PADDED // COLUMNS
        V_UNITS: tl.constexpr = PADDED_V // COLUMNS
        own = (unit - units) // (K_UNITS + V_UNITS)
        c = (unit - units) % (K_UNITS + V_UNITS)
        listed = own // (2 * heads_kv)
        h = own // 2 - listed * heads_kv
        if listed < tl.load(key_blocks):
            entry = key_blocks + (listed + 1) * WORDS
            first_row = tl.load(entry) * BLOCK_N + own % 2 * 64
            rows = tl.load(entry + 2)
            begin = tl.load(entry + 1) - rows
            if c < K_UNITS:
                dk_ptr += begin * dk_row + h * dk_head
                put_in_order(
                    sums_ptr, dk_ptr, dk_row, unit, first_row, c * COLUMNS, rows, scale, HEAD_DIM, COLUMNS
                )  # fmt: skip
            else:
                dv_ptr += begin * dv_row + h * dv_head
                put_in_order(
                    sums_ptr, dv_ptr, dv_row, unit, first_row, (c - K_UNITS) * COLUMNS, rows, 1.0, HEAD_DIM_V, COLUMNS
                )  # fmt: skip
