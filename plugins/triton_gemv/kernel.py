"""Products of few rows: x [M, K] @ b [K, N] with M of 1 to 4, b read once, by multiply-adds in float32 (int32).

Memory decides, so all that this file is about is b: every byte is loaded once, in units of 16 bytes, several of which
each thread has in flight. Units are aligned whatever the pitch and the address of b: a row that starts inside a unit is
read from the unit's start, and what of it belongs to the row before counts for nothing. Rows whose numbers differ by
a multiple of 16 bytes over the pitch's odd part start at the same place of a unit, so that

- where b is contiguous along N, a program has WIDTH columns, less one unit if rows start anywhere, and walks a range of
  K, PASS rows at a time. Thread t always meets rows t, t + PASS, ... that start alike, so its sums stay its own until
  the end, when each row's are shifted into place (`tl.gather`) and added.
- where b is contiguous along K, a program has WIDTH columns that start alike (each 1 to 8 apart) and walks a range
  of K that starts where they do; x is shifted instead.

Ranges of K (SPLIT) are added up by the last program of a tile to arrive, in the order of their index, so results are
the same each time.

The loops carry the next block, which is loaded before this one is multiplied: otherwise the compiler sinks each load to
where it is used, and a thread has one in flight (1 x 10556 x 9654 along N, each with the best of a dozen configs: 57 us
instead of 70).

Measured facts (H200, torch 2.11, triton 3.6.0; replayed graphs over rotated inputs, 2 bytes an element).
- 68 drawn products: the config ranked first 1.07 of the fastest of all other variants by geometric mean, and 2% slower
  than the best of four.
- Wins: pitches of no whole units (1 x 10466 x 4668 31.6 us for 65.7; 4 x 3329 x 7590 28.9 for 54.2), and little work
  along K (1 x 896 x 896 2.2 for 3.3; 3 x 1024 x 4096 5.3 for 7.8), where one launch without sums across programs does.
- Loses: 4 rows of aligned operands (4 x 7680 x 5120 27.3 us for 21.3: so many multiply-adds are what tensor cores are
  for), and tiny products of several rows along N, for each row is shifted on its own (4 x 727 x 126 3.4 us for 2.1).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.arithmetic import activate

INTEGERS = ["N", "K", "splits", "alike"]
INTEGERS += ["sxz", "sxi", "sxk", "sbz", "pitch", "scz", "sci", "scj", "s_bias_i", "s_bias_j"]


@triton.jit
def _start(ptr, UNIT: tl.constexpr):
    """Elements between an address and the start of its unit of 16 bytes."""
    SIZE: tl.constexpr = 16 // UNIT
    return ((ptr.to(tl.int64) & 15) // SIZE).to(tl.int32)


@triton.jit
def _factors(x_ptr, places, sxi, mask, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """These places of each row of x."""
    found = ()
    for i in tl.static_range(ROWS):
        found += (tl.load(tl.multiple_of(x_ptr + i * sxi + places, BYTES), mask=mask, other=0),)
    return found


@triton.jit
def _along_n(
    x_ptr, b_ptr, j0, lo, hi, N, sxi, sxk, pitch,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PASS: tl.constexpr, DEEP: tl.constexpr, UNIT: tl.constexpr,
    SHIFT: tl.constexpr, X_UNIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sums of K rows lo..hi for columns j0.., b contiguous along them; one vector of WIDTH for each row of x."""
    t = tl.arange(0, PASS * DEEP)
    c = tl.arange(0, WIDTH)
    row_ptrs = b_ptr + (lo + t).to(tl.int64) * pitch + j0
    if SHIFT:
        shift = _start(row_ptrs, UNIT)
        row_ptrs -= shift
        inside = (j0 + c // UNIT * UNIT)[None, :] - shift[:, None] < N
    else:
        inside = (j0 + c // UNIT * UNIT)[None, :] < N
    ptrs = tl.multiple_of(row_ptrs[:, None] + c[None, :], (16, 16))
    x_start = x_ptr + lo.to(tl.int64) * sxk
    x_places = t if X_UNIT else t * sxk
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((PASS, WIDTH), ACC),)
    there = lo + t < hi
    block = tl.load(ptrs, mask=there[:, None] & inside, other=0, eviction_policy="evict_first")
    factors = _factors(x_start, x_places, sxi, there, ROWS, 1)
    for k in range(lo, hi, PASS * DEEP):
        ptrs += PASS * DEEP * pitch
        x_start += PASS * DEEP * sxk
        there = k + PASS * DEEP + t < hi
        next_block = tl.load(ptrs, mask=there[:, None] & inside, other=0, eviction_policy="evict_first")
        next_factors = _factors(x_start, x_places, sxi, there, ROWS, 1)
        new = ()
        for i in tl.static_range(ROWS):
            product = factors[i].to(ACC)[:, None] * block.to(ACC)
            new += (sums[i] + tl.sum(tl.reshape(product, (DEEP, PASS, WIDTH)), 0),)
        sums = new
        block = next_block
        factors = next_factors
    found = ()
    for i in tl.static_range(ROWS):
        total = sums[i]
        if SHIFT:
            alike = tl.sum(tl.reshape(total, (PASS // UNIT, UNIT, WIDTH)), 0)
            first = b_ptr + (lo + tl.arange(0, UNIT)).to(tl.int64) * pitch + j0
            place = tl.minimum(c[None, :] + _start(first, UNIT)[:, None], WIDTH - 1)
            found += (tl.sum(tl.gather(alike, place, 1), 0),)
        else:
            found += (tl.sum(total, 0),)
    return found


@triton.jit
def _along_k(
    x_ptr, b_ptr, j, lo, hi, N, K, sxi, sxk, pitch,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, UNIT: tl.constexpr,
    SHIFT: tl.constexpr, X_UNIT: tl.constexpr, X_BYTES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sums over blocks lo..hi of K for the columns j, b contiguous along K; one vector for each row of x."""
    c = tl.arange(0, DEPTH)
    shift = 0
    first = b_ptr + tl.min(j, 0).to(tl.int64) * pitch
    if SHIFT:
        shift = _start(first, UNIT)
    column_ptrs = b_ptr + j.to(tl.int64) * pitch - shift + lo * DEPTH
    ptrs = tl.multiple_of(column_ptrs[:, None] + c[None, :], (16, 16))
    x_start = x_ptr + (lo * DEPTH - shift).to(tl.int64) * sxk
    x_places = c if X_UNIT else c * sxk
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((WIDTH, DEPTH // UNIT), ACC),)
    at = lo * DEPTH - shift
    units = at + c // UNIT * UNIT
    last = min(hi * DEPTH, K + shift) - shift if SHIFT else min(hi * DEPTH, K)
    b = tl.load(ptrs, mask=(j < N)[:, None] & (units < last)[None, :], other=0, eviction_policy="evict_first")
    mine = (at + c < last) & (at + c >= 0) if SHIFT else units < last
    factors = _factors(x_start, x_places, sxi, mine, ROWS, 1 if SHIFT else X_BYTES)
    for _ in range(lo, hi):
        now = mine
        ptrs += DEPTH
        x_start += DEPTH * sxk
        at += DEPTH
        units += DEPTH
        next_b = tl.load(ptrs, mask=(j < N)[:, None] & (units < last)[None, :], other=0, eviction_policy="evict_first")
        mine = (at + c < last) & (at + c >= 0) if SHIFT else units < last
        next_factors = _factors(x_start, x_places, sxi, mine, ROWS, 1 if SHIFT else X_BYTES)
        if SHIFT:
            b = tl.where(now[None, :], b, 0)
        b = b.to(ACC)
        new = ()
        for i in tl.static_range(ROWS):
            product = factors[i].to(ACC)[None, :] * b
            new += (sums[i] + tl.sum(tl.reshape(product, (WIDTH, DEPTH // UNIT, UNIT)), 2),)
        sums = new
        b = next_b
        factors = next_factors
    found = ()
    for i in tl.static_range(ROWS):
        found += (tl.sum(sums[i], 1),)
    return found


@triton.jit(do_not_specialize=INTEGERS)
def few_rows(
    x_ptr, b_ptr, c_ptr, bias_ptr, part_ptr, count_ptr,
    N, K, splits, alike,
    sxz, sxi, sxk, sbz, pitch, scz, sci, scj, s_bias_i, s_bias_j,
    ROWS: tl.constexpr,  # of x
    ALONG_K: tl.constexpr,  # whether b is contiguous along K
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PASS: tl.constexpr,
    UNIT: tl.constexpr,  # elements of 16 bytes
    SHIFT: tl.constexpr,  # whether rows (columns) of b may start or end inside a unit
    X_UNIT: tl.constexpr, X_RUN: tl.constexpr,  # whether x is contiguous along K; elements known to be aligned together
    SPLITS: tl.constexpr,  # ranges of K, rounded up to a power of two
    ACC: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    OWN: tl.constexpr = WIDTH - UNIT if SHIFT and not ALONG_K else WIDTH
    # --- which columns, which range of K, which batch entry
    c = tl.arange(0, WIDTH)
    if ALONG_K:
        tiles = tl.cdiv(tl.cdiv(N, alike), OWN) * alike
    else:
        tiles = tl.cdiv(N, OWN)
    pid = tl.program_id(0)
    tile = pid % tiles
    rest = pid // tiles
    split = rest % splits
    z = rest // splits
    if ALONG_K:
        j = (tile // alike * OWN + c) * alike + tile % alike
    else:
        j = tile * OWN + c
    pitch = pitch.to(tl.int64)
    sxi = sxi.to(tl.int64)  # of the last tokens of long sequences, say
    if X_UNIT:
        sxk = 1
        sxi = sxi // X_RUN * X_RUN
    else:
        sxk = sxk.to(tl.int64)
    x_ptr += z.to(tl.int64) * sxz
    b_ptr += z.to(tl.int64) * sbz
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ALONG_K:
        blocks = tl.cdiv(K + (UNIT - 1 if SHIFT else 0), DEPTH)
        per = tl.cdiv(blocks, splits)
        lo = split * per
        found = _along_k(
            x_ptr, b_ptr, j, lo, min(lo + per, blocks), N, K, sxi, sxk, pitch,
            ROWS, WIDTH, DEPTH, UNIT, SHIFT, X_UNIT, X_RUN * (16 // UNIT), ACC,
        )  # fmt: skip
    else:
        per = tl.cdiv(tl.cdiv(K, PASS), splits) * PASS
        lo = split * per
        found = _along_n(
            x_ptr, b_ptr, tile * OWN, lo, min(lo + per, K), N, sxi, sxk, pitch,
            ROWS, WIDTH, PASS, DEPTH // PASS, UNIT, SHIFT, X_UNIT, ACC,
        )  # fmt: skip

    # --- add up the ranges of K
    if SPLITS > 1:
        own = (z.to(tl.int64) * tiles + tile) * splits * (ROWS * WIDTH)
        for i in tl.static_range(ROWS):
            tl.store(part_ptr + own + (split * ROWS + i) * WIDTH + c, found[i])
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + z * tiles + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < splits - 1:
            return
        s = tl.arange(0, SPLITS)
        slots = (s * ROWS * WIDTH)[:, None] + c[None, :]
        new = ()
        for i in tl.static_range(ROWS):
            parts = tl.load(
                part_ptr + own + i * WIDTH + slots, mask=(s < splits)[:, None], other=0, cache_modifier=".cg"
            )
            new += (tl.sum(parts, 0),)
        found = new
        tl.atomic_xchg(count_ptr + z * tiles + tile, 0, sem="relaxed", scope="gpu")

    # --- epilogue: rounded once
    kind: tl.constexpr = c_ptr.dtype.element_ty
    inside = (j < N) & (c < OWN)
    c_ptrs = c_ptr + z.to(tl.int64) * scz + j.to(tl.int64) * scj
    for i in tl.static_range(ROWS):
        value = found[i]
        if kind != tl.int32:
            value = value.to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + i * s_bias_i + j.to(tl.int64) * s_bias_j, mask=inside, other=0)
            value += bias.to(value.dtype)
        value = activate(value, ACT).to(kind)
        tl.store(c_ptrs + tl.cast(i, tl.int64) * sci, value, mask=inside)
