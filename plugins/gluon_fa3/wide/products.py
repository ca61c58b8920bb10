"""The two matrix products of a consumer warp group of a wide head, and what becomes of O."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from registry.plugins.gluon_fa3.places import box
from registry.plugins.gluon_fa3.softmax import unpack
from registry.plugins.gluon_fa3.tiles import PANEL
from registry.plugins.gluon_fa3.wide.tiles import in_slot, matrix_of, release_use, wait_use
from registry.toolbox.hopper import store_tile, store_wait


@gluon.constexpr_function
def _products(T):
    return len(T.products)


@gluon.constexpr_function
def _product(T, i, which):
    return T.products[i][which]


@gluon.constexpr_function
def _products_after(T, part):
    return T.products_after(part)


@gluon.constexpr_function
def _begins_part(T, i):
    return i == 0 or T.products[i][0] != T.products[i - 1][0]


@gluon.constexpr_function
def _value_part(T, part, which):
    return T.value_parts[part][which]


# Never sleeps: a grid has at least one block in each direction. Asks for 32 values of 16 bits, in $8 to $23.
_ASK = gl.constexpr(
    "{ .reg .b32 all, z; .reg .pred p; mov.u32 z, %nctaid.z; mov.b32 all, z; "
    + " ".join(f"xor.b32 all, all, ${i};" for i in range(8, 24))
    + " setp.eq.u32 p, z, 0; setp.eq.and.u32 p, all, 0, p; @p nanosleep.u32 20; "
    + " ".join(f"mov.b32 ${i}, 0;" for i in range(8))
    + " }"
)
_ASK_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 16))


@gluon.jit
def await_panel(panel):
    """Until a panel of Q is in its registers: a load that is under way does not hold back the barrier that lets go of
    what it reads (../consumer.py), and an instruction that asks for all of it does."""
    gl.inline_asm_elementwise(_ASK, _ASK_OPERANDS, [panel], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def _qk(q_registers, q, k_ring, first, s, N: gl.constexpr, T: gl.constexpr):
    WIDE: gl.constexpr = _product(T, N, 2)
    Q: gl.constexpr = _product(T, N, 3)
    FROM: gl.constexpr = _product(T, N, 4)
    use = first + _product(T, N, 0)
    if _begins_part(T, N) and N > 0:  # the first has been waited for
        wait_use(k_ring, use)
    k = in_slot(k_ring, use, _product(T, N, 1), WIDE, T.k_slot).permute((1, 0))
    if Q < 0:
        return warpgroup_mma(q_registers[-1 - Q], k, s, use_acc=N > 0, is_async=True)
    else:
        part = matrix_of(q[0][Q], q[0][Q].shape[0] * PANEL)
        if part.shape[1] > WIDE:
            part = part.slice(FROM, WIDE, dim=1)
        return warpgroup_mma(part, k, s, use_acc=N > 0, is_async=True)


@gluon.jit
def issue_qk(q_registers, q, k_ring, use, zero, T: gl.constexpr):
    """S = Q K^T of the block whose first part is this use, its parts as they come."""
    COUNT: gl.constexpr = _products(T)
    s = zero
    for n in gl.static_range(COUNT):
        s = _qk(q_registers, q, k_ring, use, s, n, T)
    return s


@gluon.jit
def wait_qk(k_ring, use, s, MORE: gl.constexpr, T: gl.constexpr):
    """S, once its products are done, and MORE are on their way. Each part of K is let go of as soon as its own are."""
    PARTS: gl.constexpr = T.k_parts
    for p in gl.static_range(PARTS):
        s = warpgroup_mma_wait(MORE + _products_after(T, p), [s])
        release_use(k_ring, use + p)
    return s


@gluon.jit
def _pv(pairs, v, acc, T: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return warpgroup_mma(unpack(pairs, v.dtype, LAYOUT), v, acc, is_async=True)


@gluon.jit
def issue_pv(pairs, v_ring, use, acc, T: gl.constexpr):
    """O += P V, with P from registers."""
    COUNT: gl.constexpr = len(acc)
    out = ()
    for n in gl.static_range(COUNT):
        v = in_slot(v_ring, use, _value_part(T, n, 0), _value_part(T, n, 1), T.head_v)
        out = out + (_pv(pairs, v, acc[n], T),)
    return out


@gluon.jit
def _store_part(o_map, o_panels, part, where, row, column, DTYPE: gl.constexpr, T: gl.constexpr):
    COLUMNS: gl.constexpr = part.shape[1]
    WIDE: gl.constexpr = o_panels.shape[0] * PANEL
    o = matrix_of(o_panels, WIDE)
    if COLUMNS < WIDE:
        o = o.slice(0, COLUMNS, dim=1)
    store_wait(0)
    o.store(part.to(DTYPE))
    fence_async_shared()
    for p in gl.static_range(COLUMNS // PANEL):
        store_tile(o_map, box(where, row, column + p * PANEL, T), o_panels.index(p))


@gluon.jit
def store_output(o_map, o_panels, acc, where, row, column, DTYPE: gl.constexpr, T: gl.constexpr):
    """Through a place of Q's, one part after the other. What is stored past the head dim is cut off."""
    COUNT: gl.constexpr = len(acc)
    for n in gl.static_range(COUNT):
        _store_part(o_map, o_panels, acc[n], where, row, column + _value_part(T, n, 0), DTYPE, T)
    store_wait(0)
