"""wgmma by its own instructions, for widths that are no powers of two: accumulators are tuples of registers.

Gluon's tensors, and so its wgmma, have powers of two of columns; the instruction takes every multiple of 8 to 256. Here
an accumulator of [64 x N] is N / 2 tensors of one value a thread, in the order in which the instruction names them:
register 4 j + 2 h + e of a thread holds row 16 warp + 8 h + lane / 4, column 8 j + 2 (lane % 4) + e.

Both factors lie along K in shared memory, in rows of 128 bytes, 128-byte swizzled, 64 elements of K a block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.constexpr_function
def _registers(units, width):
    return units * width // 2


@gluon.constexpr_function
def _tied(count, more):
    """Constraints: so many floats that are read and written, and then `more`."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * more)


@gluon.constexpr_function
def floats(count):
    return (gl.float32,) * count


@gluon.constexpr_function
def _block_asm(units, width, dtype):
    """64 elements of K, four steps of 16, of `units` times 64 rows."""
    each = width // 2
    a, b = f"${2 * units * each}", f"${2 * units * each + 1}"
    kind = {"fp16": "f16", "bf16": "bf16"}[dtype]
    lines = [
        "{",
        ".reg .pred p; .reg .b32 low, high; .reg .b64 a, b;",
        "setp.eq.u32 p, 0, 0;",
        f"mov.b32 high, {64 | 1 << 30};",  # 1024 bytes from one group of 8 rows to the next, 128-byte swizzle
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        lines += [f"add.u32 low, {b}, {2 * step};", "mov.b64 b, {low, high};"]
        for unit in range(units):
            registers = ", ".join(f"${unit * each + i}" for i in range(each))
            lines += [f"add.u32 low, {a}, {512 * unit + 2 * step};", "mov.b64 a, {low, high};"]
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{registers}}}, a, b, p, 1, 1, 0, 0;"
            )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _wait_asm(pending):
    return f"wgmma.wait_group.sync.aligned {pending};"


@gluon.jit
def lanes():
    """The number of each thread of a warp group, as a tensor of one value a thread."""
    return gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def four_of(acc, number: gl.constexpr):
    """Registers 4 * number and on: two columns of two rows."""
    return (acc[4 * number], acc[4 * number + 1], acc[4 * number + 2], acc[4 * number + 3])


@gluon.jit
def zeros(units: gl.constexpr, width: gl.constexpr):
    count: gl.constexpr = _registers(units, width)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    found = ()
    for _ in gl.static_range(count):
        found = found + (gl.full([128], 0, gl.float32, layout=lanes),)
    return found


@gluon.jit
def multiply(acc, a, b, cfg: gl.constexpr):
    """One block of K on its way; `a` and `b` are the low words of matrix descriptors."""
    count: gl.constexpr = _registers(cfg.UNITS, cfg.WIDTH)
    ASM: gl.constexpr = _block_asm(cfg.UNITS, cfg.WIDTH, cfg.DTYPE)
    CONSTRAINTS: gl.constexpr = _tied(count, 2)
    FLOATS: gl.constexpr = floats(count)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, acc + (a, b), dtype=FLOATS, is_pure=False, pack=1)


@gluon.jit
def waited(acc, pending: gl.constexpr, units: gl.constexpr, width: gl.constexpr):
    """Until no more than so many blocks are on their way."""
    count: gl.constexpr = _registers(units, width)
    ASM: gl.constexpr = _wait_asm(pending)
    CONSTRAINTS: gl.constexpr = _tied(count, 0)
    FLOATS: gl.constexpr = floats(count)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, acc, dtype=FLOATS, is_pure=False, pack=1)


@gluon.constexpr_function
def store_asm(dtype, swap, eight, needed):
    """Columns 8 * eight and on of two rows of an accumulator, 8 apart, or where `swap` of two columns of C, to memory
    where more than `needed` are there.

    $1, $2: the first column that is not there, counted from the thread's own; $3, $4: where to; $5..$8: the values.
    """
    kind = {"fp16": "f16x2", "bf16": "bf16x2"}[str(dtype)]
    offset = 0 if swap else 16 * eight
    turn = "movmatrix.sync.aligned.m8n8.trans.b16" if swap else "mov.b32"
    return f"""{{
        .reg .pred p, q; .reg .b32 a, b;
        setp.gt.s32 p, $1, {needed};
        setp.gt.s32 q, $2, {needed};
        cvt.rn.{kind}.f32 a, $6, $5;
        cvt.rn.{kind}.f32 b, $8, $7;
        {turn} a, a;
        {turn} b, b;
        @p st.global.b32 [$3 + {offset}], a;
        @q st.global.b32 [$4 + {offset}], b;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def descriptor_of(address):
    """The low word of a matrix descriptor: the address in units of 16 bytes."""
    return (address >> 4) | (1 << 16)


@gluon.jit
def shared_memory():
    """Where this block's dynamic shared memory begins."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
