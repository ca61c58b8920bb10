"""The two kernels around the main one, in plain Triton.

before  delta = rowsum(O * dO) - dlse and LSE, for each block of rows: in float32 and base 2, or as terms (terms.py);
        dQ's accumulator, where there is one, and its turns, set to zero
after   dQ out of the accumulator, which holds it in the order of the matrix products' registers
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOBODY = tl.constexpr(2.0**126)  # the LSE of rows that see nothing: finite, for the terms of delta lie beside its own


@triton.jit
def after_previous_kernel():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def zero_sums(sums_ptr, block, part, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """A part of a block of the sums."""
    sums_ptr += (block.to(tl.int64) * BLOCK_M + part * ROWS) * PADDED
    places = tl.arange(0, ROWS)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    tl.store(sums_ptr + places, tl.zeros([ROWS, PADDED], tl.float32))


@triton.jit
def prepare_rows(
    pointers, workspaces, out_row, do_row, rows, there, seeing, place, block, part, scale,
    HEAD_DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, GRAD_LSE: tl.constexpr,
    SUMS: tl.constexpr, TURNS: tl.constexpr, FOLDED: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A part of a block of the workspaces, from rows of O and dO, and the row sums at `place`. Rows that are `there`
    but see no key, not `seeing`, count as nobody's. Returns delta."""
    out_ptr, do_ptr, lse_ptr, dlse_ptr = pointers
    stats_ptr, sums_ptr, turns_ptr = workspaces
    inside = part * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED_V)
    seen = there[:, None] & (columns < HEAD_DIM_V)[None, :]
    out = tl.load(out_ptr + rows[:, None] * out_row + columns[None, :], mask=seen, other=0.0)
    do = tl.load(do_ptr + rows[:, None] * do_row + columns[None, :], mask=seen, other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if GRAD_LSE:
        delta -= tl.load(dlse_ptr + place, mask=there, other=0.0)
    lse = tl.load(lse_ptr + place, mask=seeing, other=float("inf"))
    if FOLDED:
        nobody = tl.where(scale < 0, -NOBODY, NOBODY)
        lse = tl.where(tl.abs(lse) == float("inf"), nobody, lse / scale)
        if SINKS:  # which may be any numbers
            lse = tl.minimum(tl.maximum(lse, -NOBODY), NOBODY)
        column = tl.arange(0, 16)[None, :]
        whole = tl.where(column < 3, lse[:, None], tl.where(column < 6, delta[:, None], 0.0))
        first = whole.to(tl.bfloat16)
        rest = whole - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        terms = tl.where(column % 3 == 0, first, tl.where(column % 3 == 1, second, third))
        tl.store(stats_ptr + (block.to(tl.int64) * BLOCK_M + inside)[:, None] * 16 + column, terms)
    else:
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        stats_ptr += block.to(tl.int64) * (2 * BLOCK_M) + inside
        tl.store(stats_ptr, lse)
        tl.store(stats_ptr + BLOCK_M, delta)
    if TURNS and part == 0:
        tl.store(turns_ptr + 2 * block.to(tl.int64) + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if SUMS:
        zero_sums(sums_ptr, block, part, PADDED, BLOCK_M, ROWS)
    return delta


@triton.jit
def zero_more(sums_ptr, more_sums, SIZE: tl.constexpr):
    """As many pieces of the sums, after one for each program, divided among all programs."""
    sums_ptr += tl.num_programs(0).to(tl.int64) * SIZE
    more = tl.program_id(0)
    while more < more_sums:
        tl.store(sums_ptr + more.to(tl.int64) * SIZE + tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32))
        more += tl.num_programs(0)


@triton.jit(do_not_specialize=["seqlen_q", "heads_q", "row_blocks", "more_sums"])
def before(
    out_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    sums_ptr,
    turns_ptr,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_row: tl.int64,
    do_batch: tl.int64,
    do_head: tl.int64,
    do_row: tl.int64,
    seqlen_q,
    heads_q,
    row_blocks,
    more_sums,
    scale,
    HEAD_DIM_V: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_V: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    SUMS: tl.constexpr,
    TURNS: tl.constexpr,
    FOLDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """ROWS of a block of BLOCK_M rows; of the zeroes, `more_sums` times as many as those have, divided among all."""
    PARTS: tl.constexpr = BLOCK_M // ROWS
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS
    bh = block // row_blocks
    b = bh // heads_q
    h = bh - b * heads_q
    rows = (block - bh * row_blocks) * BLOCK_M + part * ROWS + tl.arange(0, ROWS)
    after_previous_kernel()
    pointers = (out_ptr + b * out_batch + h * out_head, do_ptr + b * do_batch + h * do_head, lse_ptr, dlse_ptr)
    workspaces = (stats_ptr, sums_ptr, turns_ptr)
    place = bh.to(tl.int64) * seqlen_q + rows
    prepare_rows(
        pointers, workspaces, out_row, do_row, rows, rows < seqlen_q, rows < seqlen_q, place, block, part, scale,
        HEAD_DIM_V, PADDED, PADDED_V, GRAD_LSE, SUMS, TURNS, FOLDED, False, BLOCK_M, ROWS,
    )  # fmt: skip
    if KEYS:
        zero_more(sums_ptr, more_sums, ROWS * PADDED)


@triton.jit
def put_in_order(
    sums_ptr, out_ptr, out_row, unit, first_row, first_column, length, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One unit of the sums, 64 rows of COLUMNS columns, to rows of a gradient, of which there are `length`."""
    sums = tl.load(sums_ptr + unit.to(tl.int64) * (64 * COLUMNS) + tl.arange(0, 64 * COLUMNS))
    # As group.hand_over_sums wrote it: eight columns, warp, row of eight, pair of columns, rows' half, column
    sums = sums.reshape(COLUMNS // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, COLUMNS)
    rows = first_row + tl.arange(0, 64)[:, None]
    columns = first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < length) & (columns < HEAD_DIM)
    tl.store(out_ptr + rows * out_row + columns, (sums * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def part_of_block(part, first_row, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """(first row, first column) of a group's part of dQ: half of the columns, or of the rows."""
    if BLOCK_M == 64:
        return first_row, part * COLUMNS
    else:
        return first_row + part * 64, 0


@triton.jit(do_not_specialize=["seqlen_q", "heads_q", "row_blocks", "seqlen_k", "heads_kv", "key_blocks", "units"])
def after(
    sums_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dq_batch: tl.int64,
    dq_head: tl.int64,
    dq_row: tl.int64,
    dk_batch: tl.int64,
    dk_head: tl.int64,
    dk_row: tl.int64,
    dv_batch: tl.int64,
    dv_head: tl.int64,
    dv_row: tl.int64,
    seqlen_q,
    heads_q,
    row_blocks,
    seqlen_k,
    heads_kv,
    key_blocks,
    units,
    scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """64 rows and COLUMNS columns of dQ: what one group of the main kernel handed over in one step. After those
    `units`, of tiles that were divided, as many of dK and dV."""
    unit = tl.program_id(0)
    after_previous_kernel()
    if not KEYS or unit < units:
        part = unit % 2
        block = unit // 2
        bh = block // row_blocks
        b = bh // heads_q
        first_row, first_column = part_of_block(part, (block - bh * row_blocks) * BLOCK_M, BLOCK_M, COLUMNS)
        put_in_order(
            sums_ptr, dq_ptr + b * dq_batch + (bh - b * heads_q) * dq_head, dq_row, unit, first_row, first_column,
            seqlen_q, scale, HEAD_DIM, COLUMNS,
        )  # fmt: skip
    else:
        K_UNITS: tl.constexpr = PADDED // COLUMNS
        V_UNITS: tl.constexpr = PADDED_V // COLUMNS
        own = (unit - units) // (K_UNITS + V_UNITS)
        c = (unit - units) % (K_UNITS + V_UNITS)
        bh = own // (2 * key_blocks)
        first_row = (own - bh * (2 * key_blocks)) * 64
        b = bh // heads_kv
        h = bh - b * heads_kv
        if c < K_UNITS:
            dk_ptr += b * dk_batch + h * dk_head
            put_in_order(
                sums_ptr, dk_ptr, dk_row, unit, first_row, c * COLUMNS, seqlen_k, scale, HEAD_DIM, COLUMNS
            )  # fmt: skip
        else:
            dv_ptr += b * dv_batch + h * dv_head
            put_in_order(
                sums_ptr, dv_ptr, dv_row, unit, first_row, (c - K_UNITS) * COLUMNS, seqlen_k, 1.0, HEAD_DIM_V, COLUMNS
            )  # fmt: skip
