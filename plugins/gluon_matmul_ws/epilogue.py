"""What happens to a finished tile: scales, bias and activation in registers, then 64 columns at a time to memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from registry.toolbox.activations import activate_as
from registry.toolbox.hopper import as_matrix, chunks, store_tile, store_wait


@gluon.jit
def _finish(x, z, row, col, M, N, epi, dtype: gl.constexpr, cfg: gl.constexpr):
    """Scales, bias and activation of one chunk whose corner is (row, col): in fp32, rounded once, or all in int32."""
    bias_ptr, sa_ptr, sb_ptr, s_az, s_am, s_bn = epi
    down = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))[:, None]
    across = col + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    if cfg.SWAP:
        rm, rn, rows, columns = across, down, N, M
    else:
        rm, rn, rows, columns = down, across, M, N
    if dtype != gl.int32:
        x = x.to(gl.float32)
    if cfg.SCALED:
        sa = gl.load(sa_ptr + z * s_az + rm * s_am, mask=rm < rows, other=0.0)
        sb = gl.load(sb_ptr + rn * s_bn, mask=rn < columns, other=0.0)
        x = x * sa * sb
    if cfg.BIAS:
        x += gl.load(bias_ptr + rn, mask=rn < columns, other=0.0).to(x.dtype)
    name: gl.constexpr = cfg.ACT
    return activate_as(x, name, dtype).to(dtype)


@gluon.jit
def store(acc, width: gl.constexpr, z, row, col, buffer, M, N, c, c_s, G: gl.constexpr, epi, cfg: gl.constexpr):
    """One accumulator, 64 columns at a time; returns the number of buffers used so far."""
    c_desc, c_ptr, scz, scm, scn = c
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    parts: gl.constexpr = width // cfg.EN
    pieces = chunks(acc, parts)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    HEIGHT: gl.constexpr = cfg.EN if cfg.SWAP else cfg.GM
    WIDTH: gl.constexpr = cfg.GM if cfg.SWAP else cfg.EN
    for i in gl.static_range(parts):
        x = _finish(pieces[i], z, row, col + i * cfg.EN, M, N, epi, dtype, cfg)
        box = c_s.index(G * cfg.STORES + buffer % cfg.STORES)
        slot = as_matrix(box, HEIGHT, WIDTH)
        if cfg.SWAP:  # the product is the transpose of C
            top, left, rows, columns = col + i * cfg.EN, row, N, M
        else:
            top, left, rows, columns = row, col + i * cfg.EN, M, N
            if cfg.FEW:
                rows = gl.minimum(M, row + cfg.FEW)
        if cfg.TMA_STORE:
            store_wait(cfg.STORES - 1)
        if cfg.SWAP:
            slot.permute((1, 0)).store(x)
        else:
            slot.store(x)
        if cfg.TMA_STORE:
            fence_async_shared()
            store_tile(c_desc, [z, top, left], box)
        else:  # through shared memory all the same, for rows of consecutive columns
            y = slot.load(lanes)
            rm = top + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, lanes))
            rn = left + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, lanes))
            at = c_ptr + z.to(gl.int64) * scz + rm.to(gl.int64)[:, None] * scm + rn.to(gl.int64)[None, :] * scn
            gl.store(at, y, mask=(rm < rows)[:, None] & (rn < columns)[None, :])
        buffer += 1
    return buffer


@gluon.jit
def store_both(acc0, acc1, z, row, col, buffer, M, N, c, c_s, G: gl.constexpr, epi, cfg: gl.constexpr):
    buffer = store(acc0, cfg.N0, z, row, col, buffer, M, N, c, c_s, G, epi, cfg)
    if cfg.N1:
        buffer = store(acc1, cfg.N1, z, row, col + cfg.N0, buffer, M, N, c, c_s, G, epi, cfg)
    return buffer
