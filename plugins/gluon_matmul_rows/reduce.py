"""Split-K: which CTA multiplies which range of K, and how the partial sums of a tile become one.

SPLIT 2: `ways` ranges of K for each tile. SPLIT 0: equal shares: the blocks of those tiles that are too few for a round
over the chip, laid end to end, are cut into a stretch for each CTA; they come first, whole tiles after them.

Every CTA writes its sums to the workspace and counts itself in; the last to arrive adds those of the others to its own,
which it still has, and sets the counter back to zero. The order of adding is that of the ranges, except that the first
two may change places: the result does not depend on who was last. Nobody waits, so nothing can hang. Consumers have
counters of their own and never meet.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.hopper import group_barrier
from registry.toolbox.stretches import cta_of, stretch
from registry.toolbox.wgmma import floats, four_of, lanes, zeros


@gluon.jit
def items_of(tiles, whole, blocks, ways, cfg: gl.constexpr):
    """(begin, end, step) of what a CTA works on, for `part_of`. Of `tiles`, `whole` are those of complete rounds."""
    P = gl.num_programs(0)
    if cfg.SPLIT == 0:
        _, _, touched = stretch(tiles - whole, blocks)
        return 0, touched + whole // P, 1
    else:
        return gl.program_id(0), tiles * ways, P


@gluon.jit
def part_of(item, tiles, whole, blocks, ways, cfg: gl.constexpr):
    """A piece of work: (tile, first block of K, number of blocks)."""
    if cfg.SPLIT == 1:
        return item, item * 0, blocks
    elif cfg.SPLIT == 0:
        begin, end, touched = stretch(tiles - whole, blocks)
        tile = begin // blocks + item
        first = gl.maximum(begin - tile * blocks, 0)
        count = gl.minimum(end - tile * blocks, blocks) - first
        later = tiles - whole + gl.program_id(0) + (item - touched) * gl.num_programs(0)
        shared = item < touched
        return gl.where(shared, tile, later), gl.where(shared, first, 0), gl.where(shared, count, blocks)
    else:
        part = item // tiles
        first = part * blocks // ways
        return item - part * tiles, first, (part + 1) * blocks // ways - first


@gluon.jit
def _contributors(item, part, tiles, whole, blocks, ways, cfg: gl.constexpr):
    """(own place in the workspace, own number, the tile's first place, its second, how far on the next is, how many)"""
    tile, first, _ = part
    if cfg.SPLIT == 0:
        P = gl.num_programs(0)
        total = (tiles - whole) * blocks
        head = cta_of(tile * blocks, total)
        count = cta_of((tile + 1) * blocks - 1, total) - head + 1
        own = gl.program_id(0) + gl.where(first == 0, P, 0)  # a stretch has at most one of either kind
        return own, gl.program_id(0) - head, P + head, head + 1, 1, count
    else:
        return item, item // tiles, tile, tile + tiles, tiles, ways


@gluon.jit
def _place(base, place, G: gl.constexpr, cfg: gl.constexpr):
    """Where this thread's sums lie: 16 bytes of each thread side by side."""
    span: gl.constexpr = cfg.UNITS * 64 * cfg.WIDTH
    return (base + (place * cfg.CONSUMERS + G).to(gl.int64) * span + lanes() * 4).to(gl.int64)


@gluon.jit
def reduce(acc, G: gl.constexpr, item, part, tiles, whole, blocks, ways, workspace, cfg: gl.constexpr):
    """(accumulators, whether they now are the whole sum, for this consumer to store)."""
    part_ptr, count_ptr = workspace
    own, mine, head, second, step, count = _contributors(item, part, tiles, whole, blocks, ways, cfg)
    _put(acc, _place(part_ptr, own, G, cfg), cfg)
    group_barrier()
    counter = count_ptr + part[0] * cfg.CONSUMERS + G
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = arrived == count - 1
    if last:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
        if mine > 1:
            acc = _added(zeros(cfg.UNITS, cfg.WIDTH), _place(part_ptr, head, G, cfg), cfg)
        for number in range(1, count):  # of the first two, either is added to the other
            other = gl.where((number == 1) & (mine == 1), head, second + (number - 1) * step)
            acc = _added(acc, _place(part_ptr, other, G, cfg), cfg)
    return acc, last


@gluon.constexpr_function
def _put_asm(four):
    return f"st.global.v4.f32 [$1 + {2048 * four}], {{$2, $3, $4, $5}}; mov.b32 $0, 0;"


@gluon.constexpr_function
def _add_asm(four):
    return f"""{{
        .reg .f32 a, b, c, d;
        ld.global.cg.v4.f32 {{a, b, c, d}}, [$4 + {2048 * four}];
        add.f32 $0, $0, a;
        add.f32 $1, $1, b;
        add.f32 $2, $2, c;
        add.f32 $3, $3, d;
    }}"""


@gluon.jit
def _put(acc, at, cfg: gl.constexpr):
    FOURS: gl.constexpr = cfg.UNITS * cfg.WIDTH // 8
    for i in gl.static_range(FOURS):
        gl.inline_asm_elementwise(
            _put_asm(i), "=r,l,f,f,f,f", (at,) + four_of(acc, i), dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _added(acc, at, cfg: gl.constexpr):
    FOURS: gl.constexpr = cfg.UNITS * cfg.WIDTH // 8
    TYPES: gl.constexpr = floats(4)
    found = ()
    for i in gl.static_range(FOURS):
        found = found + gl.inline_asm_elementwise(
            _add_asm(i), "=f,=f,=f,=f,l,0,1,2,3", (at,) + four_of(acc, i), dtype=TYPES, is_pure=False, pack=1
        )
    return found
