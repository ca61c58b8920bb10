"""Finished accumulators to C, 4 bytes a thread.

As few instructions as can be: code that runs once a tile is fetched once a tile, and its length is what it costs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.wgmma import four_of, lanes


@gluon.constexpr_function
def _store_asm(dtype, swap, eight):
    """Columns 8 * eight and on of two rows of an accumulator, 8 apart, or where `swap` of two columns of C.

    $1, $2: the first column that is not there, counted from the thread's own; $3, $4: where to; $5..$8: the values.
    """
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[str(dtype)]
    offset = 0 if swap else 16 * eight
    turn = "movmatrix.sync.aligned.m8n8.trans.b16" if swap else "mov.b32"
    return f"""{{
        .reg .pred p, q; .reg .b32 a, b;
        setp.gt.s32 p, $1, {8 * eight};
        setp.gt.s32 q, $2, {8 * eight};
        cvt.rn.{kind}.f32 a, $6, $5;
        cvt.rn.{kind}.f32 b, $8, $7;
        {turn} a, a;
        {turn} b, b;
        @p st.global.b32 [$3 + {offset}], a;
        @q st.global.b32 [$4 + {offset}], b;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def store(acc, G: gl.constexpr, tile, rows, columns, c_ptr, pitch, cfg: gl.constexpr):
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
            _store_asm(DTYPE, cfg.SWAP, j),
            "=r,r,r,l,l,f,f,f,f",
            (first, second, to, also) + four_of(acc, j),
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        if cfg.SWAP:
            to += pitch.to(gl.int64) * 16
            also = to + 16
