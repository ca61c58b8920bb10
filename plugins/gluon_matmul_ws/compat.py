"""Gluon names that moved between triton 3.6 and 3.9, under one spelling."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A tile as a swizzled matrix, as wgmma reads it."""
        return tile.reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )

    @gluon.jit
    def block(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The front of a tile as a block of a rank-3 descriptor."""
        return tile.reinterpret(
            tile.dtype, [1, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([1, ROWS, COLUMNS], tile.dtype)
        )

else:

    @gluon.jit
    def matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A tile as a swizzled matrix, as wgmma reads it."""
        return tile._reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )

    @gluon.jit
    def block(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The front of a tile as a block of a rank-3 descriptor."""
        return tile._reinterpret(
            tile.dtype, [1, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([1, ROWS, COLUMNS], tile.dtype)
        )
