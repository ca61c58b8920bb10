"""Equal shares of blocks for all CTAs: those of some tiles, laid end to end, cut into a stretch for each of them.

A stretch may end one tile and begin the next; who else works on a tile follows from where its blocks lie.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def _begin_of(cta, total):
    """The first block of a CTA's stretch."""
    P = gl.num_programs(0)
    each = total // P
    return cta * each + gl.minimum(cta, total - each * P)


@gluon.jit
def cta_of(block, total):
    """The CTA whose stretch has this block."""
    P = gl.num_programs(0)
    each = total // P
    longer = total - each * P  # so many CTAs have a block more
    border = longer * (each + 1)
    return gl.where(block < border, block // (each + 1), longer + (block - border) // gl.maximum(each, 1))


@gluon.jit
def stretch(shared, blocks):
    """Of this CTA: (begin, end, tiles that it touches)."""
    begin = _begin_of(gl.program_id(0), shared * blocks)
    end = _begin_of(gl.program_id(0) + 1, shared * blocks)
    return begin, end, gl.where(end > begin, (end + blocks - 1) // blocks - begin // blocks, 0)
