"""The two products, with swapped operands: S^T = K Q^T, [keys, rows], and O^T = V^T P^T, [columns, rows].

Keys and values of 16 bits are read by wgmma where they lie, values along their other dimension. Those of 8 bits become
float16 in registers, in which all of them are exact, and are the left factor from there. A thread reads them as they
lie side by side, 32 columns of a key, and 4 columns of 16 keys. So columns are permuted, those of queries along with
the keys', and `column_of` (parts.py) says which column a row of O^T is. With few rows both factors lie in registers,
for products of single warps (kernel.py says what that brings).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from registry.plugins.gluon_decode.parts import rows_at
from registry.toolbox.hopper import group_barrier, viewed

PANEL = gl.constexpr(64)


@gluon.jit
def matrices(tiles, T: gl.constexpr):
    """The stages of a ring as matrices, [keys, columns]."""
    STAGES: gl.constexpr = T.stages
    KEYS: gl.constexpr = T.block_n
    COLUMNS: gl.constexpr = T.head
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLUMNS], tiles.dtype)
    return viewed(tiles, [STAGES, KEYS, COLUMNS], LAYOUT)


@gluon.jit
def load_queries(queries_of, place, head, T: gl.constexpr):
    """The queries of a tile, under way."""
    q, q_row, q_head = queries_of
    LANES: gl.constexpr = min(T.head // 8, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.arange(0, T.rows, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, T.head, layout=gl.SliceLayout(0, LAYOUT))
    token, head_q, there = rows_at(row, head, place, T)
    at = q + (token.to(gl.int64) * (q_row * 8) + head_q * (q_head * 8))
    inside = there[:, None] & (column < T.columns)[None, :]
    return gl.load(at[:, None] + column[None, :], mask=inside, other=0.0)


@gluon.jit
def hand_over(x, q_tile, LAYOUT: gl.constexpr, T: gl.constexpr):
    """Queries into shared memory; gives what scores of each row are to be multiplied by."""
    unit = gl.full([T.rows], 1.0, gl.float32, layout=gl.SliceLayout(1, x.type.layout))
    if T.eight:
        if x.dtype == gl.bfloat16:
            # float16 has not their range: over the power of two below the largest of a row, by their exponents.
            wide = x.to(gl.float32)
            largest = gl.minimum(gl.maximum(gl.max(gl.abs(wide), 1), 1e-30), 1e38)
            exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
            unit = exponent.to(gl.float32, bitcast=True)
            x = (wide * (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        ROWS: gl.constexpr = T.rows
        HEAD: gl.constexpr = T.head
        x = x.reshape([ROWS, 4, HEAD // 8, 2]).permute((0, 2, 1, 3)).reshape([ROWS, HEAD])
    q_tile.store(x)
    fence_async_shared()
    group_barrier()
    return gl.convert_layout(unit, LAYOUT)


@gluon.constexpr_function
def _keys_layout(block_n):
    """32 columns of a key side by side."""
    more = [[64, 0]] if block_n == 128 else []
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], *more]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [block_n, 128])


@gluon.constexpr_function
def _values_layout(block_n):
    """4 columns side by side, of two keys in turn."""
    more = [[64, 0]] if block_n == 128 else []
    registers = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0], *more]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]], [], [block_n, 128])


_FP8 = """
    mov.b32 {{low, high}}, {bytes};
    cvt.rn.f16x2.e4m3x2 {first}, low;
    cvt.rn.f16x2.e4m3x2 {second}, high;
"""
# As the low bits of 1024 to 1279: the slow conversion of integers is spared.
_INT8 = """
    prmt.b32 {first}, {bytes}, 0x64646464, 0x4140;
    prmt.b32 {second}, {bytes}, 0x64646464, 0x4342;
    xor.b32 {first}, {first}, 0x00800080;
    xor.b32 {second}, {second}, 0x00800080;
    add.rn.f16x2 {first}, {first}, less;
    add.rn.f16x2 {second}, {second}, less;
"""
_NAMES = "{ .reg .b32 bytes, less; .reg .b16 low, high; mov.b32 less, 0xE480E480;"


@gluon.constexpr_function
def _keys_asm(int8):
    return _NAMES + (_INT8 if int8 else _FP8).format(bytes="$2", first="$0", second="$1") + "}"


@gluon.constexpr_function
def _values_asm(int8):
    """Of two keys' 4 columns: each column's two keys."""
    how, made = _INT8 if int8 else _FP8, _NAMES
    for i, order in enumerate(("0x5140", "0x7362")):
        made += f"prmt.b32 bytes, $4, $5, {order};"
        made += how.format(bytes="bytes", first=f"${2 * i}", second=f"${2 * i + 1}")
    return made + "}"


@gluon.jit
def widened_keys(k, like, T: gl.constexpr):
    """Keys of 8 bits as the left factor of S^T."""
    KEYS: gl.constexpr = T.block_n
    LAYOUT: gl.constexpr = _keys_layout(T.block_n)
    ASM: gl.constexpr = _keys_asm(T.int8)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=like.type.layout, k_width=2)
    x = gl.inline_asm_elementwise(ASM, "=r,=r,r", [k.load(LAYOUT)], dtype=gl.float16, is_pure=True, pack=4)
    x = x.reshape([KEYS, 4, 16, 2]).permute((0, 2, 1, 3)).reshape([KEYS, 128])
    return gl.convert_layout(x, LEFT)


@gluon.jit
def right_factor(tile, like):
    """Rows in shared memory as the right factor of a product of few rows."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=like.type.layout, k_width=2)
    return tile.permute((1, 0)).load(RIGHT)


@gluon.jit
def keys_by_queries(k, q_tile, zero, T: gl.constexpr):
    """S^T, on its way."""
    if T.eight:
        x = widened_keys(k, zero, T)
        return warpgroup_mma(x, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(k, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def values_by_weights(v, p_tile, acc, n, end, T: gl.constexpr):
    """O^T, on its way."""
    if T.eight:
        return warpgroup_mma(widened_values(v, acc, n, end, T), p_tile.permute((1, 0)), acc, is_async=True)
    else:
        if n + T.tokens > end:
            _without_strangers(v, n, end, T)
        return warpgroup_mma(v.permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True)


@gluon.jit
def widened_values(v, like, n, end, T: gl.constexpr):
    """Values of 8 bits as the left factor of O^T."""
    KEYS: gl.constexpr = T.block_n
    LAYOUT: gl.constexpr = _values_layout(T.block_n)
    ASM: gl.constexpr = _values_asm(T.int8)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=like.type.layout, k_width=2)
    x = v.load(LAYOUT).to(gl.int8, bitcast=True)
    if n + T.tokens > end:
        key = gl.arange(0, T.block_n, layout=gl.SliceLayout(1, LAYOUT)) // T.heads
        x = gl.where((n + key < end)[:, None], x, 0)
    x = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8)
    # Bit 0 of the key stands where bit 0 of the column did, that where bit 1 did, and this where the key's did.
    x = x.reshape([KEYS // 2, 2, 4, 8, 2, 2]).permute((1, 2, 4, 3, 0, 5)).reshape([128, KEYS])
    return gl.convert_layout(x, LEFT)


@gluon.jit
def _without_strangers(v, n, end, T: gl.constexpr):
    """Zero values beyond the last key, for they may be anything, and 0 times infinity is none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PANELS: gl.constexpr = T.head // PANEL
    key = gl.arange(0, T.block_n, layout=gl.SliceLayout(1, LAYOUT)) // T.heads
    for i in gl.static_range(PANELS):
        columns = v.slice(i * PANEL, PANEL, dim=1)
        x = columns.load(LAYOUT)
        columns.store(gl.where((n + key < end)[:, None], x, 0.0).to(v.dtype))
    fence_async_shared()
    group_barrier()
