"""Finished accumulators to C, 4 bytes a thread.

As few instructions as can be: code that runs once a tile is fetched once a tile, and its length is what it costs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.finish import finished
from registry.toolbox.wgmma import lanes, store_asm


@gluon.jit
def store(acc, G: gl.constexpr, tile, rows, columns, held, c_ptr, pitch, cfg: gl.constexpr):
    """One consumer's; `rows` are those of this CTA, from `c_ptr` on."""
    DTYPE: gl.constexpr = c_ptr.dtype.element_ty
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    thread = lanes()
    across, pair = thread % 32 // 4, thread % 4 * 2
    down = G * 64 + thread // 32 * 16
    if cfg.SWAP:
        row, column = across, tile * cfg.HIGH + down + pair
        first = gl.where(column < columns, rows - across, 0)
        second = gl.where(column + 8 < columns, rows - across, 0)
        further = row * 0 + 8
    else:
        row, column = down + across, tile * cfg.WIDTH + pair
        first = gl.where(row < rows, gl.minimum(columns - column, cfg.WIDTH - pair), 0)
        second = gl.where(row + 8 < rows, gl.minimum(columns - column, cfg.WIDTH - pair), 0)
        further = row * 0 + 8 * pitch
    to = (c_ptr + row.to(gl.int64) * pitch + column).to(gl.int64)
    also = to + further.to(gl.int64) * 2
    for j in gl.static_range(EIGHTS):
        gl.inline_asm_elementwise(
            store_asm(DTYPE, cfg.SWAP, j, 8 * j),
            "=r,r,r,l,l,f,f,f,f",
            (first, second, to, also) + finished(acc, 0, j, held, cfg),
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        if cfg.SWAP:
            to += pitch.to(gl.int64) * 16
            also = to + 16
