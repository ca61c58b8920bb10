"""Tiles of Q, K, V and O in shared memory: as many panels of 64 columns as the head dim needs.

A panel is what a tensor map's box holds (a swizzle spans 128 bytes), and neighbouring panels are one matrix. No tensor
of the language has 192 columns, so the panels of such a tile lie in two places: those of its first 128 columns, and the
rest. A tile is passed on as (panels, its slot).
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3 import traits
from registry.plugins.gluon_fa3.places import beside, box
from registry.toolbox import scopes
from registry.toolbox.clusters import release_in_both, wait_at
from registry.toolbox.hopper import (
    init_barriers,
    load_tile,
    release_slot,
    retyped,
    ring,
    slot_of,
    store_tile,
    viewed,
    wait_slot_empty,
    wait_slot_full,
)
from registry.toolbox.wgmma import lanes, shared_memory

PANEL = gl.constexpr(traits.PANEL)
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def leading(columns):
    """Of a tile's columns those that are one matrix: the largest power of two."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def rows_in(shape):
    """Of a box, or a panel: its rows, those of several heads below one another."""
    return math.prod(int(size) for size in shape[:-1])


@gluon.constexpr_function
def boxes_in(panels, box_shape):
    """The shape of panels' memory as one of boxes."""
    return [rows_in(panels) // rows_in(box_shape), *box_shape]


@gluon.constexpr_function
def same(one, other):
    return [int(size) for size in one] == [int(size) for size in other]


@gluon.jit
def panels_of(tensor, COUNT: gl.constexpr, BOXES: gl.constexpr = 1):
    """Shared memory for so many panels, each of so many boxes of a tensor map, one below the other: a swizzle repeats
    after 8 rows, so rows go on in the next box, and inside of one in the next head."""
    # Not put down under a name: a profile calls memory by the name that it has where it is asked for.
    SHAPE: gl.constexpr = [COUNT * BOXES] + tensor.block_shape
    return stacked(gl.allocate_shared_memory(tensor.dtype, SHAPE, tensor.layout), COUNT)


@gluon.jit
def stacked(boxes, COUNT: gl.constexpr):
    """Boxes as so many panels."""
    ROWS: gl.constexpr = rows_in(boxes.shape) // COUNT
    LAYOUT: gl.constexpr = boxes.layout
    if boxes.shape[len(boxes.shape) - 2] == ROWS:
        return boxes
    else:
        return viewed(boxes, [COUNT, 1, 1, 1, ROWS, PANEL], LAYOUT)


@gluon.jit
def boxes_of(panels, tensor):
    """Panels as the boxes that they consist of."""
    LAYOUT: gl.constexpr = tensor.layout
    SHAPE: gl.constexpr = boxes_in(panels.shape, tensor.block_shape)
    if same(SHAPE, panels.shape):
        return panels
    else:
        return viewed(panels, SHAPE, LAYOUT)


@gluon.jit
def tile_ring(tensor, COLUMNS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, BOXES: gl.constexpr = 1):
    """A ring of tiles of so many columns, whose rows come in so many boxes."""
    FIRST: gl.constexpr = leading(COLUMNS)
    first, full, empty = ring(panels_of(tensor, STAGES * (FIRST // PANEL), BOXES), STAGES, READERS)
    if FIRST == COLUMNS:
        return (first,), full, empty
    else:
        return (first, panels_of(tensor, STAGES * ((COLUMNS - FIRST) // PANEL), BOXES)), full, empty


@gluon.constexpr_function
def known_places(t):
    """(panels of tiles of K and V, KiB of them, words for a ring's barriers, where these begin, counted in as many)."""
    panels = t.stages * (t.head + t.head_v) // 64
    units, words = panels * t.block_n // 8, 1 << (t.stages - 1).bit_length()
    return panels, units, words, units * 128 // words


@gluon.jit
def rings_at_known_place(tensor, T: gl.constexpr):
    """Those of K and V in one allocation: K's tiles, V's, and behind them their barriers. It is the largest, so the
    compiler puts it first (tests hold that), and what is written out can tell where each lies."""
    STAGES: gl.constexpr = T.stages
    N: gl.constexpr = T.block_n
    PANELS: gl.constexpr = known_places(T)[0]
    UNITS: gl.constexpr = known_places(T)[1]
    EACH: gl.constexpr = known_places(T)[2]
    FIRST: gl.constexpr = known_places(T)[3]
    RINGS: gl.constexpr = (UNITS + 1) * 128 // EACH
    LAYOUT: gl.constexpr = tensor.layout
    memory = gl.allocate_shared_memory(tensor.dtype, [UNITS + 1, 1, 1, 8, PANEL], tensor.layout)
    panels = viewed(memory, [PANELS, 1, 1, N, PANEL], LAYOUT)
    words = retyped(memory, gl.int64, [RINGS, EACH, 1], WORDS)
    k = (panels, panels), barriers_in(words, FIRST, 1, STAGES), barriers_in(words, FIRST + 1, 4 * T.groups, STAGES)
    v = (panels, panels), barriers_in(words, FIRST + 2, 1, STAGES), barriers_in(words, FIRST + 3, 4 * T.groups, STAGES)
    return k, v


@gluon.jit
def barriers_in(words, NUMBER: gl.constexpr, ARRIVALS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of a ring, by its number among so many words."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    bars = viewed(words.index(NUMBER), [STAGES, 1], LAYOUT)
    init_barriers(bars, ARRIVALS)
    return bars


@gluon.jit
def load_columns(tensor, r, i, where, row, NAME: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Producer: bring a tile as use i of its ring."""
    FIRST: gl.constexpr = leading(COLUMNS)
    BOXES: gl.constexpr = T.q_boxes if NAME == "Q" else 1
    ROWS: gl.constexpr = rows_in(tensor.block_shape) * BOXES
    panels, full, empty = r
    s = slot_of(i, r)
    WAIT: gl.constexpr = "wait slot of Q" if NAME == "Q" else "wait slot of K or V"
    scopes.enter(WAIT)
    ready = wait_slot_empty(r, s, i)
    scopes.leave(WAIT)
    mbarrier.expect(ready, ROWS * COLUMNS * 2)
    for b in gl.static_range(BOXES):
        here = where
        if BOXES > 1:
            here, _ = beside(where, b, T)
        at = place_of(s, NAME, 0, T)
        for p in gl.static_range(FIRST // PANEL):
            to = boxes_of(panels[0], tensor).index((at * (FIRST // PANEL) + p) * BOXES + b)
            load_tile(tensor, box(here, row, p * PANEL, T), ready, to)
        at = place_of(s, NAME, 1, T)
        for p in gl.static_range((COLUMNS - FIRST) // PANEL):
            to = boxes_of(panels[1], tensor).index((at * ((COLUMNS - FIRST) // PANEL) + p) * BOXES + b)
            load_tile(tensor, box(here, row, FIRST + p * PANEL, T), ready, to)


@gluon.jit
def wait_tile(r, i, NAME: gl.constexpr, T: gl.constexpr):
    """Consumer: the tile of use i."""
    if is_written(NAME, T):
        wait_at(barrier_at(i, NAME, 0, T), round_of(i, T) & 1)
    else:
        wait_slot_full(r, slot_of(i, r), i)
    return tile_of(r, i, NAME, T)


@gluon.jit
def tile_of(r, i, NAME: gl.constexpr, T: gl.constexpr):
    """Consumer: the same, which has been waited for."""
    if is_written(NAME, T):
        s = i - round_of(i, T) * T.stages
    else:
        s = slot_of(i, r)
    return r[0], place_of(s, NAME, 0, T), place_of(s, NAME, 1, T)


@gluon.jit
def release_tile(r, i, NAME: gl.constexpr, T: gl.constexpr):
    """Consumer: this group is done with use i; where it is written out, each warp for itself."""
    if is_written(NAME, T):
        release_in_both(barrier_at(i, NAME, 1, T), lanes() % 32, False)
    else:
        release_slot(r, slot_of(i, r))


# Written out. For each arrival at a barrier the compiler lets the warps of a group wait for each other, before it and
# after, four times a block of keys; a warp that has waited for its products needs no others to let go of a tile.


@gluon.constexpr_function
def is_written(name, t):
    """Of the rings of tiles that are named K, V and Q."""
    return t.written and name != "Q"


@gluon.jit
def round_of(i, T: gl.constexpr):
    """How often the ring went round before use i, which is not negative: without the steps that a sign would take."""
    if T.stages == 2:
        return i >> 1
    else:
        return i // T.stages


@gluon.constexpr_function
def _barriers_at(name, empty, t):
    _, _, words, first = known_places(t)
    return 8 * words * (first + 2 * (name == "V") + empty)


@gluon.jit
def barrier_at(i, NAME: gl.constexpr, EMPTY: gl.constexpr, T: gl.constexpr):
    """The address of the barrier of use i."""
    FIRST: gl.constexpr = _barriers_at(NAME, EMPTY, T)
    return shared_memory() + FIRST + 8 * (i - round_of(i, T) * T.stages)


@gluon.constexpr_function
def first_place(name, rest, t):
    if not is_written(name, t):
        return 0
    k, v = leading(t.head) // 64, leading(t.head_v) // 64  # panels of leading columns: K's, V's, and then the rests'
    if rest:
        return t.stages * (k + v + (0 if name == "K" else t.head // 64 - k))
    return 0 if name == "K" else t.stages * k // v


@gluon.constexpr_function
def slot_bytes(name, t):
    """Of a tile's leading columns, in which its places are counted."""
    return t.block_n * 2 * leading(t.head if name == "K" else t.head_v)


@gluon.jit
def place_of(s, NAME: gl.constexpr, REST: gl.constexpr, T: gl.constexpr):
    """Where a slot's tile is, counted in such tiles: its leading columns, or the REST of them (one panel)."""
    FIRST: gl.constexpr = first_place(NAME, REST, T)
    return s + FIRST


@gluon.jit
def _matrix(panels, s, COLUMNS: gl.constexpr):
    ROWS: gl.constexpr = panels.shape[len(panels.shape) - 2]
    SLOTS: gl.constexpr = panels.shape[0] * PANEL // COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], panels.dtype)
    return viewed(panels, [SLOTS, ROWS, COLUMNS], LAYOUT).index(s)


@gluon.jit
def columns_of(tile, FROM: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Some columns of a tile of so many as a matrix: a power of two, from a multiple of it on."""
    FIRST: gl.constexpr = leading(COLUMNS)
    panels, s, rest = tile
    if FROM < FIRST:
        m = _matrix(panels[0], s, FIRST)
        if COUNT < FIRST:
            m = m.slice(FROM, COUNT, dim=1)
    else:
        m = _matrix(panels[1], rest, COLUMNS - FIRST)
        if COUNT < COLUMNS - FIRST:
            m = m.slice(FROM - FIRST, COUNT, dim=1)
    return m


@gluon.jit
def send(tensor, tile, where, row, FROM: gl.constexpr, COLUMNS: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr):
    """Copy columns of a tile of WIDE out, to columns FROM and on; those past the tensor's last are cut off."""
    panels, s, _ = tile
    BOXES: gl.constexpr = T.q_boxes
    for b in gl.static_range(BOXES):
        if BOXES == 1:
            _send_box(tensor, panels, s, 0, where, row, FROM, COLUMNS, WIDE, T)
        else:
            here, again = beside(where, b, T)
            if not again:
                _send_box(tensor, panels, s, b, here, row, FROM, COLUMNS, WIDE, T)


@gluon.jit
def _send_box(tensor, panels, s, b, where, row, FROM: gl.constexpr, COLUMNS: gl.constexpr, WIDE: gl.constexpr, T):
    BOXES: gl.constexpr = T.q_boxes
    for p in gl.static_range(COLUMNS // PANEL):
        out = boxes_of(panels[0], tensor).index((s * (WIDE // PANEL) + p) * BOXES + b)
        store_tile(tensor, box(where, row, FROM + p * PANEL, T), out)
