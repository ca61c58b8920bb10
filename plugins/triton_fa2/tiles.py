"""What the kernels share: which program does which tile, which keys it may see, and where they lie.

Shape suffixes, here and in the kernels: M query rows and N keys of a tile, D head dim of q and k, V head dim of v.
Two bounds describe every mask: query i sees key j when  first(i) <= j <= last(i), with
first(i) = i + seqlen_k - seqlen_q - window_left  and  last(i) = i + seqlen_k - seqlen_q + window_right
(bottom-right alignment). Causal attention is window_right = 0.
"""

import triton
import triton.language as tl

from registry.toolbox.arithmetic import to_tf32

# Integer arguments that the compiler must not learn anything about: a kernel per stride or length would be too many.
INTEGERS = [
    *(
        f"{tensor}_{dim}"
        for tensor in ("q", "k", "v", "out", "do", "dq", "dk", "dv")
        for dim in ("batch", "head", "row", "col")
    ),
    "heads_q",
    "heads_kv",
    "group",
    "heads",
    "heads_per_section",
    "seqlen_q",
    "seqlen_k",
    "window_left",
    "window_right",
]


@triton.jit
def assign_tile(tiles, heads, heads_per_section, LONGEST_FIRST: tl.constexpr):
    """(tile, head) of this program: a head's tiles follow one another, so that its keys and values stay in L2.

    Under a causal mask the tiles differ in length. Then the longest start first, over a section of heads whose keys and
    values fit L2 together: no long tile is left to run alone at the end.
    """
    program = tl.program_id(0)
    section = program // (heads_per_section * tiles)
    heads_here = tl.minimum(heads_per_section, heads - section * heads_per_section)
    place = program - section * heads_per_section * tiles
    tile = place // heads_here
    head = section * heads_per_section + place - tile * heads_here
    if LONGEST_FIRST:
        tile = tiles - 1 - tile
    return tile, head


@triton.jit
def tile_offsets(rows, row_stride, columns, column_stride, UNIT_COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of a tile; rows and columns come as [:, None] and [None, :], or the other way round for a
    transposed tile. 32 bits are enough inside a tile, and cost half the registers, unless a stride is huge."""
    if not WIDE:
        row_stride = row_stride.to(tl.int32)
        column_stride = column_stride.to(tl.int32)
    if UNIT_COLUMNS:
        return rows * row_stride + columns
    return rows * row_stride + columns * column_stride


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b. float32 is rounded to tf32 first, where that is what runs."""
    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, likewise."""
    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_tile(pointers, rows, row_limit, columns, MASK_ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """What lies beyond the tensor's rows or columns reads as zero, and adds nothing to a dot product."""
    if MASK_ROWS and COLUMNS < PADDED:
        return tl.load(pointers, mask=(rows < row_limit) & (columns < COLUMNS), other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=rows < row_limit, other=0.0)
    if COLUMNS < PADDED:
        return tl.load(pointers, mask=columns < COLUMNS, other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(pointers, tile, rows, row_limit, columns, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    if COLUMNS < PADDED:
        tl.store(pointers, tile, mask=(rows < row_limit) & (columns < COLUMNS))
    else:
        tl.store(pointers, tile, mask=rows < row_limit)


@triton.jit
def load_lse2(pointers, rows, seqlen_q, MASKED: tl.constexpr):
    """lse in powers of two. A row without keys has -inf, a row beyond the tensor nothing: +inf makes P exactly 0."""
    if MASKED:
        lse = tl.load(pointers, mask=rows < seqlen_q, other=float("inf"))
    else:
        lse = tl.load(pointers)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def key_ranges(
    first_row,
    last_row,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(start, inner_start, inner_end, end): keys outside start..end are hidden from all of these rows, never visited;
    blocks inside inner_start..inner_end are seen whole by each of them, and need no mask."""
    shift = seqlen_k - seqlen_q
    start = 0
    inner_start = 0
    end = seqlen_k
    inner_end = seqlen_k
    if HAS_RIGHT:
        end = tl.minimum(end, last_row + shift + window_right + 1)
        inner_end = tl.minimum(inner_end, first_row + shift + window_right + 1)
    if HAS_LEFT:
        start = tl.maximum(first_row + shift - window_left, 0) // BLOCK_N * BLOCK_N
        inner_start = tl.cdiv(tl.maximum(last_row + shift - window_left, 0), BLOCK_N) * BLOCK_N
    inner_end = tl.maximum(inner_end, 0) // BLOCK_N * BLOCK_N
    inner_start = tl.minimum(inner_start, tl.cdiv(tl.maximum(end, 0), BLOCK_N) * BLOCK_N)
    inner_end = tl.maximum(inner_end, inner_start)
    return start, inner_start, inner_end, end


@triton.jit
def query_ranges(
    first_key,
    last_key,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The same for a block of keys: which queries see any of them, and which blocks of queries see them all."""
    shift = seqlen_k - seqlen_q
    start = 0
    inner_start = 0
    end = seqlen_q
    inner_end = seqlen_q
    if HAS_RIGHT:
        start = tl.maximum(first_key - shift - window_right, 0) // BLOCK_M * BLOCK_M
        inner_start = tl.cdiv(tl.maximum(last_key - shift - window_right, 0), BLOCK_M) * BLOCK_M
    if HAS_LEFT:
        end = tl.minimum(end, last_key - shift + window_left + 1)
        inner_end = tl.minimum(inner_end, first_key - shift + window_left + 1)
    inner_end = tl.maximum(inner_end, 0) // BLOCK_M * BLOCK_M
    inner_start = tl.minimum(inner_start, tl.cdiv(tl.maximum(end, 0), BLOCK_M) * BLOCK_M)
    inner_end = tl.maximum(inner_end, inner_start)
    return start, inner_start, inner_end, end


@triton.jit
def visible(rows, keys, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of these keys each of these rows sees; one comes as [:, None], the other as [None, :]."""
    last = tl.full(rows.shape, seqlen_k - 1, tl.int32)
    if HAS_RIGHT:
        last = tl.minimum(last, rows + (seqlen_k - seqlen_q + window_right))
    seen = keys <= last
    if HAS_LEFT:
        seen &= keys >= rows + (seqlen_k - seqlen_q - window_left)
    return seen


@triton.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1) saturates to 1 and -1 by itself: e^2x may overflow to infinity or vanish.
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)
