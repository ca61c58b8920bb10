"""Gluon names that moved between triton 3.6 and 3.9, under one name each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

RENAMED = hasattr(tma, "async_load")

tma_load = tma.async_load if RENAMED else tma.async_copy_global_to_shared
tma_store = tma.async_store if RENAMED else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A box of a rank-4 tensor map as the matrix that it holds."""
        return tile.reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )
else:

    @gluon.jit
    def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A box of a rank-4 tensor map as the matrix that it holds."""
        return tile._reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )
