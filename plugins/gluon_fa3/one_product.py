"""O += P V as one product for each 16 keys where O has no power of two of columns, by wgmma's own instruction.

Gluon's products have powers of two of columns, so that those of 96 are done as 64 and 32, and 16 or 32 columns of 64
rows are probably slow. The instruction takes every multiple of 8. What it needs to know is where V lies (tiles.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.tiles import slot_bytes
from registry.toolbox.wgmma import floats, shared_memory

ROWS = gl.constexpr(64)
SINGLE = gl.constexpr(  # a thread's one value: warp, row of eight, lane of four
    gl.DistributedLinearLayout(
        [], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 4]
    )
)


@gluon.constexpr_function
def _bits(columns, each):
    """How often a matrix is halved until each thread has one value: by columns, halves of rows, and pairs."""
    return (columns // (8 if each == 2 else 4)).bit_length() - 1


@gluon.constexpr_function
def _shape(columns, each):
    tail = (4, 2) if each == 2 else (4,)
    return (4, 2, 8) + (2,) * _bits(columns, each) + tail


@gluon.constexpr_function
def _order(columns, each):
    """Warp, row, lane; then what numbers a thread's values, the lowest bit first: [column of a pair,] half, columns."""
    bits = _bits(columns, each)
    own = [4 + bits] if each == 2 else []
    return (0, 2, 3 + bits, *own, 1, *range(2 + bits, 2, -1))


@gluon.constexpr_function
def _inverse(order):
    return tuple(order.index(i) for i in range(len(order)))


@gl._core.builtin
def _permuted(tensor, order, _semantic=None):
    """A method of tensors that takes no computed order inside a kernel."""
    return tensor.permute(order.value, _semantic=_semantic)


@gluon.jit
def _halved(parts):
    COUNT: gl.constexpr = len(parts)
    out = ()
    for i in gl.static_range(COUNT):
        low, high = parts[i].split()
        out = out + (low, high)
    return out


@gluon.jit
def _joined(parts):
    COUNT: gl.constexpr = len(parts) // 2
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.join(parts[2 * i], parts[2 * i + 1]),)
    return out


@gluon.jit
def _singles(matrix, EACH: gl.constexpr):
    """A thread's values of a matrix, each a tensor of its own, in the order in which wgmma names its registers. EACH: 2
    neighbours of a row, as accumulators have them, or 1 as pairs."""
    COLUMNS: gl.constexpr = matrix.shape[1]
    SHAPE: gl.constexpr = _shape(COLUMNS, EACH)
    ORDER: gl.constexpr = _order(COLUMNS, EACH)
    LEVELS: gl.constexpr = len(SHAPE) - 3
    parts = (_permuted(matrix.reshape(SHAPE), ORDER),)
    for _ in gl.static_range(LEVELS):
        parts = _halved(parts)
    COUNT: gl.constexpr = 2**LEVELS
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], SINGLE, assert_trivial=True),)
    return out


@gluon.jit
def _matrix(values, FROM: gl.constexpr, COLUMNS: gl.constexpr):
    """The accumulator that such values are."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    ORDER: gl.constexpr = _inverse(_order(COLUMNS, 2))
    COUNT: gl.constexpr = COLUMNS // 2
    LEVELS: gl.constexpr = COUNT.bit_length() - 1
    parts = ()
    for i in gl.static_range(COUNT):
        parts = parts + (values[FROM // 2 + i],)
    for _ in gl.static_range(LEVELS):
        parts = _joined(parts)
    return gl.convert_layout(_permuted(parts[0], ORDER).reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _product_asm(columns, keys, dtype):
    """64 rows of P, in registers, by `keys` rows of V at $n, a matrix descriptor's low word."""
    count = columns // 2
    kind = {"fp16": "f16", "bf16": "bf16"}[dtype]
    registers = ", ".join(f"${i}" for i in range(count))
    lines = ["{", ".reg .pred p; .reg .b32 low; .reg .b64 v;", "setp.eq.u32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
    for step in range(keys // 16):
        pairs = ", ".join(f"${2 * count + 4 * step + i}" for i in range(4))
        lines += [
            f"add.u32 low, ${2 * count + keys // 4}, {128 * step};",  # 16 rows of 128 bytes
            f"mov.b64 v, {{low, {64 | 1 << 30}}};",  # 1024 bytes from one group of 8 rows to the next, 128-byte swizzle
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
            f"{{{registers}}}, {{{pairs}}}, v, p, 1, 1, 1;",
        ]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _constraints(columns, keys):
    count = columns // 2
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * (keys // 4 + 1))


@gluon.jit
def issue_one_product(pairs, v, acc, T: gl.constexpr):
    """The product on its way; `acc` of two groups of columns, as Gluon has them."""
    LEFT: gl.constexpr = acc[0].shape[1]
    COLUMNS: gl.constexpr = LEFT + acc[1].shape[1]
    PANEL_BYTES: gl.constexpr = T.block_n * 128
    SLOT: gl.constexpr = slot_bytes("V", T)
    ASM: gl.constexpr = _product_asm(COLUMNS, T.block_n, T.dtype)
    CONSTRAINTS: gl.constexpr = _constraints(COLUMNS, T.block_n)
    FLOATS: gl.constexpr = floats(COLUMNS // 2)
    _, slot, _ = v
    at = shared_memory() + slot * SLOT
    low = (at >> 4) | ((PANEL_BYTES // 16) << 16)
    values = _singles(acc[0], 2) + _singles(acc[1], 2) + _singles(pairs, 1) + (low,)
    out = gl.inline_asm_elementwise(ASM, CONSTRAINTS, values, dtype=FLOATS, is_pure=False, pack=1)
    return _matrix(out, 0, LEFT), _matrix(out, LEFT, COLUMNS - LEFT)
