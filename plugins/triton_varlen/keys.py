"""Where keys and values lie: packed one sequence after the other, in a cache of equal rows, or in pages.

A block of keys that lies in one page, or in no pages, moves as one 64-bit scalar; offsets inside the block are
loop-invariant and of 32 bits. Where a block spans pages, each key brings the offset of its own: slower, and right for
every page size down to 1. Nothing is read beyond a sequence's last key, so what unused pages hold does not matter.

Products with values read them column by column, which shared memory gives only in 16 bits at a time. So 8-bit values
are read as pairs of columns, and even and odd columns are multiplied, added up and written apart (`PAIRED`); where
wgmma reads shared memory, only if half a tile is wide enough (configs.in_pairs).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_varlen.lengths import BAD_TABLE, complain, within


class Strides(NamedTuple):
    """Of k and v, or of their scales, in elements. `outer` is that of a cache's sequence, or of a page."""

    k_outer: Any
    k_row: Any
    k_head: Any
    v_outer: Any
    v_row: Any
    v_head: Any


class Pages(NamedTuple):
    """Which pages hold a sequence's keys, and how many there are: a table that names others is held to these."""

    table_ptr: Any
    table_row: Any
    count: Any


class Keys(NamedTuple):
    """The keys and values of one head of one sequence, with their scales, if any."""

    k_ptr: Any
    v_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any
    strides: Any
    scale_strides: Any
    pages: Any
    end: Any


@triton.jit
def keys_of_all(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, units, scale_strides, pages, cfg: tl.constexpr):
    """The keys of all sequences, from a kernel's arguments: strides of k and v in units of K_UNIT elements."""
    UNIT: tl.constexpr = cfg.K_UNIT
    V_UNIT: tl.constexpr = cfg.K_UNIT // 2 if cfg.PAIRED else cfg.K_UNIT
    if cfg.PAIRED:
        v_ptr = v_ptr.to(tl.pointer_type(tl.uint16))
    k_outer, k_row, k_head = units.k_outer * UNIT, units.k_row * UNIT, units.k_head * UNIT
    strides = Strides(k_outer, k_row, k_head, units.v_outer * V_UNIT, units.v_row * V_UNIT, units.v_head * V_UNIT)
    return Keys(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, strides, scale_strides, pages, 0)


@triton.jit
def keys_of(b, head, sequence, keys, cfg: tl.constexpr):
    """The keys of a head of sequence b, out of those of all."""
    k_ptr = keys.k_ptr + head * keys.strides.k_head
    v_ptr = keys.v_ptr + head * keys.strides.v_head
    k_scale_ptr = keys.k_scale_ptr
    v_scale_ptr = keys.v_scale_ptr
    table_ptr = keys.pages.table_ptr
    if cfg.PER_HEAD or cfg.PER_KEY:
        k_scale_ptr += head * keys.scale_strides.k_head
        v_scale_ptr += head * keys.scale_strides.v_head
    if cfg.PAGE > 0:
        table_ptr += b * keys.pages.table_row
    elif cfg.PACKED:
        k_ptr += sequence.k_start * keys.strides.k_row
        v_ptr += sequence.k_start * keys.strides.v_row
        if cfg.PER_KEY:
            k_scale_ptr += sequence.k_start * keys.scale_strides.k_row
            v_scale_ptr += sequence.k_start * keys.scale_strides.v_row
    else:
        k_ptr += b * keys.strides.k_outer
        v_ptr += b * keys.strides.v_outer
        if cfg.PER_KEY:
            k_scale_ptr += b * keys.scale_strides.k_outer
            v_scale_ptr += b * keys.scale_strides.v_outer
    pages = Pages(table_ptr, keys.pages.table_row, keys.pages.count)
    return Keys(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, keys.strides, keys.scale_strides, pages, sequence.keys)


@triton.jit
def look_up(n, keys, cfg: tl.constexpr):
    """The page of the block of keys from n on; of each key, where blocks span pages; anything, where none are left.

    Loops look up a block ahead. Were a block's page looked up where it is used, Triton would take half of its pipeline
    for the look-up, and leave half for the keys.
    """
    if cfg.PAGE == 0:
        return n * 0
    elif cfg.PAGE % cfg.BLOCK_N == 0:
        return tl.load(keys.pages.table_ptr + n // cfg.PAGE, mask=n < keys.end, other=0)
    else:
        keys_N = n + tl.arange(0, cfg.BLOCK_N)
        return tl.load(keys.pages.table_ptr + keys_N // cfg.PAGE, mask=keys_N < keys.end, other=0)


@triton.jit
def locate(n, page, keys, cfg: tl.constexpr):
    """(page that there is, place in it) of a block's first key, or of each key."""
    if cfg.PAGE == 0:
        return page.to(tl.int64), n
    else:
        if cfg.PAGE % cfg.BLOCK_N == 0:
            place = n % cfg.PAGE
        else:
            place = (n + tl.arange(0, cfg.BLOCK_N)) % cfg.PAGE
        return within(page, 0, keys.pages.count - 1).to(tl.int64), place


@triton.jit
def load_block(
    ptr,
    n,
    page,
    place,
    outer,
    row,
    end,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    cfg: tl.constexpr,
):
    """[N, columns] of keys or values; zero beyond the last key and beyond the last column."""
    d_D = tl.arange(0, PADDED)
    n_N = tl.arange(0, cfg.BLOCK_N)
    if cfg.PAGE % cfg.BLOCK_N == 0:
        step = row
        if not cfg.WIDE:
            step = row.to(tl.int32)
        pointers = ptr + (page * outer + place * row) + (n_N[:, None] * step + d_D[None, :])
    else:
        pointers = ptr + (page * outer + place * row)[:, None] + d_D[None, :]
    inside = (n + n_N < end)[:, None]
    if MASKED and COLUMNS < PADDED:
        return tl.load(pointers, mask=inside & (d_D < COLUMNS)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    if COLUMNS < PADDED:
        return tl.load(pointers, mask=(d_D < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def widen(x, dtype: tl.constexpr, cfg: tl.constexpr):
    """Keys or values in the dtype that they are multiplied in."""
    if x.dtype == tl.int8 and dtype == tl.float16:
        # As the low bits of 1024 to 1279, which spares the slow conversion of integers.
        if cfg.PTX:
            return tl.inline_asm_elementwise(_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4) - 1152.0
        bits = (x.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x80) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(dtype)


_INT8 = tl.constexpr("""{
    .reg .b32 low, high;
    prmt.b32 low, $2, 0x64646464, 0x4140;
    prmt.b32 high, $2, 0x64646464, 0x4342;
    xor.b32 $0, low, 0x00800080;
    xor.b32 $1, high, 0x00800080;
}""")
# Of two numbers of 16 bits: (their low bytes, their high bytes) as two numbers of float16 each. Left to itself, the
# compiler takes bytes apart one by one: a fifth of all instructions of the loop.
_FP8_PAIRS = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 low, high;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_INT8_PAIRS = tl.constexpr("""{
    .reg .b32 low, high;
    prmt.b32 low, $2, 0x64646464, 0x4240;
    prmt.b32 high, $2, 0x64646464, 0x4341;
    xor.b32 $0, low, 0x00800080;
    xor.b32 $1, high, 0x00800080;
}""")


@triton.jit
def unpair(x, dtype: tl.constexpr, cfg: tl.constexpr):
    """(even columns, odd columns) of 8-bit values that were read as pairs."""
    if cfg.PTX:
        how: tl.constexpr = _INT8_PAIRS if cfg.INT8 else _FP8_PAIRS
        even, odd = tl.inline_asm_elementwise(how, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    elif cfg.INT8:
        even = ((x & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True)
        odd = ((x >> 8) ^ 0x6480).to(tl.float16, bitcast=True)
    else:
        even = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if cfg.INT8:  # as in `widen`
        even, odd = even - 1152.0, odd - 1152.0
    return even.to(dtype), odd.to(dtype)


@triton.jit
def load_scales(ptr, n, page, place, outer, row, end, cfg: tl.constexpr):
    """[N]: the scales of a block of keys or values that have one each."""
    n_N = tl.arange(0, cfg.BLOCK_N)
    if cfg.PAGE % cfg.BLOCK_N == 0:
        pointers = ptr + (page * outer + place * row) + n_N * row
    else:
        pointers = ptr + (page * outer + place * row)
    return tl.load(pointers, mask=n + n_N < end, other=0.0)


@triton.jit
def no_page(page, keys):
    """Whether what was looked up is no page that there is, as integers that can be gathered by |."""
    return ((page < 0) | (page >= tl.maximum(keys.pages.count, 1))).to(tl.int32)  # 0 where nothing was looked up


@triton.jit
def tell_of_pages(missing, word_ptr, cfg: tl.constexpr):
    """Complain if there were any such."""
    if cfg.PAGE % cfg.BLOCK_N == 0:
        tl.atomic_or(word_ptr, BAD_TABLE, mask=missing > 0, sem="relaxed")
    else:
        tl.atomic_or(word_ptr, BAD_TABLE, mask=tl.max(missing) > 0, sem="relaxed")


@triton.jit
def check_pages(keys, start, end, part, parts, word_ptr, cfg: tl.constexpr):
    """Complain of pages that are not there, in one of so many parts of the table that the keys start..end use."""
    CHUNK: tl.constexpr = 512
    last = tl.cdiv(tl.minimum(end, keys.end), cfg.PAGE)
    for first in range(start // cfg.PAGE + part * CHUNK, last, parts * CHUNK):
        entry_P = first + tl.arange(0, CHUNK)
        page_P = tl.load(keys.pages.table_ptr + entry_P, mask=entry_P < last, other=0)
        complain(word_ptr, (page_P < 0) | (page_P >= keys.pages.count), BAD_TABLE)
