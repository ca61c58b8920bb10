"""Finished accumulators to C, 4 bytes a thread."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def _pack_asm(dtype, transposed):
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[str(dtype)]
    turn = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $0;" if transposed else ""
    return f"cvt.rn.{kind}.f32 $0, $2, $1; {turn}"  # (the first one named goes to the upper half)


@gluon.jit
def _lane(cfg: gl.constexpr):
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.arange(0, 128, layout=lanes)


@gluon.jit
def store(acc, G: gl.constexpr, tile, rows, columns, c, cfg: gl.constexpr):
    c_ptr, pitch = c
    dtype: gl.constexpr = c_ptr.dtype.element_ty
    ASM: gl.constexpr = _pack_asm(dtype, cfg.SWAP)
    thread = _lane(cfg)
    warp, across, pair = thread // 32, thread % 32 // 4, thread % 4 * 2
    words = c_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    UNITS: gl.constexpr = cfg.UNITS
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    for unit in gl.static_range(UNITS):
        down = (G * UNITS + unit) * 64 + warp * 16
        for j in gl.static_range(EIGHTS):
            for h in gl.static_range(2):
                low, high = acc[4 * (unit * EIGHTS + j) + 2 * h], acc[4 * (unit * EIGHTS + j) + 2 * h + 1]
                word = gl.inline_asm_elementwise(ASM, "=&r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
                if cfg.SWAP:
                    row = 8 * j + across
                    column = tile * cfg.TILE + down + 8 * h + pair
                else:
                    row = down + 8 * h + across
                    column = tile * cfg.TILE + 8 * j + pair
                at = row.to(gl.int64) * pitch + column
                gl.store(words + (at >> 1), word, mask=(row < rows) & (column < columns))
