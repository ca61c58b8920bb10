"""gluon_fa3's kernels over packed sequences: the same roles, and tiles out of a list that the device made.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, with LSE, CUDA graphs, medians of shuffled rounds; ratios
to FlashAttention-3's kernel for packed sequences and to dense gluon_fa3, both in the same run (varlen_gluon.txt).
4 x 4,096 and 16 x 2,048 tokens, uniform, lognormal and one long among short; heads 16/16 and 32/8 at D128, 32/32 at
D64, 8/8 at D256: 24 cells a mask, in the first config.

forward, causal   1.14 of FA3 by geometric mean, least 1.03; of dense where lengths are alike 0.98 to 1.01
forward, full     1.10, least 1.01; of dense 0.95 to 1.00
gradients         in later runs (varlen_backward_gluon.txt), of 12, 24 and 12 cells: D64 1.12 of FA3, least 1.011; D128
                  1.16, least 1.046; D256 1.10, least 1.044; of the dense kernel 0.96 to 1.05

helped
  masked blocks in a loop of their own   causal, of dense: D128 0.94-0.98 -> 0.98-0.99, D256 0.88-0.93 -> 1.00 (separate
                                         runs): a branch in the steady loop cost more than its instructions
  tiles of 64 rows for short sequences   D128 causal, 32 sequences of 95 in the mean: 27 -> 20 us; of 128: 72 -> 71
  three groups at D64 causal             1 x 16,384: 2,258 -> 2,125 us; 4 x 4,096: 574 -> 583
  sinks                                  added at a tile's end, on an H100, 64/8 heads of D64: 1.00 of the time without
                                         them, 1.02 in windows of 128 keys. Loaded at its start instead 1.015 more
  a list that layers share               1 to 3 us a call
  programmatic launch                    1 to 2 us a call, of 41 to 139
gradients
  tiles drawn                            D64, two in flight 1.015 -> 1.11 of FA3 (two runs), three 1.00 -> 1.06; D128
                                         1.138 -> 1.150
  sweeps beside each other               D256 1.046 -> 1.099; 16 sequences, one of 2,048: 205 -> 146 us
  dQ's sweep last                        that batch 168 us; others alike
  tiles in parts                         32/8 heads, that batch: 297 -> 257 us; 32/2, one sequence of 2,048: 903 ->
                                         269 in four, 190 in eight
  blocks without rows left alone         128 x 128 tokens: D64 401 -> 364 us, D128 344 -> 311
  32 rows a program of `before`          the same: D64 364 -> 332, D128 alike; long sequences alike
  64 rows a step at D64                  the same: 332 -> 322; 15 in the mean: 213 -> 152; 512: 397 -> 428
  not: 64 rows a program of `before`, 2 or 8 warps of `after`, words of the list told to be uniform
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.backward.kernel import differentiate
from registry.plugins.gluon_fa3.backward.sweep import sweep
from registry.plugins.gluon_fa3.kernel import attend
from registry.toolbox.hopper import after_previous_kernel

_LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, 0;")
_AWAIT_PREVIOUS = gl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
SIZES = "pitch left right heads_q group section_heads"


@gluon.jit
def attend_listed(maps, o_map, sums, counter, listed, bounds, heads, paging, scale, cap, T: gl.constexpr):
    """Tiles out of the list, or the end at once for a block that finds none: it would look behind the list."""
    lse, pitch, sinks = sums
    if T.sinks:
        lse = lse, sinks
    heads_q, group, section_heads = heads
    after_previous_kernel()
    steps = gl.load(listed)
    if gl.program_id(0) < steps * heads_q:
        extent = (0, 0, bounds[0], bounds[1])
        work = (steps * heads_q, steps, heads_q, section_heads, listed, paging)
        attend(maps, o_map, lse, pitch, counter.to(gl.int64), extent, work, heads_q, group, scale, cap, T)


@gluon.jit(do_not_specialize=SIZES.split())
def attention_packed(
    q_map,
    k_map,
    v_map,
    o_map,
    lse,
    counter,
    row_blocks,
    pitch,
    left,
    right,
    heads_q,
    group,
    section_heads,
    scale,
    cap,
    sinks,
    T: gl.constexpr,
):
    maps, heads = (q_map, k_map, v_map), (heads_q, group, section_heads)
    attend_listed(maps, o_map, (lse, pitch, sinks), counter, row_blocks, (left, right), heads, (), scale, cap, T)


@gluon.jit(do_not_specialize=[*SIZES.split(), "table_row", "pages", "page_rows"])
def attention_paged(
    q_map,
    k_map,
    v_map,
    o_map,
    lse,
    counter,
    row_blocks,
    table,
    pitch,
    left,
    right,
    heads_q,
    group,
    section_heads,
    table_row,
    pages,
    page_rows,
    scale,
    cap,
    sinks,
    T: gl.constexpr,
):
    """The same where keys and values lie on pages (../pages.py), each so many rows after the one before."""
    maps, heads = (q_map, k_map, v_map), (heads_q, group, section_heads)
    paging = (table, table_row, pages, page_rows)
    attend_listed(maps, o_map, (lse, pitch, sinks), counter, row_blocks, (left, right), heads, paging, scale, cap, T)


@gluon.jit(do_not_specialize=["left", "right", "heads_kv", "group", "row_blocks", "section_heads"])
def attention_packed_backward(
    q_map,
    k_map,
    v_map,
    do_map,
    stats_map,
    dq_map,
    dk_map,
    dv_map,
    turns,
    counter,
    key_blocks,
    left,
    right,
    heads_kv,
    group,
    row_blocks,
    section_heads,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    after_previous_kernel()
    listed = gl.load(key_blocks)
    if gl.program_id(0) < listed * heads_kv:
        extent = (0, 0, left, right)
        work = (heads_kv, group, row_blocks, listed, heads_kv, section_heads, 0, key_blocks)
        inputs = (q_map, k_map, v_map, do_map, stats_map)
        differentiate(
            inputs,
            (dk_map, dv_map),
            dq_map,
            turns.to(gl.int64),
            counter.to(gl.int64),
            extent,
            work,
            scale,
            scale_log2,
            cap,
            T,
        )


@gluon.jit(do_not_specialize=["left", "right", "heads_own", "group", "row_blocks", "section_heads"])
def attention_packed_gradient(
    x_map,
    y_map,
    u_map,
    w_map,
    stats_map,
    out_map,
    stats,
    listed,
    left,
    right,
    heads_own,
    group,
    row_blocks,
    section_heads,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    """One sweep. The second and the third read nothing that the one before them writes: their blocks start as soon as
    SMs fall free. By then that one's have started too, and what it waited for is there. Each ends after it all the
    same, for whoever waits for the last one waits for all."""
    if T.follows:
        after_previous_kernel()
    else:
        gl.inline_asm_elementwise(_LET_NEXT_START, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    count = gl.load(listed)
    if gl.program_id(0) < count * heads_own:
        extent = (0, 0, left, right)
        work = (heads_own, group, row_blocks, count, heads_own, section_heads, 0, listed)
        maps = (x_map, y_map, u_map, w_map, stats_map)
        sweep(maps, out_map, stats, extent, work, scale, scale_log2, cap, T)
    if not T.follows:
        gl.inline_asm_elementwise(_AWAIT_PREVIOUS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
