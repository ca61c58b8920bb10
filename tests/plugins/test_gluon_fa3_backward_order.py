"""gluon_fa3_backward's fixed order without a GPU: whose turn it is, and that tiles wait for earlier ones only."""

import itertools
import types
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from registry import Target
from registry.ops.attention.problem import AttentionBackwardProblem
from registry.plugins.gluon_fa3.backward import VARIANT, schedule
from registry.plugins.gluon_fa3.backward.sections import heads_in_turns
from registry.plugins.gluon_fa3.backward.traits import mask_kind, traits_of
from registry.plugins.gluon_fa3.traits import window_bounds
from registry.toolbox import drawn

LANGUAGE = SimpleNamespace(minimum=min, maximum=max, where=lambda test, a, b: a if test else b)
LENGTHS = [(1, 1), (64, 128), (1000, 1000), (300, 777), (777, 300), (5, 900), (900, 5)]
WINDOWS = [None, (0, 0), (100, 50), (300, 0), (0, 300), (129, -1), (-1, 65), (2000, 3)]


def on_numbers(function):
    """A function of the kernel's, on Python's integers."""
    plain = function.fn
    return types.FunctionType(plain.__code__, {**plain.__globals__, "gl": LANGUAGE})


query_blocks, first_tile, first_step, next_step, tile_at = (
    on_numbers(getattr(schedule, name)) for name in ("query_blocks", "first_tile", "first_step", "next_step", "tile_at")
)


class Counter(SimpleNamespace):
    """`gl` for a block of so many, whose atomic increment is of this word."""

    def inline_asm_elementwise(self, asm, constraints, operands, **_):
        _, last = operands
        self.word, before = (0 if self.word >= last else self.word + 1), self.word
        return before

    def num_programs(self, axis):
        return self.blocks


def problem(**sizes):
    return AttentionBackwardProblem.of_shape(Target.named("H200"), **{"b": 1, "hq": 8, "d": 128, "lse": True, **sizes})


@pytest.mark.parametrize("lengths, block_m", [*itertools.product(LENGTHS, (64, 128))], ids=str)
def test_a_turn_is_how_many_earlier_tiles_add_to_the_same(lengths, block_m):
    for causal, window in [(True, None), *((False, window) for window in WINDOWS)]:
        p = problem(s=lengths[0], sk=lengths[1], causal=causal, window=window)
        t = SimpleNamespace(mask=mask_kind(p, 128), block_m=block_m, block_n=128)
        extent = (*lengths, *window_bounds(causal, window))
        added = {}
        for n in range(-(-lengths[1] // 128)):
            low, high = query_blocks(n * 128, extent, 128, block_m, t)
            assert low < high
            for m in range(low, high):
                assert n - first_tile(m, extent, t) == added.get(m, 0), (causal, window, n, m)
                added[m] = added.get(m, 0) + 1


@pytest.mark.parametrize("low, high, group", [(0, 1, 1), (3, 7, 1), (0, 4, 3), (5, 6, 4)])
def test_steps_visit_each_block_of_each_head_once(low, high, group):
    m, g = first_step(high)
    found = []
    for _ in range((high - low) * group):
        found.append((m, g))
        m, g = next_step(m, g, group)
    assert found == [(m, g) for m in reversed(range(low, high)) for g in range(group)]


@pytest.mark.parametrize("s, b, hq, hkv", [(1024, 4, 16, 16), (8192, 1, 32, 8), (4096, 1, 6, 2), (200, 3, 2, 1)])
def test_tiles_wait_for_earlier_ones_only(s, b, hq, hkv):
    p = problem(b=b, hq=hq, hkv=hkv, s=s, causal=True, deterministic=True)
    for config in VARIANT.legal_configs(p):
        t = traits_of(p, config)
        heads, key_blocks = b * hkv * t.parts, -(-s // t.block_n)
        section = heads_in_turns(p, heads, key_blocks, s * hq // hkv, True)
        work = (hkv * t.parts, hq // hkv // t.parts, 0, key_blocks, heads, section, 0)
        started = {}
        for tile in range(heads * key_blocks):
            n, head, batch = tile_at(tile, work)
            assert started.get((batch, head), 0) == n, "the tiles of a head start in the order in which they add"
            started[batch, head] = n + 1
        assert set(started.values()) == {key_blocks} and len(started) == heads


@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize(
    "tiles, blocks, running", [(1, 1, 1), (7, 3, 3), (7, 3, 2), (200, 132, 1), (5, 8, 2), (9, 9, 4)]
)
def test_each_tile_is_drawn_once_and_leaves_the_counter_as_it_was(tiles, blocks, running, in_order):
    """Blocks beyond the tiles leave at once, as those of packed sequences do; the rest begin as others end."""
    counter = Counter(word=0, blocks=blocks, minimum=min, int32=None)
    draw = types.FunctionType(drawn.draw.fn.__code__, {**drawn.draw.fn.__globals__, "gl": counter})
    waiting, busy, found = list(range(min(tiles, blocks))), [], []
    while waiting or busy:
        while waiting and len(busy) < running:
            block = waiting.pop(0)
            busy.append(draw(None, tiles, True) if in_order else block)
        tile = busy.pop(0)
        if tile < tiles:
            found.append(tile)
            busy.append(draw(None, tiles, in_order))
    assert sorted(found) == list(range(tiles)) and counter.word == 0
    assert not in_order or found == sorted(found), "none begins behind one that no block has begun"


@pytest.mark.parametrize(
    "sizes, any_order, fixed_order",
    [
        (dict(b=4, hq=32, hkv=8, s=8192, causal=True), 4, 4),
        (dict(hq=32, d=64, s=16384), 4, 12),  # alike
        (dict(b=16, hq=16, s=1024), 4, 32),
        (dict(b=7, hq=3, s=1997, d=80, causal=True), 11, 21),  # no three of the 21 heads are left for the end
        (dict(hq=17, s=2121, causal=True), 9, 17),
        (dict(hq=3, s=4096), 3, 3),
        (dict(b=24, hq=64, hkv=8, s=753, causal=True), 8, 24),  # many share keys: fewer turns than a tile an SM
    ],
)
def test_how_many_heads_take_turns(sizes, any_order, fixed_order):
    p = problem(**sizes)
    for ordered, found in ((False, any_order), (True, fixed_order)):
        (config, *_) = (c for c in VARIANT.legal_configs(p) if (c["order"] == "fixed") == ordered)
        t = traits_of(p, config)
        heads, key_blocks = p.batch * p.heads_kv * t.parts, -(-p.seqlen_k // t.block_n)
        queries = p.seqlen_q * p.heads_q // p.heads_kv // t.parts
        assert heads_in_turns(p, heads, key_blocks, queries, ordered) == found


@pytest.mark.parametrize("heads, key_blocks", [(1, 1), (64, 1), (3, 40), (200, 16)])
def test_some_heads_take_turns_on_a_card_of_no_known_size(heads, key_blocks):
    p = AttentionBackwardProblem.of_shape(Target.named("sm90"), b=1, hq=8, s=2048, d=128, lse=True, causal=True)
    for ordered in (False, True):
        assert 1 <= heads_in_turns(p, heads, key_blocks, 2048, ordered) <= heads
