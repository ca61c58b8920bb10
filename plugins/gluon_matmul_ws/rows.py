"""What happens to a finished tile: what `gluon_matmul_ws` does to it, and then through shared memory to memory, in
units as wide as C's rows allow."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from registry.plugins.gluon_matmul_ws.epilogue import _finish
from registry.toolbox.hopper import as_matrix, chunks, store_tile, store_wait


@gluon.constexpr_function
def _lanes(width, run):
    """Blocks in whose rows a lane has `run` elements side by side, and as many lanes as there is room for."""
    across = min(32, width // run)
    return gl.BlockedLayout([1, run], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _whole(number, UNIT: gl.constexpr):
    """The same number, of which the compiler knows that the unit divides it."""
    return number // UNIT * UNIT


@gluon.jit
def store(acc, z, row, col, buffer, M, N, c, c_s, G: gl.constexpr, epi, cfg: gl.constexpr):
    """One accumulator, EN columns at a time; returns the number of buffers used so far."""
    c_desc, c_ptr, scz, scm, scn = c
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    PARTS: gl.constexpr = cfg.N0 // cfg.EN
    HIGH: gl.constexpr = cfg.EN if cfg.SWAP else cfg.GM
    WIDE: gl.constexpr = cfg.GM if cfg.SWAP else cfg.EN
    lanes: gl.constexpr = _lanes(WIDE, cfg.C_RUN)
    pieces = chunks(acc, PARTS)
    for i in gl.static_range(PARTS):
        x = _finish(pieces[i], z, row, col + i * cfg.EN, M, N, epi, dtype, cfg)
        box = c_s.index(G * cfg.STORES + buffer % cfg.STORES)
        slot = as_matrix(box, HIGH, WIDE)
        if cfg.SWAP:  # the product is the transpose of C
            top, left, rows, columns = col + i * cfg.EN, row, N, M
        else:
            top, left, rows, columns = row, col + i * cfg.EN, M, N
        if cfg.TMA_STORE:
            store_wait(cfg.STORES - 1)
        if cfg.SWAP:
            slot.permute((1, 0)).store(x)
        else:
            slot.store(x)
        if cfg.TMA_STORE:
            fence_async_shared()
            store_tile(c_desc, [z, top, left], box)
        else:
            y = slot.load(lanes)
            down = top + gl.arange(0, HIGH, layout=gl.SliceLayout(1, lanes))
            across = _whole(left, cfg.C_RUN) + gl.arange(0, WIDE, layout=gl.SliceLayout(0, lanes))
            at = c_ptr + z.to(gl.int64) * _whole(scz, cfg.C_RUN) + down.to(gl.int64)[:, None] * _whole(scm, cfg.C_RUN)
            if cfg.C_RUN > 1:  # (columns of C are side by side then, as the compiler is to know)
                at += across[None, :]
            else:
                at += across.to(gl.int64)[None, :] * scn
            gl.store(at, y, mask=(down < rows)[:, None] & (across < _whole(columns, cfg.C_RUN))[None, :])
        buffer += 1
    return buffer
