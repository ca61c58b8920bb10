"""The two matrix products of a consumer warp group, and what becomes of O.

Only the columns that a head dim has are multiplied. Those of 80 or 192 are no power of two, which a tensor must be: S
sums over the parts of such a row, and O is a tuple of one part or two (traits.value_parts).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from registry.ops.attention.lazy_maxima import rescaled
from registry.plugins.gluon_fa3.one_product import issue_one_product
from registry.plugins.gluon_fa3.softmax import unpack
from registry.plugins.gluon_fa3.tiles import columns_of, send
from registry.toolbox.hopper import store_wait

ROWS = gl.constexpr(64)


@gluon.constexpr_function
def _head_parts(T, start):
    return len(T.head_parts(start))


@gluon.constexpr_function
def _head_part(T, start, part, which):
    return T.head_parts(start)[part][which]


@gluon.constexpr_function
def value_parts(T):
    return len(T.value_parts)


@gluon.constexpr_function
def value_products(T):
    """How many products O's are on their way at once."""
    return 1 if T.one_product else len(T.value_parts)


@gluon.constexpr_function
def value_part(T, part, which):
    return T.value_parts[part][which]


@gluon.jit
def _qk_part(q, k, s, FROM: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr):
    q, k = columns_of(q, FROM, WIDE, T.head), columns_of(k, FROM, WIDE, T.head)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=FROM > 0, is_async=True)


@gluon.jit
def issue_qk(q_registers, q, k, zero, C: gl.constexpr, T: gl.constexpr):
    """S = Q K^T, with the first C columns of Q from registers: they save the reads of that part of operand A."""
    COUNT: gl.constexpr = _head_parts(T, C)
    s = zero
    if C > 0:
        first = columns_of(k, 0, C, T.head)
        s = warpgroup_mma(q_registers, first.permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(COUNT):
        s = _qk_part(q, k, s, _head_part(T, C, i, 0), _head_part(T, C, i, 1), T)
    return s


@gluon.jit
def _pv_part(pairs, v, acc, T: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return warpgroup_mma(unpack(pairs, v.dtype, LAYOUT), v, acc, is_async=True)


@gluon.jit
def issue_pv(pairs, v, acc, T: gl.constexpr):
    """O += P V, with P from registers."""
    COUNT: gl.constexpr = len(acc)
    if T.one_product:
        return issue_one_product(pairs, v, acc, T)
    else:
        out = ()
        for i in gl.static_range(COUNT):
            part = columns_of(v, value_part(T, i, 0), value_part(T, i, 1), T.head_v)
            out = out + (_pv_part(pairs, part, acc[i], T),)
        return out


@gluon.jit
def wait_pv(pending):
    """O, once its products are done."""
    COUNT: gl.constexpr = len(pending)
    if COUNT == 1:
        return (warpgroup_mma_wait(0, [pending[0]]),)
    else:
        return warpgroup_mma_wait(0, [pending[0], pending[1]])


@gluon.jit
def _zeros(WIDE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    return gl.full([ROWS, WIDE], 0.0, gl.float32, layout=LAYOUT)


@gluon.jit
def no_output(T: gl.constexpr):
    """O of no block yet: a tuple of one or two groups of columns."""
    COUNT: gl.constexpr = value_parts(T)
    acc = ()
    for i in gl.static_range(COUNT):
        acc = acc + (_zeros(value_part(T, i, 1)),)
    return acc


@gluon.jit
def normalized(acc, inverse):
    """O over its rows' sums."""
    out = ()
    COUNT: gl.constexpr = len(acc)
    for i in gl.static_range(COUNT):
        out = out + (acc[i] * gl.convert_layout(inverse, gl.SliceLayout(1, acc[i].type.layout))[:, None],)
    return out


@gluon.jit
def scaled(acc, alpha):
    """O, row by row times alpha."""
    COUNT: gl.constexpr = len(acc)
    out = ()
    for i in gl.static_range(COUNT):
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc[i].type.layout))
        out = out + (rescaled(acc[i], factor),)
    return out


@gluon.jit
def store_output(o_map, o_tile, acc, where, row, DTYPE: gl.constexpr, T: gl.constexpr):
    """Through shared memory; the copy runs on beside the next tile. What is stored past the head dim is cut off."""
    WIDE: gl.constexpr = T.o_columns
    if len(acc) == 2 and T.head_v <= WIDE:  # side by side
        columns_of(o_tile, 0, acc[0].shape[1], WIDE).store(acc[0].to(DTYPE))
        columns_of(o_tile, acc[0].shape[1], acc[1].shape[1], WIDE).store(acc[1].to(DTYPE))
        fence_async_shared()
        send(o_map, o_tile, where, row, 0, T.head_v, WIDE, T)
    elif T.head_v <= WIDE:
        columns_of(o_tile, 0, WIDE, WIDE).store(acc[0].to(DTYPE))
        fence_async_shared()
        send(o_map, o_tile, where, row, 0, WIDE, WIDE, T)
    else:  # one after the other
        if len(acc) == 2:
            left, right = acc[0].to(DTYPE), acc[1].to(DTYPE)
        else:
            left, right = acc[0].to(DTYPE).reshape([ROWS, 2, WIDE]).permute((0, 2, 1)).split()
        columns_of(o_tile, 0, WIDE, WIDE).store(left)
        fence_async_shared()
        send(o_map, o_tile, where, row, 0, WIDE, WIDE, T)
        store_wait(0)
        columns_of(o_tile, 0, right.shape[1], WIDE).store(right)
        fence_async_shared()
        send(o_map, o_tile, where, row, WIDE, T.head_v - WIDE, WIDE, T)
