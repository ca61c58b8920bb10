"""Finished accumulators to C, 4 bytes a thread.

As few instructions as can be: code that runs once a tile is fetched once a tile, and its length is what it costs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.finish import finished
from registry.toolbox.wgmma import lanes, store_asm


@gluon.constexpr_function  # what store_asm compares with; if `swap`, these are 8 rows of C, all there before the last
def _needed(eight, eights, swap):
    """Columns that must be there for these to be stored: rows of C are rounded up to 8, so the last ask for all."""
    return 8 * eight if eight == eights - 1 or not swap else 0


@gluon.jit
def store(acc, G: gl.constexpr, tile, rows, columns, held, c, cfg: gl.constexpr):
    c_ptr, pitch = c
    DTYPE: gl.constexpr = c_ptr.dtype.element_ty
    UNITS: gl.constexpr = cfg.UNITS
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    thread = lanes()
    warp, across, pair = thread // 32, thread % 32 // 4, thread % 4 * 2
    for unit in gl.static_range(UNITS):
        down = (G * UNITS + unit) * 64 + warp * 16
        if cfg.SWAP:
            row, column = across, tile * cfg.TILE + down + pair
            first = gl.where(column < columns, rows - across, 0)
            second = gl.where(column + 8 < columns, rows - across, 0)
            further = row * 0 + 8
        else:
            row, column = down + across, tile * cfg.TILE + pair
            first = gl.where(row < rows, columns - column, 0)
            second = gl.where(row + 8 < rows, columns - column, 0)
            further = row * 0 + 8 * pitch
        to = (c_ptr + row.to(gl.int64) * pitch + column).to(gl.int64)
        also = to + further.to(gl.int64) * 2
        for j in gl.static_range(EIGHTS):
            gl.inline_asm_elementwise(
                store_asm(DTYPE, cfg.SWAP, j, _needed(j, EIGHTS, cfg.SWAP)),
                "=r,r,r,l,l,f,f,f,f",
                (first, second, to, also) + finished(acc, unit, j, held, cfg),
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            if cfg.SWAP:
                to += pitch.to(gl.int64) * 16
                also = to + 16
