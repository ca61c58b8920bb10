"""Keys and values on pages: a block of keys comes in boxes, each of one page, under one another in a ring's tile.

A box is described like the end of a packed sequence (places.py): its last key is the last that there is, so that what
lies behind it on the page comes as zeros, whatever that memory holds, and a box behind the last key is all zeros.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, CUDA graphs over rotated inputs, 180 drawn prompts over pages of
16 to 256 keys and whole caches, its best config over the best of all others, by queries of the longest sequence:

  256 and more     1.50 by geometric mean, least 1.03 (47 batches)
  32 to 255        1.28, 0.63 (90)
  16 to 31         1.13, 0.64 (43)

  heads side by side   1.32 of its other configs under 128 queries (54, ahead on 41); without, 71 others had 0.71 to
                       0.88 of Triton's, which always has
  keys shared out      1.40 of not (56, ahead on 35): 1.53 where one sequence is long, 1.49 where lengths are lognormal,
                       1.11 where they are alike; shares of 1 or 2 blocks instead of 4 at least: 0.94 to 1.01 (5)
  by each one's keys   74 sequences of 24 queries, one of 124,000 keys: 1,500 us with as many shares for each, now 478;
                       16 of 64, one of 32,768: 214, now 110; the list takes 3.0 us instead of 2.1

  registers        a producer that looks pages up spilled 8 to 144 bytes with 24 of them; with 40 none, or 16 with pages
                   of 8 (what the compiler says; the two were not timed beside each other)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.places import LIMIT, box
from registry.plugins.gluon_fa3.tiles import PANEL, boxes_of, leading
from registry.toolbox import scopes
from registry.toolbox.hopper import load_tile, slot_of, wait_slot_empty

LANES = gl.constexpr(32)


@gluon.jit
def pages_of(paging, where, row, lane, T: gl.constexpr):
    """The pages of a block's boxes, one a lane; those that begin behind the last key are not looked up. Numbers of
    pages that are not there are held to those that are: what makes the list has complained."""
    table, table_row, pages, _ = paging
    key = row + lane * T.box
    own = table + where[0].to(gl.int64) * table_row
    ids = gl.load(own + key // T.page, mask=(key < where[1]) & (lane < T.boxes), other=0)
    return gl.minimum(gl.maximum(ids, 0), pages - 1)


@gluon.jit
def load_pages(tensor, r, i, where, row, paging, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Producer: bring a block of a sequence's keys or values, those from `row` on, as use i of its ring; `where` is
    (sequence, its keys, head). Page numbers are asked for before a slot is free."""
    FIRST: gl.constexpr = leading(COLUMNS)
    REST: gl.constexpr = COLUMNS - FIRST
    BOXES: gl.constexpr = T.boxes
    BOX: gl.constexpr = T.box
    lane = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    ids = pages_of(paging, where, row, lane, T)
    panels = r[0]
    s = slot_of(i, r)
    scopes.enter("wait slot of K or V")
    ready = wait_slot_empty(r, s, i)
    scopes.leave("wait slot of K or V")
    mbarrier.expect(ready, T.block_n * COLUMNS * 2)
    for b in gl.static_range(BOXES):
        page = gl.sum(gl.where(lane == b, ids, 0), 0)
        count = gl.minimum(gl.maximum(where[1] - row - b * BOX, 0), BOX)
        end = page * paging[3] + (row + b * BOX) % T.page + count
        here = (end, LIMIT - count, where[2])
        for p in gl.static_range(FIRST // PANEL):
            to = boxes_of(panels[0], tensor).index((s * (FIRST // PANEL) + p) * BOXES + b)
            load_tile(tensor, box(here, 0, p * PANEL, T), ready, to)
        for p in gl.static_range(REST // PANEL):
            to = boxes_of(panels[1], tensor).index((s * (REST // PANEL) + p) * BOXES + b)
            load_tile(tensor, box(here, 0, FIRST + p * PANEL, T), ready, to)
