"""Tiles of Q, K, V and O in shared memory: as many panels of 64 columns as the head dim needs.

A panel is what a tensor map's box holds (a swizzle spans 128 bytes), and neighbouring panels are one matrix. No tensor
of the language has 192 columns, so the panels of such a tile lie in two places: those of its first 128 columns, and the
rest. A tile is passed on as (panels, its slot).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3 import traits
from registry.plugins.gluon_fa3.places import box
from registry.toolbox import scopes
from registry.toolbox.hopper import (
    load_tile,
    release_slot,
    ring,
    slot_of,
    store_tile,
    viewed,
    wait_slot_empty,
    wait_slot_full,
)

PANEL = gl.constexpr(traits.PANEL)


@gluon.constexpr_function
def leading(columns):
    """Of a tile's columns those that are one matrix: the largest power of two."""
    return 1 << (columns.bit_length() - 1)


@gluon.jit
def panels_of(tensor, COUNT: gl.constexpr):
    """Shared memory for so many boxes of a tensor map."""
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)


@gluon.jit
def tile_ring(tensor, COLUMNS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles of so many columns."""
    FIRST: gl.constexpr = leading(COLUMNS)
    first, full, empty = ring(panels_of(tensor, STAGES * (FIRST // PANEL)), STAGES, READERS)
    if FIRST == COLUMNS:
        return (first,), full, empty
    else:
        return (first, panels_of(tensor, STAGES * ((COLUMNS - FIRST) // PANEL))), full, empty


@gluon.jit
def load_columns(tensor, r, i, where, row, WAIT: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Producer: bring a tile as use i of its ring."""
    FIRST: gl.constexpr = leading(COLUMNS)
    ROWS: gl.constexpr = tensor.block_shape[len(tensor.block_shape) - 2]
    panels, full, empty = r
    s = slot_of(i, r)
    scopes.enter(WAIT)
    ready = wait_slot_empty(r, s, i)
    scopes.leave(WAIT)
    mbarrier.expect(ready, ROWS * COLUMNS * 2)
    for p in gl.static_range(FIRST // PANEL):
        load_tile(tensor, box(where, row, p * PANEL, T), ready, panels[0].index(s * (FIRST // PANEL) + p))
    for p in gl.static_range((COLUMNS - FIRST) // PANEL):
        to = panels[1].index(s * ((COLUMNS - FIRST) // PANEL) + p)
        load_tile(tensor, box(where, row, FIRST + p * PANEL, T), ready, to)


@gluon.jit
def wait_tile(r, i):
    """Consumer: the tile of use i."""
    s = slot_of(i, r)
    wait_slot_full(r, s, i)
    return r[0], s


@gluon.jit
def tile_of(r, i):
    """Consumer: the same, which has been waited for."""
    return r[0], slot_of(i, r)


@gluon.jit
def release_tile(r, i):
    """Consumer: this group is done with use i."""
    release_slot(r, slot_of(i, r))


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
    panels, s = tile
    if FROM < FIRST:
        m = _matrix(panels[0], s, FIRST)
        if COUNT < FIRST:
            m = m.slice(FROM, COUNT, dim=1)
    else:
        m = _matrix(panels[1], s, COLUMNS - FIRST)
        if COUNT < COLUMNS - FIRST:
            m = m.slice(FROM - FIRST, COUNT, dim=1)
    return m


@gluon.jit
def send(tensor, tile, where, row, FROM: gl.constexpr, COLUMNS: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr):
    """Copy columns of a tile of WIDE out, to columns FROM and on; those past the tensor's last are cut off."""
    panels, s = tile
    for p in gl.static_range(COLUMNS // PANEL):
        store_tile(tensor, box(where, row, FROM + p * PANEL, T), panels[0].index(s * (WIDE // PANEL) + p))
