"""What Gluon kernels for Hopper are made of: TMA names, shared-memory views, rings of tiles, named barriers.

TMA          `load_tile`, `store_tile`, `store_wait`, `group_barrier`: Gluon's names moved between triton 3.6 and 3.9;
             `reduce_tile` adds a tile to global memory, `linear` is the layout of a box that is not swizzled
views        `swizzled` is the layout in which a box of a tensor map lands; `as_matrix` reads it as wgmma does, `as_box`
             is the front of a tile as a box of its own, `viewed` the same bytes in any other shape and layout
accumulators `chunks`: columns of one by so many at a time
rings        `ring`, `slot`, `wait_full`, `wait_empty`, `release`: use i takes slot i % stages in phase
             (i // stages) & 1, so producer and consumers agree by counting. For stages of several tiles: `slot_of`,
             `wait_slot_full`, `wait_slot_empty`, `release_slot`
barriers     `barriers` and `init_barriers`: those in shared memory. `FREE_BARRIERS` are the hardware barriers that the
             compiler leaves alone: give them names in an enum, and `barrier_asm` of one to `gl.inline_asm_elementwise`.
             Set up no barrier in shared memory that nobody waits for: the allocator lends its bytes to other data, and
             that data is not safe there. Rows were lost that way; where processes take turns on a GPU, a kernel read a
             wrong number of tiles (docs/measured/ragged.md). `Resources.lent_barriers` finds it, and the kit asks that
launch       `after_previous_kernel`, for kernels launched with `launch_pdl=True`
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import functools
import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the threads of one partition


@gl._core.builtin
def _reduce_tile(tensor, coordinates, tile, _semantic=None):
    """Triton 3.6 has the instruction and no name for it."""
    from triton._C.libtriton import ir

    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, coordinates, tile.handle)


reduce_tile = getattr(tma, "async_atomic_add", None) or _reduce_tile

DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int8: gl.int8,
    torch.int32: gl.int32,
}
PARTS_HAVE_VIEWS = not triton.__version__.startswith("3.8.")
"""Whether a tile's first bytes may be viewed as a smaller one. Triton 3.8 alone wants as many bytes on both sides, and
views of what has no other name: there a tile is viewed as several, and the first is cut off."""
FREE_BARRIERS = range(8, 16)  # 0 to 7 are the compiler's: one for each partition, and one for all


# --- shared memory --------------------------------------------------------------------------------------------------


def swizzled(block, dtype):
    """The layout in which a box of a tensor map lands, for torch's dtype."""
    return _swizzled(tuple(block), dtype)


@functools.cache
def _swizzled(block, dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def linear(rank, dtype):
    """The layout of a box that lands as it lies in memory, for torch's dtype."""
    return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, rank)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def viewed(tile, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes in another shape and layout."""
        return tile.reinterpret(tile.dtype, SHAPE, LAYOUT)

    @gluon.jit
    def retyped(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes as elements of another type."""
        return tile.reinterpret(DTYPE, SHAPE, LAYOUT)

    @gluon.jit
    def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A tile as a swizzled matrix, as wgmma reads it."""
        return tile.reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )

    @gluon.jit
    def as_box(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The front of a tile as a box of a rank-3 tensor map."""
        return tile.reinterpret(
            tile.dtype, [1, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([1, ROWS, COLUMNS], tile.dtype)
        )
else:

    @gluon.jit
    def viewed(tile, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes in another shape and layout."""
        return tile._reinterpret(tile.dtype, SHAPE, LAYOUT)

    @gluon.jit
    def retyped(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes as elements of another type."""
        return tile._reinterpret(DTYPE, SHAPE, LAYOUT)

    @gluon.jit
    def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A tile as a swizzled matrix, as wgmma reads it."""
        return tile._reinterpret(
            tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype)
        )

    @gluon.jit
    def as_box(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The front of a tile as a box of a rank-3 tensor map."""
        return tile._reinterpret(
            tile.dtype, [1, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([1, ROWS, COLUMNS], tile.dtype)
        )


if not PARTS_HAVE_VIEWS:

    @gluon.constexpr_function
    def _several(held, bits, shape, own_bits):
        """The shape of as many such tiles, one below the other, as have the bytes of what is held."""
        times = math.prod(held) * bits // (math.prod(shape) * own_bits)
        return [shape[0] * times, *shape[1:]]

    @gluon.jit
    def retyped(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes as elements of another type."""
        BITS: gl.constexpr = tile.dtype.primitive_bitwidth
        WHOLE: gl.constexpr = _several(tile.shape, BITS, SHAPE, DTYPE.primitive_bitwidth)
        whole = tile._reinterpret(DTYPE, WHOLE, LAYOUT)
        if WHOLE[0] == SHAPE[0]:
            return whole
        else:
            return whole.slice(0, SHAPE[0], dim=0)

    @gluon.jit
    def viewed(tile, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The same bytes in another shape and layout."""
        return retyped(tile, tile.dtype, SHAPE, LAYOUT)

    @gluon.jit
    def as_matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """A tile as a swizzled matrix, as wgmma reads it."""
        return viewed(tile, [ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tile.dtype))

    @gluon.jit
    def as_box(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
        """The front of a tile as a box of a rank-3 tensor map."""
        return viewed(tile, [1, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([1, ROWS, COLUMNS], tile.dtype))


# --- accumulators ---------------------------------------------------------------------------------------------------


@gluon.jit
def chunks(x, parts: gl.constexpr):
    """[M, N] -> `parts` tensors [M, N / parts]; columns lie in different registers, so this moves nothing."""
    if parts == 1:
        return (x,)
    else:
        lo, hi = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        return chunks(lo, parts // 2) + chunks(hi, parts // 2)


# --- rings of tiles -------------------------------------------------------------------------------------------------


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Barriers in shared memory, for `init_barriers` or `ring_over`."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(bars, ARRIVALS: gl.constexpr):
    """Each completes a phase when so many have arrived."""
    COUNT: gl.constexpr = bars.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)


@gluon.jit
def ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr):
    """(tiles, full, empty) around `tiles`, whose first dimension counts the stages: `full` completes when the bulk copy
    has delivered its bytes, `empty` when each of the groups that read the slot has let go of it."""
    return ring_over(tiles, barriers(STAGES), barriers(STAGES), READERS)


@gluon.jit
def ring_over(tiles, full, empty, READERS: gl.constexpr):
    """The same over barriers at hand: for a kernel that has others to set up first."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return tiles, full, empty


@gluon.jit
def slot(i, tiles):
    """(slot, phase) of use i."""
    STAGES: gl.constexpr = tiles.shape[0]
    return i % STAGES, (i // STAGES) & 1


@gluon.jit
def wait_full(r, i):
    """Reader: wait for use i; gives its tile."""
    tiles, full, empty = r
    s, phase = slot(i, tiles)
    mbarrier.wait(full.index(s), phase)
    return tiles.index(s)


@gluon.jit
def release(r, i):
    """Reader: this group is done with use i."""
    tiles, full, empty = r
    s, _ = slot(i, tiles)
    mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def wait_empty(r, i):
    """Writer: wait until use i may be written; gives its tile and the barrier that announces it."""
    tiles, full, empty = r
    s, phase = slot(i, tiles)
    mbarrier.wait(empty.index(s), phase ^ 1)
    return tiles.index(s), full.index(s)


# The same by slot, for a kernel whose stages hold several tiles: it finds them by the slot, which its loop carries.


@gluon.jit
def slot_of(i, r):
    tiles, full, empty = r
    STAGES: gl.constexpr = full.shape[0]
    return i % STAGES


@gluon.jit
def wait_slot_full(r, s, i):
    """Reader: wait until slot s holds use i."""
    tiles, full, empty = r
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(s), (i // STAGES) & 1)


@gluon.jit
def wait_slot_empty(r, s, i):
    """Writer: wait until slot s may take use i; gives the barrier that announces it."""
    tiles, full, empty = r
    STAGES: gl.constexpr = full.shape[0]
    announced = full.index(s)
    mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
    return announced


@gluon.jit
def release_slot(r, s):
    """Reader: this group is done with slot s."""
    tiles, full, empty = r
    mbarrier.arrive(empty.index(s), count=1)


# --- hardware barriers ----------------------------------------------------------------------------------------------


@gluon.constexpr_function
def barrier_asm(verb, barrier, threads):
    """PTX that waits at a named barrier ("sync") for that many threads, or comes to it and goes on ("arrive")."""
    return f"bar.{verb} {int(barrier)}, {int(threads)}; mov.u32 $0, 0;"


# --- the kernel before this one -------------------------------------------------------------------------------------


@gluon.jit
def after_previous_kernel():
    """Programmatic dependent launch: all before this may overlap the previous kernel's tail, nothing after it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
