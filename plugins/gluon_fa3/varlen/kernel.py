"""gluon_fa3's kernel over packed sequences: the same roles, tiles out of a list that the device made (tile_list.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
