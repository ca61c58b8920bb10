"""Finished accumulators to C, 4 bytes a thread.

As few instructions as can be: code that runs once a tile is fetched once a tile, and its length is what it costs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.wgmma import four_of, lanes


@gluon.constexpr_function
def _store_asm(dtype, swap, eight, last):
    """Columns 8 * eight and on of two rows of an accumulator, 8 apart, or where `swap` of two columns of C.

    $1, $2: the first column that is not there, counted from the thread's own; $3, $4: where to; $5..$8: the values.
    """
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[str(dtype)]
    there = 8 * eight if eight == last or not swap else 0
    offset = 0 if swap else 16 * eight
    turn = "movmatrix.sync.aligned.m8n8.trans.b16" if swap else "mov.b32"
    return f"""{{
        .reg .pred p, q; .reg .b32 a, b;
        setp.gt.s32 p, $1, {there};
        setp.gt.s32 q, $2, {there};
        cvt.rn.{kind}.f32 a, $6, $5;
        cvt.rn.{kind}.f32 b, $8, $7;
        {turn} a, a;
        {turn} b, b;
        @p st.global.b32 [$3 + {offset}], a;
        @q st.global.b32 [$4 + {offset}], b;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def store(acc, G: gl.constexpr, tile, rows, columns, c, cfg: gl.constexpr):
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
                _store_asm(DTYPE, cfg.SWAP, j, EIGHTS - 1),
                "=r,r,r,l,l,f,f,f,f",
                (first, second, to, also) + four_of(acc, unit * EIGHTS + j),
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            if cfg.SWAP:
                to += pitch.to(gl.int64) * 16
                also = to + 16
