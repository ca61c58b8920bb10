"""What happens to a finished tile: bias, activation and gate in registers, then 64 columns at a time to memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from registry.toolbox.activations import activate_as
from registry.toolbox.hopper import as_matrix, chunks, store_tile, store_wait


@gluon.jit
def _biased(x, g, col, inside, epi, cfg: gl.constexpr):
    """One chunk and the bias of its columns of b, of which those within `inside` are there."""
    bias_ptr, s_bias = epi
    if cfg.BIAS:
        rn = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        bias = gl.load(bias_ptr + g.to(gl.int64) * s_bias + col + rn, mask=rn < inside, other=0.0)
        x += bias.to(gl.float32)[None, :]
    return x


@gluon.jit
def _store(x, row, col, end, buffer, N, c, c_s, G: gl.constexpr, cfg: gl.constexpr):
    """One chunk of 64 columns; returns the number of buffers used so far."""
    c_desc, c_ptr, scm, scn = c
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    rows: gl.constexpr = gl.BlockedLayout([1, 16 // (dtype.primitive_bitwidth // 8)], [4, 8], [4, 1], [1, 0])
    index = G * cfg.STORES + buffer % cfg.STORES
    slot = as_matrix(c_s.index(index), cfg.GM, cfg.EN)
    whole = False
    if cfg.TMA_STORE:
        whole = row + cfg.GM <= end
        if whole:
            store_wait(cfg.STORES - 1)
        else:  # what is stored otherwise is not counted among those under way
            store_wait(0)
    slot.store(x.to(dtype))
    if cfg.TMA_STORE:
        fence_async_shared()
        if whole:
            store_tile(c_desc, [0, row, col], c_s.index(index))
    if not whole:
        y = slot.load(rows)
        rm = row + gl.arange(0, cfg.GM, layout=gl.SliceLayout(1, rows))
        rn = col + gl.arange(0, cfg.EN, layout=gl.SliceLayout(0, rows))
        at = c_ptr + rm.to(gl.int64)[:, None] * scm + rn.to(gl.int64)[None, :] * scn
        gl.store(at, y, mask=(rm < end)[:, None] & (rn < N)[None, :])
    return buffer + 1


@gluon.jit
def store_tile_of(acc0, acc1, g, row, col, end, buffer, N, c, c_s, G: gl.constexpr, epi, cfg: gl.constexpr):
    """A consumer's rows of a tile."""
    name: gl.constexpr = cfg.ACT
    dtype: gl.constexpr = c[1].dtype.element_ty
    parts: gl.constexpr = cfg.N0 // cfg.EN
    first = chunks(acc0, parts)
    if cfg.GATED:
        second = chunks(acc1, parts)
        for i in gl.static_range(parts):
            at = col + i * cfg.EN
            x = activate_as(_biased(first[i], g, at, N - at, epi, cfg), name, dtype)
            x *= _biased(second[i], g, N + at, N - at, epi, cfg)
            buffer = _store(x, row, at, end, buffer, N, c, c_s, G, cfg)
    else:
        for i in gl.static_range(parts):
            at = col + i * cfg.EN
            x = activate_as(_biased(first[i], g, at, N - at, epi, cfg), name, dtype)
            buffer = _store(x, row, at, end, buffer, N, c, c_s, G, cfg)
        if cfg.N1:
            more: gl.constexpr = cfg.N1 // cfg.EN
            second = chunks(acc1, more)
            for i in gl.static_range(more):
                at = col + cfg.N0 + i * cfg.EN
                x = activate_as(_biased(second[i], g, at, N - at, epi, cfg), name, dtype)
                buffer = _store(x, row, at, end, buffer, N, c, c_s, G, cfg)
    return buffer


@gluon.jit
def zero_rows(row, col, T, N, c, cfg: gl.constexpr):
    """Rows of no group, from `row` on, of one tile's columns."""
    _, c_ptr, scm, scn = c
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    rm = row + gl.arange(0, cfg.GM, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(cfg.COLUMNS // cfg.EN):
        rn = col + i * cfg.EN + gl.arange(0, cfg.EN, layout=gl.SliceLayout(0, layout))
        at = c_ptr + rm.to(gl.int64)[:, None] * scm + rn.to(gl.int64)[None, :] * scn
        zeros = gl.full([cfg.GM, cfg.EN], 0, dtype, layout=layout)
        gl.store(at, zeros, mask=(rm < T)[:, None] & (rn < N)[None, :])
