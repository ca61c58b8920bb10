"""Where Q, K and V of a wide head lie: Q in parts, K's blocks in parts of a ring, V's in a ring.

Q's first panels are in registers alone. They come through slots of K, one for each warp group, before a tile's first K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.places import box
from registry.plugins.gluon_fa3.tiles import PANEL, columns_of, leading, panels_of
from registry.toolbox.hopper import load_tile, release_slot, ring, slot_of, viewed, wait_slot_empty, wait_slot_full

ROWS = gl.constexpr(64)


@gluon.constexpr_function
def q_parts(T):
    return len(T.q_parts)


@gluon.constexpr_function
def q_part(T, part, which):
    return T.q_parts[part][which]


@gluon.constexpr_function
def k_width(T, part):
    return T.k_widths[part]


@gluon.constexpr_function
def k_start(T, part):
    return sum(T.k_widths[:part])


@gluon.jit
def queries_of(place, T: gl.constexpr):
    """(batch, head) of a tile's queries; its number among the heads counts halves of the values."""
    return place[2], place[1] // T.halves


@gluon.jit
def value_column(place, T: gl.constexpr):
    """The first of a tile's values."""
    return (place[1] % T.halves) * T.head_v


@gluon.jit
def query_tile(q_map, T: gl.constexpr):
    """One tile of Q, each of its parts a matrix: (parts, full, empty)."""
    COUNT: gl.constexpr = q_parts(T)
    parts = ()
    for i in gl.static_range(COUNT):
        parts = parts + (panels_of(q_map, q_part(T, i, 1) // PANEL),)
    _, full, empty = ring(parts[0], 1, 1)
    return parts, full, empty


@gluon.jit
def expect(r, use, ROWS_OF: gl.constexpr, COLUMNS: gl.constexpr):
    """Producer: the slot of a use, once it is free, and the barrier that announces it."""
    s = slot_of(use, r)
    ready = wait_slot_empty(r, s, use)
    mbarrier.expect(ready, ROWS_OF * COLUMNS * 2)
    return s, ready


@gluon.jit
def load_queries(tensor, r, turn, where, row, T: gl.constexpr):
    """Producer: the columns of Q that lie in shared memory."""
    COUNT: gl.constexpr = q_parts(T)
    _, ready = expect(r, turn, ROWS, T.head - T.q_registers)
    for i in gl.static_range(COUNT):
        for p in gl.static_range(q_part(T, i, 1) // PANEL):
            load_tile(tensor, box(where, row, q_part(T, i, 0) + p * PANEL, T), ready, r[0][i].index(p))


@gluon.jit
def load_panels(tensor, r, use, where, row, T: gl.constexpr):
    """Producer: the panels of Q that one warp group keeps in registers, as a use of K's ring."""
    COUNT: gl.constexpr = T.q_panels
    s, ready = expect(r, use, ROWS, COUNT * PANEL)
    BOX: gl.constexpr = tensor.layout
    boxes = _as_queries(r[0][0], BOX, T)
    for p in gl.static_range(COUNT):
        at = s * T.panels_in_slot + p
        load_tile(tensor, box(where, row, p * PANEL, T), ready, boxes.index(at))


@gluon.jit
def _as_queries(panels, LAYOUT: gl.constexpr, T: gl.constexpr):
    COUNT: gl.constexpr = panels.shape[0] * T.block_n // ROWS
    return viewed(panels, [COUNT, 1, 1, ROWS, PANEL], LAYOUT)


@gluon.jit
def panel_of(r, use, p, LAYOUT: gl.constexpr, T: gl.constexpr):
    """Consumer: one such panel, as the first operand of a product."""
    panels = r[0][0]
    COUNT: gl.constexpr = panels.shape[0] * T.block_n // ROWS
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PANEL], panels.dtype)
    matrices = viewed(panels, [COUNT, ROWS, PANEL], MATRIX)
    return matrices.index(slot_of(use, r) * T.panels_in_slot + p).load(LAYOUT)


@gluon.jit
def load_columns(tensor, r, use, where, row, column, COLUMNS: gl.constexpr, SLOT: gl.constexpr, T: gl.constexpr):
    """Producer: so many columns from `column` on into a slot that holds SLOT."""
    FIRST: gl.constexpr = leading(SLOT)
    REST: gl.constexpr = SLOT - FIRST
    s, ready = expect(r, use, T.block_n, COLUMNS)
    for p in gl.static_range(COLUMNS // PANEL):
        if p < FIRST // PANEL:
            to = r[0][0].index(s * (FIRST // PANEL) + p)
        else:
            to = r[0][1].index(s * (REST // PANEL) + (p - FIRST // PANEL))
        load_tile(tensor, box(where, row, column + p * PANEL, T), ready, to)


@gluon.jit
def load_keys(tensor, r, use, where, block, T: gl.constexpr):
    """Producer: a block of K, part by part."""
    PARTS: gl.constexpr = T.k_parts
    for p in gl.static_range(PARTS):
        load_columns(tensor, r, use + p, where, block * T.block_n, k_start(T, p), k_width(T, p), T.k_slot, T)


@gluon.jit
def wait_use(r, use):
    wait_slot_full(r, slot_of(use, r), use)


@gluon.jit
def release_use(r, use):
    release_slot(r, slot_of(use, r))


@gluon.jit
def release_keys(r, use, T: gl.constexpr):
    PARTS: gl.constexpr = T.k_parts
    for p in gl.static_range(PARTS):
        release_use(r, use + p)


@gluon.jit
def in_slot(r, use, FROM: gl.constexpr, COUNT: gl.constexpr, SLOT: gl.constexpr):
    """Consumer: columns of a use as a matrix."""
    s = slot_of(use, r)
    return columns_of((r[0], s, s), FROM, COUNT, SLOT)


@gluon.jit
def matrix_of(panels, COLUMNS: gl.constexpr):
    """A part of Q."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], panels.dtype)
    return viewed(panels, [1, ROWS, COLUMNS], LAYOUT).index(0)
