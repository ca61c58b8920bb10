"""Accumulators, with bias and activation, through buffers in shared memory (stmatrix) and by TMA to C."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.finish import finished
from registry.toolbox.hopper import group_barrier
from registry.toolbox.wgmma import lanes


@gluon.constexpr_function
def parameter(place, cfg):
    """Where a tensor map is among the parameters of the compiled kernel: sizes and strides of each follow it."""
    return f"{'matmul_exact_pairs' if cfg.EXACT else 'matmul_pairs_of_tiles'}_param_{place}"


@gluon.constexpr_function
def _keep_asm(dtype, swap, eight):
    """16 columns of 16 rows of each warp, from column 8 * eight on, to shared memory at $1, whose chunks of 16 bytes
    are swizzled by $2; where `swap`, columns become rows."""
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[dtype]
    turn, place = (".trans", 1024 * eight) if swap else ("", 0)
    return f"""{{
        .reg .b32 a, b, c, d, t;
        xor.b32 t, $2, {0 if swap else 16 * eight};
        add.u32 t, t, $1;
        cvt.rn.{kind}.f32 a, $4, $3;
        cvt.rn.{kind}.f32 b, $6, $5;
        cvt.rn.{kind}.f32 c, $8, $7;
        cvt.rn.{kind}.f32 d, $10, $9;
        stmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 [t + {place}], {{a, b, c, d}};
        mov.b32 $0, 0;
    }}"""


@gluon.constexpr_function
def _columns(piece, cfg):
    """How many there are of a piece, the last of which may be smaller, or is not there."""
    return min(cfg.PIECE, cfg.WIDTH - piece * cfg.PIECE)


@gluon.constexpr_function
def _keep_last_asm(dtype, eight):
    """The same of 8 columns, which become rows."""
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[dtype]
    return f"""{{
        .reg .b32 a, b, t;
        add.u32 t, $1, $2;
        cvt.rn.{kind}.f32 a, $4, $3;
        cvt.rn.{kind}.f32 b, $6, $5;
        stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [t + {1024 * eight}], {{a, b}};
        mov.b32 $0, 0;
    }}"""


@gluon.constexpr_function
def _store_asm(parameter):
    """By thread 0 of a consumer ($4), from shared memory at $1 to column $2 and row $3 of C."""
    return f"""{{
        .reg .pred p; .reg .b64 d;
        setp.eq.u32 p, $4, 0;
        mov.b64 d, {parameter};
        cvta.param.u64 d, d;
        @p cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [d, {{$2, $3}}], [$1];
        @p cp.async.bulk.commit_group;
        mov.b32 $0, 0;
    }}"""


@gluon.constexpr_function
def _stored_asm(pending, kind):
    return f"""{{
        .reg .pred p;
        setp.eq.u32 p, $1, 0;
        @p cp.async.bulk.wait_group{kind} {pending};
        mov.b32 $0, 0;
    }}"""


_VISIBLE: gl.constexpr = gl.constexpr("fence.proxy.async.shared::cta; mov.b32 $0, 0;")


@gluon.jit
def stored(thread, PENDING: gl.constexpr, KIND: gl.constexpr):
    """Until no more than so many stores of this thread are on their way, or (".read") still read their buffers."""
    ASM: gl.constexpr = _stored_asm(PENDING, KIND)
    gl.inline_asm_elementwise(ASM, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def places_of(cfg: gl.constexpr):
    """(number of the thread, the row of a buffer whose address it gives stmatrix, its swizzled chunk)."""
    thread = lanes()
    lane = thread % 32
    if cfg.SWAP:  # transposed: a warp's 16 rows of an accumulator are two chunks of 16 of a buffer's rows
        row = lane // 16 * 8 + lane % 8
        chunk = thread // 32 * 2 + lane // 8 % 2 ^ lane % 8
    elif cfg.PIECE == 64:
        row = thread // 32 * 16 + lane % 16
        chunk = lane // 16 ^ lane % 8
    elif cfg.PIECE == 32:
        row = thread // 32 * 16 + lane % 16
        chunk = lane // 16 ^ lane // 2 % 4
    else:
        row = thread // 32 * 16 + lane % 16
        chunk = lane // 16 ^ lane // 4 % 2
    return thread, row * (128 if cfg.SWAP else 2 * cfg.PIECE), chunk * 16


@gluon.jit
def _keep(acc, PIECE: gl.constexpr, held, at, places, cfg: gl.constexpr):
    """A piece of the accumulators, by its number, to the buffer at `at`."""
    thread, mine, swizzled = places
    UNITS: gl.constexpr = cfg.UNITS
    COLUMNS: gl.constexpr = _columns(PIECE, cfg)
    SIXTEENS: gl.constexpr = COLUMNS // 16
    FIRST: gl.constexpr = PIECE * (cfg.PIECE // 8)
    for unit in gl.static_range(UNITS):
        for j in gl.static_range(SIXTEENS):
            first = finished(acc, unit, FIRST + 2 * j, held, cfg)
            second = finished(acc, unit, FIRST + 2 * j + 1, held, cfg)
            gl.inline_asm_elementwise(
                _keep_asm(cfg.OUT, cfg.SWAP, 2 * j),
                "=r,r,r,f,f,f,f,f,f,f,f",
                (at + unit * (128 * cfg.PIECE) + mine, swizzled) + first + second,
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        if COLUMNS % 16:
            gl.inline_asm_elementwise(
                _keep_last_asm(cfg.OUT, 2 * SIXTEENS),
                "=r,r,r,f,f,f,f",
                (at + unit * (128 * cfg.PIECE) + mine, swizzled) + finished(acc, unit, FIRST + 2 * SIXTEENS, held, cfg),
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


@gluon.jit
def store(acc, high, wide, held, buffers, places, cfg: gl.constexpr):
    """One consumer's accumulators, whose corner is at (high, wide) of the product of the first factor by the second;
    `held`: what it has of the bias."""
    thread, _, _ = places
    UNITS: gl.constexpr = cfg.UNITS
    STORES: gl.constexpr = cfg.STORES
    PIECES: gl.constexpr = (cfg.WIDTH + cfg.PIECE - 1) // cfg.PIECE
    TURNS: gl.constexpr = (PIECES + STORES - 1) // STORES
    UNIT: gl.constexpr = 128 * cfg.PIECE  # bytes
    STORE: gl.constexpr = _store_asm(parameter(10, cfg))
    ROWS: gl.constexpr = cfg.STORED if cfg.WHOLE else 8  # of a box
    BOX: gl.constexpr = ROWS * (128 if cfg.SWAP else 2 * cfg.PIECE)  # bytes
    EACH: gl.constexpr = cfg.PIECE // ROWS if cfg.SWAP else 1
    PARTS: gl.constexpr = UNITS * EACH if cfg.SWAP else 64 * UNITS // ROWS
    for turn in gl.static_range(TURNS):
        stored(thread, 0, ".read")
        group_barrier()
        for number in gl.static_range(STORES):
            if turn * STORES + number < PIECES:
                _keep(acc, turn * STORES + number, held, buffers + number * (UNITS * UNIT), places, cfg)
        gl.inline_asm_elementwise(_VISIBLE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        group_barrier()
        for number in gl.static_range(STORES):
            for part in gl.static_range(PARTS):
                if _columns(turn * STORES + number, cfg) > part % EACH * ROWS:
                    if cfg.SWAP:
                        column = high + part // EACH * 64
                        row = wide + (turn * STORES + number) * cfg.PIECE + part % EACH * ROWS
                    else:
                        column = wide + (turn * STORES + number) * cfg.PIECE
                        row = high + part * ROWS
                    gl.inline_asm_elementwise(
                        STORE,
                        "=r,r,r,r,r",
                        (buffers + number * (UNITS * UNIT) + part * BOX, column, row, thread),
                        dtype=gl.int32,
                        is_pure=False,
                        pack=1,
                    )
