"""The producer: one warp that brings keys and values by bulk tensor copies, as far ahead as there are slots.

It goes through the same pieces as the consumer and does not stop at their ends: while parts are left and added up, the
keys of the next piece are under way. Page numbers come 32 at a time, those of the next 32 copies before these are
issued. It also looks whether lengths and pages are what they must be, when it has nothing else left to do.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.ops.attention_varlen import lengths as bits
from registry.plugins.gluon_decode.line import my_share, next_piece
from registry.toolbox.hopper import load_tile, slot_of, wait_slot_empty

LANES = gl.constexpr(32)
BAD_CU_Q, MOST_Q = gl.constexpr(bits.BAD_CU_SEQLENS_Q), gl.constexpr(bits.ABOVE_MAX_Q)
BAD_USED, MOST_K = gl.constexpr(bits.BAD_SEQUSED_K), gl.constexpr(bits.ABOVE_MAX_K)
BAD_TABLE = gl.constexpr(bits.BAD_TABLE)


@gluon.jit
def _tile(tensor, ring, s, ready, ids, lane, j, n, end, head, T: gl.constexpr):
    """The keys or values from n on, block j of those whose pages `ids` has, into stage s. Boxes that begin beyond the
    last key are not brought: what is there stays, and the consumer ignores it."""
    PANELS: gl.constexpr = T.panels
    BOXES: gl.constexpr = T.boxes
    present = gl.minimum(gl.maximum(end - n + (T.box - 1), 0) // T.box, BOXES)
    for count in gl.static_range(BOXES + 1):
        mbarrier.expect(ready, count * T.tile_bytes // BOXES, pred=present == count)
    for box in gl.static_range(BOXES):
        row = n + box * T.box
        if T.page == 0:
            outer = ids
        else:
            outer = gl.sum(gl.where(lane == j * BOXES + box, ids, 0), 0)
            row = row % T.page
        for panel in gl.static_range(PANELS):
            to = ring[0].index((s * PANELS + panel) * BOXES + box)
            load_tile(tensor, [outer, row, head * T.heads, panel * T.panel], ready, to, pred=box < present)


@gluon.jit
def _block(maps, rings, i, ids, lane, j, n, end, head, T: gl.constexpr):
    """Keys and values of a block, as use i: the consumer lets go of both at once."""
    k_ring, v_ring = rings
    s = slot_of(i, k_ring)
    ready = wait_slot_empty(k_ring, s, i)
    _tile(maps[0], k_ring, s, ready, ids, lane, j, n, end, head, T)
    _tile(maps[1], v_ring, s, v_ring[1].index(s), ids, lane, j, n, end, head, T)


@gluon.jit
def _pages(table, n, end, lane, T: gl.constexpr):
    """The pages of 32 boxes from key n on; those that begin beyond the last key are not looked up."""
    key = n + lane * T.box
    return gl.load(table + key // T.page, mask=key < end, other=0)


@gluon.jit
def _piece(maps, rings, i, table, head, n, take, end, pages, bad, T: gl.constexpr):
    """All blocks of a piece, of the pages of a table or of a sequence of the cache; gives the count of blocks, and
    the pages that are not there."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, LANES, layout=LAYOUT)
    if T.page == 0:
        for j in range(take):
            _block(maps, rings, i, table, lane, 0, n + j * T.tokens, end, head, T)
            i += 1
    else:
        EACH: gl.constexpr = LANES // T.boxes  # blocks whose pages come together
        ids = _pages(table, n, end, lane, T)
        for some in range(0, take, EACH):
            begin = n + some * T.tokens
            more = _pages(table, begin + EACH * T.tokens, end, lane, T)
            bad = bad | (ids < 0) | (ids >= pages)
            ids = gl.minimum(gl.maximum(ids, 0), pages - 1)
            for j in range(gl.minimum(take - some, EACH)):
                _block(maps, rings, i, ids, lane, j, begin + j * T.tokens, end, head, T)
                i += 1
            ids = more
    return i, bad


@gluon.jit
def _complaints(lengths, most_q, most_k):
    """The bits of what is wrong with the lengths."""
    cu_q, used, batch, total_q, room = lengths
    lane = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    found = 0
    for some in range(0, batch, LANES):
        b = some + lane
        there = b < batch
        begin = gl.load(cu_q + b, mask=there, other=0)
        end = gl.load(cu_q + b + 1, mask=there, other=0)
        keys = gl.load(used + b, mask=there, other=0)
        wrong = (begin > end) | ((b == batch - 1) & (end != total_q)) | ((b == 0) & (begin != 0)) | (end > total_q)
        bad = gl.where(wrong, BAD_CU_Q, 0) | gl.where(end - begin > most_q, MOST_Q, 0)
        bad |= gl.where((keys < 0) | (keys > room), BAD_USED, 0) | gl.where(keys > most_k, MOST_K, 0)
        found |= gl.reduce_or(gl.where(there, bad, 0), 0)
    return found


@gluon.jit
def producer(maps, rings, lengths, paging, limits, overhead, complaints, T: gl.constexpr):
    table, table_row, pages = paging
    left, most_q, most_k = limits
    head, chunk = gl.program_id(0), gl.program_id(1)
    unit, stop, b, before, overhead, _, _ = my_share(lengths, left, chunk, overhead, 1, T)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    bad = gl.full([LANES], 0, gl.int1, layout=LAYOUT)
    i = 0
    piece = next_piece(unit, stop, b, before, overhead, lengths, left, T)
    while piece[9] > 0:
        unit, b, before, _, _, keys, _, _, block, take = piece
        own = table + b.to(gl.int64) * table_row
        if T.page == 0:
            own = b
        i, bad = _piece(maps, rings, i, own, head, block * T.tokens, take, keys, pages, bad, T)
        piece = next_piece(unit + take, stop, b, before, overhead, lengths, left, T)
    wrong = 0
    if T.page > 0:
        wrong = gl.where(gl.max(bad.to(gl.int32), 0) > 0, BAD_TABLE, 0)
    if (head == gl.num_programs(0) - 1) & (chunk == T.chunks - 1):
        wrong |= _complaints(lengths, most_q, most_k)
    if wrong != 0:
        gl.atomic_or(complaints, wrong, sem="relaxed")
