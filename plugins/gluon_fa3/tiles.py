"""Tiles of Q, K, V and O in shared memory: as many panels of 64 columns as the head dim needs.

A panel is what a tensor map's box holds (a swizzle spans 128 bytes), so a head dim of 192 takes three of them, although
no tensor of the language has 192 columns. Neighbouring panels are also one matrix of twice or four times the columns.
A tile is passed on as (panels, the first of its own).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.places import box
from registry.plugins.gluon_fa3.traits import PANEL as _PANEL
from registry.toolbox import scopes
from registry.toolbox.hopper import (
    as_matrix,
    load_tile,
    release_slot,
    ring,
    slot_of,
    store_tile,
    wait_slot_empty,
    wait_slot_full,
)

PANEL = gl.constexpr(_PANEL)


@gluon.jit
def panels_of(tensor, COUNT: gl.constexpr):
    """Shared memory for so many boxes of a tensor map."""
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)


@gluon.jit
def tile_ring(tensor, COLUMNS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles of so many columns."""
    return ring(panels_of(tensor, STAGES * (COLUMNS // PANEL)), STAGES, READERS)


@gluon.jit
def load_columns(tensor, r, i, where, row, SCOPE: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Producer: bring a tile as use i of its ring."""
    panels, full, empty = r
    s = slot_of(i, r)
    scopes.enter(SCOPE)
    ready = wait_slot_empty(r, s, i)
    scopes.leave(SCOPE)
    PANELS: gl.constexpr = COLUMNS // PANEL
    ROWS: gl.constexpr = panels.shape[len(panels.shape) - 2]
    mbarrier.expect(ready, ROWS * COLUMNS * 2)
    for p in gl.static_range(PANELS):
        load_tile(tensor, box(where, row, p * PANEL, T), ready, panels.index(s * PANELS + p))


@gluon.jit
def wait_tile(r, i, COLUMNS: gl.constexpr):
    """Consumer: the tile of use i."""
    s = slot_of(i, r)
    wait_slot_full(r, s, i)
    return r[0], s * (COLUMNS // PANEL)


@gluon.jit
def release_tile(r, i):
    """Consumer: this group is done with use i."""
    release_slot(r, slot_of(i, r))


@gluon.jit
def columns_of(tile, ROWS: gl.constexpr, FROM: gl.constexpr, COUNT: gl.constexpr):
    """Some columns of a tile as a matrix: a power of two, from a multiple of it on."""
    panels, first = tile
    if COUNT < PANEL:
        return as_matrix(panels.index(first + FROM // PANEL), ROWS, PANEL).slice(FROM % PANEL, COUNT, dim=1)
    else:
        return as_matrix(panels.index(first + FROM // PANEL), ROWS, COUNT)


@gluon.jit
def send(tensor, tile, where, row, FROM: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Copy a tile out to columns FROM and on; those past the tensor's last are cut off."""
    panels, first = tile
    for p in gl.static_range(COLUMNS // PANEL):
        store_tile(tensor, box(where, row, FROM + p * PANEL, T), panels.index(first + p))
