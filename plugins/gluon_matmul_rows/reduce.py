import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.hopper import group_barrier


@gluon.jit
def _begin_of(cta, total):
    """The first block of a CTA's stretch."""
    P = gl.num_programs(0)
    each = total // P
    return cta * each + gl.minimum(cta, total - each * P)


@gluon.jit
def _cta_of(block, total):
    """The CTA whose stretch has this block."""
    P = gl.num_programs(0)
    each = total // P
    longer = total - each * P  # so many CTAs have a block more
    border = longer * (each + 1)
    return gl.where(block < border, block // (each + 1), longer + (block - border) // gl.maximum(each, 1))


@gluon.jit
def _stretch(shared, blocks):
    """Of this CTA: (begin, end, tiles that it touches)."""
    begin = _begin_of(gl.program_id(0), shared * blocks)
    end = _begin_of(gl.program_id(0) + 1, shared * blocks)
    return begin, end, gl.where(end > begin, (end + blocks - 1) // blocks - begin // blocks, 0)


@gluon.jit
def items_of(tiles, whole, blocks, ways, cfg: gl.constexpr):
    """(begin, end, step) of what a CTA works on, for `part_of`. Of `tiles`, `whole` are those of complete rounds."""
    P = gl.num_programs(0)
    if cfg.SPLIT == 0:
        _, _, touched = _stretch(tiles - whole, blocks)
        return 0, touched + whole // P, 1
    else:
        return gl.program_id(0), tiles * ways, P


@gluon.jit
def part_of(item, tiles, whole, blocks, ways, cfg: gl.constexpr):
    """A piece of work: (tile, first block of K, number of blocks)."""
    if cfg.SPLIT == 1:
        return item, item * 0, blocks
    elif cfg.SPLIT == 0:
        begin, end, touched = _stretch(tiles - whole, blocks)
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
def _contributors(item, tile, first, tiles, whole, blocks, ways, cfg: gl.constexpr):
    """(own place in the workspace, the tile's first place, its second, from there to the next, how many)."""
    if cfg.SPLIT == 0:
        P = gl.num_programs(0)
        total = (tiles - whole) * blocks
        head = _cta_of(tile * blocks, total)
        count = _cta_of((tile + 1) * blocks - 1, total) - head + 1
        own = gl.program_id(0) + gl.where(first == 0, P, 0)  # a stretch has at most one of either kind
        return own, P + head, head + 1, 1, count
    else:
        return item, tile, tile + tiles, tiles, ways


@gluon.constexpr_function
def _load_asm():
    return "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];"


@gluon.jit
def _place(base, place, G: gl.constexpr, cfg: gl.constexpr):
    """Where this thread's sums lie: 16 bytes of each thread side by side."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    span: gl.constexpr = cfg.UNITS * 64 * cfg.WIDTH
    return base + (place * cfg.CONSUMERS + G).to(gl.int64) * span + gl.arange(0, 128, layout=lanes) * 4


@gluon.jit
def reduce(acc, G: gl.constexpr, item, part, tiles, whole, blocks, ways, workspace, cfg: gl.constexpr):
    """(accumulators, whether they now are the whole sum, for this consumer to store)."""
    part_ptr, count_ptr = workspace
    fours: gl.constexpr = cfg.UNITS * cfg.WIDTH // 8
    tile, first, _ = part
    own, head, second, step, count = _contributors(item, tile, first, tiles, whole, blocks, ways, cfg)
    at = _place(part_ptr, own, G, cfg)
    for i in gl.static_range(fours):
        gl.inline_asm_elementwise(
            "st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
            "=r,l,f,f,f,f",
            [(at + i * 512).to(gl.int64), acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    group_barrier()
    counter = count_ptr + tile * cfg.CONSUMERS + G
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = arrived == count - 1
    if last:
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
        acc = _sum(part_ptr, head, G, cfg)
        for number in range(1, count):
            at = _place(part_ptr, second + (number - 1) * step, G, cfg)
            more = _added(acc, at, cfg)
            acc = more
    return acc, last


@gluon.jit
def _sum(part_ptr, head, G: gl.constexpr, cfg: gl.constexpr):
    at = _place(part_ptr, head, G, cfg)
    found = ()
    for i in gl.static_range(cfg.UNITS * cfg.WIDTH // 8):
        found = found + _four(at + i * 512)
    return found


@gluon.jit
def _added(acc, at, cfg: gl.constexpr):
    found = ()
    for i in gl.static_range(cfg.UNITS * cfg.WIDTH // 8):
        a, b, c, d = _four(at + i * 512)
        found = found + (acc[4 * i] + a, acc[4 * i + 1] + b, acc[4 * i + 2] + c, acc[4 * i + 3] + d)
    return found


@gluon.jit
def _four(at):
    ASM: gl.constexpr = _load_asm()
    F: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
    a, b, c, d = gl.inline_asm_elementwise(ASM, "=f,=f,=f,=f,l", [at.to(gl.int64)], dtype=F, is_pure=False, pack=1)
    return (a, b, c, d)
