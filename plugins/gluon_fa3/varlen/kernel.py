"""gluon_fa3's kernels over packed sequences: the same roles, and tiles out of a list that the device made."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.backward.kernel import differentiate
from registry.plugins.gluon_fa3.kernel import attend
from registry.toolbox.hopper import after_previous_kernel

SIZES = "total_q left right heads_q group section_heads"


@gluon.jit(do_not_specialize=SIZES.split())
def attention_packed(
    q_map,
    k_map,
    v_map,
    o_map,
    lse,
    counter,
    row_blocks,
    total_q,
    left,
    right,
    heads_q,
    group,
    section_heads,
    scale,
    cap,
    T: gl.constexpr,
):
    after_previous_kernel()
    steps = gl.load(row_blocks)
    extent = (0, 0, left, right)
    work = (steps * heads_q, steps, heads_q, section_heads, row_blocks)
    maps = (q_map, k_map, v_map)
    attend(maps, o_map, lse, total_q, counter.to(gl.int64), extent, work, heads_q, group, scale, cap, T)


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
    """A block a tile, of as many as any lengths need: those beyond the list end at once."""
    after_previous_kernel()
    listed = gl.load(key_blocks)
    if gl.program_id(0) < listed * heads_kv:
        extent = (0, 0, left, right)
        work = (heads_kv, group, row_blocks, listed, heads_kv, section_heads, 0, key_blocks)
        inputs = (q_map, k_map, v_map, do_map, stats_map)
        differentiate(inputs, (dk_map, dv_map), dq_map, turns.to(gl.int64), extent, work, scale, scale_log2, cap, T)
