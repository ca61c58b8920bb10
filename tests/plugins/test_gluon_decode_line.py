"""gluon_decode's division of the keys without a GPU: every block of every tile is somebody's, once."""

import itertools
import random
import types
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from registry.plugins.gluon_decode import line, parts

LANGUAGE = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
HELPERS = (
    *("quotient", "per_chunk", "even_shares", "equal_shares", "shares_of"),
    *("start_of", "chunk_of", "piece_at", "extent_of", "next_piece"),
)


def on_numbers():
    """The kernel's functions on Python's integers, with each other."""
    names = {"gl": LANGUAGE, "quotient": lambda x, y: x // y, "per_chunk": lambda x, t: x // t.chunks}
    names["sequence_at"] = lambda b, lengths: (0, *lengths[b])
    found = {}
    for name in HELPERS:
        plain = getattr(line, name).fn
        found[name] = names.setdefault(name, types.FunctionType(plain.__code__, names, name))
    return SimpleNamespace(**found)


on = on_numbers()


def pieces(sequences, chunk, overhead, t):
    """(sequence, first block, blocks, whether it begins here, whole, from which to which chunk) in order, as both roles
    go through them."""
    extents = [on.extent_of(queries, keys, 0, t) for queries, keys in sequences]
    total = sum(blocks * tiles for _, blocks, tiles in extents)
    number = sum(tiles for *_, tiles in extents)
    longest = max((blocks for _, blocks, tiles in extents if tiles), default=0)
    overhead, total, share, longer = on.shares_of(total, number, longest, overhead, t)
    unit, stop = on.start_of(chunk, share, longer), min(on.start_of(chunk + 1, share, longer), total)
    ends = list(itertools.accumulate((blocks + overhead) * tiles for _, blocks, tiles in extents))
    b = sum(end <= unit for end in ends)
    before = max([end for end in ends if end <= unit], default=0)
    found, taken = [], 0
    while True:
        piece = on.next_piece(unit + taken, stop, b, before, overhead, sequences, 0, t)
        unit, b, before, _, _, _, begin, blocks, block, taken = piece
        if taken <= 0:
            return found
        who = on.chunk_of(begin, share, longer), on.chunk_of(begin + blocks - 1, share, longer)
        found.append((b, block, taken, unit == begin, taken == blocks, who))


T = SimpleNamespace(left=False, tokens=64, chunks=33)
draw = random.Random(1)
BATCHES = {
    "one of one block": [(1, 1)],
    "one of 1k": [(1, 1024)],
    "one long": [(1, 131072)],
    "nothing": [(0, 100), (1, 0)],
    "alike": [(1, 4096)] * 16,
    "alike, more than chunks": [(1, 640)] * 100,
    "ragged": [(draw.choice((0, 1, 1, 2, 5, 9)), draw.choice((0, 1, 64, 65, 700, 9000))) for _ in range(60)],
    "one among many": [(1, 30000), *[(1, 900)] * 31],
}


@pytest.mark.parametrize("chunks", [1, 3, 16, 33, 132])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("overhead", [0, 1, 3])
def test_every_block_is_somebodys_once(name, chunks, overhead):
    sequences, t = BATCHES[name], SimpleNamespace(**{**vars(T), "chunks": chunks})
    done, arrived, begun = {}, {}, set()
    for chunk in range(chunks):
        own = pieces(sequences, chunk, overhead, t)
        parts = [piece for piece in own if not piece[4]]
        assert len(parts) <= 2, "a program leaves at most two parts"
        assert len({begins for *_, begins, _, _ in parts}) == len(parts), "in a place each"
        for b, block, take, begins, whole, (first, last) in own:
            for n in range(block, block + take):
                assert done.setdefault((b, n), chunk) == chunk
                done[b, n] = chunk
            begun |= {b} if begins else set()
            assert first <= chunk <= last
            assert whole == (first == last)
            arrived.setdefault((b, first, last), []).append(chunk)
    wanted = {
        (b, n) for b, (queries, keys) in enumerate(sequences) if queries for n in range(max(1, -(-keys // T.tokens)))
    }
    assert set(done) == wanted
    for (b, first, last), who in arrived.items():
        assert who == list(range(first, last + 1)), "all of these count themselves in, and no other"
        assert b in begun
    counters = [first for *_, first, last in arrived if first < last]
    assert len(counters) == len(set(counters)), "tiles whose parts are counted have a counter each"


def test_a_window_begins_at_the_block_of_the_first_key_that_is_seen():
    t = SimpleNamespace(**{**vars(T), "left": True})
    first, blocks, _ = on.extent_of(3, 1000, 100, t)
    assert first == (1000 - 3 - 100) // 64 and first + blocks == 16
    assert on.extent_of(3, 50, 100, t)[:2] == (0, 1)


def test_shares_differ_by_one_unit():
    for name, sequences in BATCHES.items():
        extents = [on.extent_of(*sequence, 0, T) for sequence in sequences]
        total, number = sum(b * n for _, b, n in extents), sum(n for *_, n in extents)
        longest = max((b for _, b, n in extents if n), default=0)
        overhead, total, share, longer = on.shares_of(total, number, longest, 1, T)
        starts = [min(on.start_of(chunk, share, longer), total) for chunk in range(34)]
        assert starts[0] == 0 and starts[-1] == total, name
        for unit in range(0, total, 7):
            chunk = on.chunk_of(unit, share, longer)
            assert starts[chunk] <= unit < starts[chunk + 1]


def test_values_of_eight_bits_end_where_the_second_product_and_the_output_look_for_them():
    """By the bits of a value's key and column: its place in a thread's words, the swap within two words, the view."""
    column_of = types.FunctionType(parts.column_of.fn.__code__, {})
    for key, column in itertools.product(range(64), range(128)):
        k0, v0, v1 = key & 1, column & 1, column >> 1 & 1
        # Two words of 4 columns each become pairs of keys: what stood at (k0, v1, v0) stands at (v1, v0, k0).
        nominal_key, nominal_column = key & ~1 | v1, column & ~3 | v0 << 1 | k0
        view = (nominal_key >> 1, nominal_key & 1, nominal_column >> 5, nominal_column >> 2 & 7)
        view += (nominal_column >> 1 & 1, nominal_column & 1)  # [keys / 2, 2, 4, 8, 2, 2]
        m = ((view[1] * 4 + view[2]) * 2 + view[4]) * 8 + view[3]  # permuted by (1, 2, 4, 3, 0, 5)
        assert (view[0] * 2 + view[5], column_of(m, SimpleNamespace(eight=True))) == (key, column)
