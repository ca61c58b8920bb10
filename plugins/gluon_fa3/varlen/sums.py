"""The kernels before and after that of the gradients, over packed sequences: see backward/sums.py.

Each sequence has row blocks of its own in the workspaces, found without a list (tile_list.find_block), and one that no
row needs, whose rows see nothing: a tile of keys without queries reads it.
"""

import triton
import triton.language as tl

from registry.plugins.gluon_fa3.backward.sums import after_previous_kernel, part_of_block, prepare_rows, put_in_order
from registry.plugins.gluon_fa3.varlen.tile_list import find_block

SIZES = ["batch", "total_q", "row_blocks"]


@triton.jit(do_not_specialize=SIZES)
def before_packed(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, turns_ptr, cu_q,
    out_row: tl.int64, out_head: tl.int64, do_row: tl.int64, do_head: tl.int64, batch, total_q, row_blocks, scale,
    HEAD_DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, GRAD_LSE: tl.constexpr,
    TURNS: tl.constexpr, FOLDED: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS of a block of BLOCK_M rows of a head."""
    PARTS: tl.constexpr = BLOCK_M // ROWS
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS
    h = block // row_blocks
    after_previous_kernel()
    m, begin, length = find_block(block - h * row_blocks, cu_q, batch, total_q, BLOCK_M, CHUNK)
    rows = m * BLOCK_M + part * ROWS + tl.arange(0, ROWS)
    out_ptr += begin * out_row + h * out_head
    do_ptr += begin * do_row + h * do_head
    pointers = (out_ptr, do_ptr, lse_ptr, dlse_ptr)
    workspaces = (stats_ptr, sums_ptr, turns_ptr)
    place = h.to(tl.int64) * total_q + begin + rows
    prepare_rows(
        pointers, workspaces, out_row, do_row, rows, rows < length, place, block, part, scale,
        HEAD_DIM_V, PADDED, PADDED_V, GRAD_LSE, True, TURNS, FOLDED, BLOCK_M, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def after_packed(
    sums_ptr, dq_ptr, cu_q, dq_row: tl.int64, dq_head: tl.int64, batch, total_q, row_blocks, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """64 rows and COLUMNS columns of dQ: what one group of the main kernel handed over in one step."""
    part = tl.program_id(0) % 2
    block = tl.program_id(0) // 2
    h = block // row_blocks
    after_previous_kernel()
    m, begin, length = find_block(block - h * row_blocks, cu_q, batch, total_q, BLOCK_M, CHUNK)
    dq_ptr += begin * dq_row + h * dq_head
    first_row, first_column = part_of_block(part, m * BLOCK_M, BLOCK_M, COLUMNS)
    put_in_order(
        sums_ptr, dq_ptr, dq_row, tl.program_id(0), first_row, first_column, length, scale, HEAD_DIM, COLUMNS
    )  # fmt: skip
