"""Products of 8-bit floats: each block of K is summed by itself and added in float32, for wgmma keeps 14 bits of a sum.

A block is four wgmmas of 32 elements, the first of which begins anew: 128 elements of K, 128 bytes of a row, as many as
of 16-bit floats are 64. Sums of one block take as many registers as the accumulators of 64 rows. Where they leave room
for those of another (AHEAD), one block is added while the next is multiplied; elsewhere the other consumer multiplies.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.clusters import release_in_both, wait_at
from registry.toolbox.wgmma import floats, four_of, lanes, waited


@gluon.constexpr_function
def _fresh_asm(width, kind):
    """64 rows by so many columns: a block of K, by the low words of matrix descriptors."""
    each = width // 2
    registers = ", ".join(f"${i}" for i in range(each))
    lines = [
        "{",
        ".reg .pred p, q; .reg .b32 low, high; .reg .b64 a, b;",
        "setp.ne.u32 p, 0, 0;",
        "setp.eq.u32 q, 0, 0;",
        f"mov.b32 high, {64 | 1 << 30};",  # 1024 bytes from one group of 8 rows to the next, 128-byte swizzle
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        lines += [f"add.u32 low, ${each + 1}, {2 * step};", "mov.b64 b, {low, high};"]
        lines += [f"add.u32 low, ${each}, {2 * step};", "mov.b64 a, {low, high};"]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.{kind}.{kind} {{{registers}}}, a, b, "
            f"{'q' if step else 'p'}, 1, 1;"
        )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def _fresh_constraints(width):
    return ",".join(["=f"] * (width // 2) + ["r", "r"])


@gluon.jit
def _fresh(a, b, cfg: gl.constexpr):
    """One block of K of 64 rows on its way."""
    COUNT: gl.constexpr = cfg.WIDTH // 2
    ASM: gl.constexpr = _fresh_asm(cfg.WIDTH, cfg.DTYPE)
    CONSTRAINTS: gl.constexpr = _fresh_constraints(cfg.WIDTH)
    FLOATS: gl.constexpr = floats(COUNT)
    # a tensor operand, so that what comes back are tensors of one value a thread
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [a + lanes() * 0, b], dtype=FLOATS, is_pure=False, pack=1)


@gluon.jit
def _added(acc, sums, UNIT: gl.constexpr, cfg: gl.constexpr):
    """The accumulators with the sums of one of their 64 rows."""
    EACH: gl.constexpr = cfg.WIDTH // 2
    ALL: gl.constexpr = cfg.UNITS * EACH
    found = ()
    for i in gl.static_range(ALL):
        if i >= UNIT * EACH and i < (UNIT + 1) * EACH:
            found = found + (acc[i] + sums[i - UNIT * EACH],)
        else:
            found = found + (acc[i],)
    return found


@gluon.jit
def _arrived(it, bars, base, cfg: gl.constexpr):
    """(the empty barrier of a stage whose blocks are there, the low word of a descriptor of its first)"""
    s = it % cfg.STAGES
    wait_at(bars + 16 * s, (it // cfg.STAGES) & 1)
    return bars + 16 * s + 8, base + s * (cfg.STAGE * 64)


@gluon.jit
def _one_block(acc, it, ring, FIRST: gl.constexpr, SECOND: gl.constexpr, cfg: gl.constexpr):
    bars, base, lane = ring
    UNITS: gl.constexpr = cfg.UNITS
    empty, stage = _arrived(it, bars, base, cfg)
    for unit in gl.static_range(UNITS):
        sums = waited(_fresh(stage + FIRST + unit * 512, stage + SECOND, cfg), 0, 1, cfg.WIDTH)
        if unit == UNITS - 1:
            release_in_both(empty, lane, cfg.SHARED)
        acc = _added(acc, sums, unit, cfg)
    return acc


@gluon.jit
def multiplied(acc, it, count, ring, FIRST: gl.constexpr, SECOND: gl.constexpr, cfg: gl.constexpr):
    """All blocks of a tile; `ring` is (its barriers, the low word of a descriptor of it, the thread's number in its
    warp)."""
    bars, base, lane = ring
    if cfg.AHEAD:
        for _ in range(count // 2):
            empty, stage = _arrived(it, bars, base, cfg)
            one = _fresh(stage + FIRST, stage + SECOND, cfg)
            also_empty, stage = _arrived(it + 1, bars, base, cfg)
            two = _fresh(stage + FIRST, stage + SECOND, cfg)
            one = waited(one, 1, 1, cfg.WIDTH)
            release_in_both(empty, lane, cfg.SHARED)
            acc = _added(acc, one, 0, cfg)
            two = waited(two, 0, 1, cfg.WIDTH)
            release_in_both(also_empty, lane, cfg.SHARED)
            acc = _added(acc, two, 0, cfg)
            it += 2
        if count % 2 == 1:
            acc = _one_block(acc, it, ring, FIRST, SECOND, cfg)
            it += 1
    else:
        for _ in range(count):
            acc = _one_block(acc, it, ring, FIRST, SECOND, cfg)
            it += 1
    return acc, it


@gluon.jit
def scaled(acc, row, column, scales, cfg: gl.constexpr):
    """Accumulators, whose corner is at (row, column), times the scales of their rows and columns, if there are any."""
    if not cfg.SCALED:
        return acc
    a_ptr, b_ptr, a_step, b_step, rows, columns = scales
    UNITS: gl.constexpr = cfg.UNITS
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    thread = lanes()
    down = row + thread // 32 * 16 + thread % 32 // 4
    across = column + thread % 4 * 2
    found = ()
    for unit in gl.static_range(UNITS):
        high = down + unit * 64
        a = gl.load(a_ptr + high * a_step, mask=high < rows, other=0.0)
        below = gl.load(a_ptr + (high + 8) * a_step, mask=high + 8 < rows, other=0.0)
        for j in gl.static_range(EIGHTS):
            at = across + 8 * j
            b = gl.load(b_ptr + at * b_step, mask=at < columns, other=0.0)
            beside = gl.load(b_ptr + (at + 1) * b_step, mask=at + 1 < columns, other=0.0)
            four = four_of(acc, unit * EIGHTS + j)
            found = found + (four[0] * a * b, four[1] * a * beside)
            found = found + (four[2] * below * b, four[3] * below * beside)
    return found
