"""Attention by way of memory without a GPU: what the compiler makes of it, its items and chunks, and turns that end."""

import itertools
from types import SimpleNamespace

import pytest

from registry import Target, variants
from registry.ops.attention.problem import AttentionProblem

pytest.importorskip("triton")

import triton
from compiled import loop_spills, resources
from covering import configs_are_there_and_differ
from on_numbers import on_numbers

from registry.plugins.triton_fa2.stored import configs, forward_host, pieces, specialised_output, specialised_scores

PINNED = triton.__version__.startswith("3.6.")


def problem(**sizes):
    return AttentionProblem.of_shape(Target.named("H200"), **{"b": 2, "hq": 8, "s": 4096, "d": 512, **sizes})


PROBLEMS = [
    problem(),
    problem(causal=True, lse=True),
    problem(d=320, window=(100, 50), softcap=9.0),
    problem(d=448, dv=64, hkv=2, s=1000, dtype="float16"),
    problem(d=576, dv=512, causal=True, softcap=30.0, lse=True, layout="bshd"),
]


def variant():
    return variants()["gluon_stored"]


@pytest.mark.skipif(not PINNED, reason="spills were looked at with one Triton")
@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_shipped_configs_are_what_they_declare(p):
    configs_are_there_and_differ(variant(), p)
    assert variant().legal_configs(p) == variant().configs_for(p)
    steps, slices = configs.SLICE // 16, -(-p.head_dim // configs.SLICE)
    for config in variant().legal_configs(p):
        found = {one.name: one for one in map(resources, variant().builds(p, config))}
        assert set(found) == {"specialised_scores", "specialised_output"}
        most, declared = max(one.shared for one in found.values()), variant().requires.shared_memory(p, config)
        assert most <= declared <= most + 1024
        for one in found.values():
            assert not one.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
            assert not loop_spills(one, innermost=False)
            assert {configs.CONSUMER_REGISTERS, configs.PRODUCER_REGISTERS} <= set(one.setmaxnreg)
            assert one.registers * one.threads <= variant().requires.registers(p, config)
            assert one.counts["TMA load"] and one.counts["TMA store"] and not one.counts["HMMA"]
        scores, output = found["specialised_scores"], found["specialised_output"]
        assert scores.counts["HGMMA"] == configs.GROUPS * slices * steps, "each slice once, 16 columns a step"
        accumulators = 1 if config["COLUMNS"].bit_count() == 1 else 2
        assert output.counts["HGMMA"] == configs.GROUPS * accumulators * steps


item_at = on_numbers(specialised_scores, "item_at", tiles_seen=on_numbers(pieces, "tiles_seen"))
part_at = on_numbers(specialised_output, "part_at", item_at=item_at)


@pytest.mark.parametrize("bounds", [(-1, -1), (-1, 0), (100, 50), (300, -1), (0, 700), (2000, 3)], ids=str)
def test_items_are_all_rows_once_with_all_keys_that_they_see(bounds):
    left, right = bounds
    t = SimpleNamespace(BLOCK_N=128, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, PARTS=3)
    for seqlen_q, seqlen_k in [(1, 1), (64, 128), (1000, 1000), (300, 777), (777, 300), (5, 900), (900, 5)]:
        sizes = (seqlen_q, seqlen_k, left, right)
        all_q, tiles_k = -(-seqlen_q // 128), -(-seqlen_k // 128)
        shift = seqlen_k - seqlen_q
        half = max(1, all_q // 2)
        for heads, first, tiles in {(3, 0, all_q), (1, half, all_q - half)}:
            if not tiles:
                continue
            counts = (first, tiles, tiles_k, heads * tiles)
            found = [item_at(item, counts, sizes, t) for item in range(heads * tiles)]
            assert sorted((head, row) for head, _, row, _, _ in found) == [
                (head, 128 * tile) for head in range(heads) for tile in range(first, first + tiles)
            ]
            assert sorted(kept for _, kept, *_ in found) == [128 * i for i in range(heads * tiles)]
            for _, _, row, low, high in found:
                for r in range(row, min(row + 128, seqlen_q)):
                    last = min(seqlen_k - 1, r + shift + right) if right >= 0 else seqlen_k - 1
                    begin = max(0, r + shift - left) if left >= 0 else 0
                    if begin <= last:
                        assert 128 * low <= begin and last < 128 * high
            parts = [part_at(item, counts, sizes, t) for item in range(3 * heads * tiles)]
            assert [(place[1], part) for place, part in parts] == [(one[1], p) for one in found for p in range(3)]


def test_chunks_of_rows_fit_and_run_the_same_kernels():
    p = problem(b=3, hq=16, hkv=4, s=16384 + 100)
    calls = forward_host.GLUON._calls(p, variant().configs_for(p)[0], forward_host.GLUON.interface.operands(p), 1.0)
    scores, outputs = calls[::2], calls[1::2]
    assert len(scores) > 2 and len({call.constants["T"] for call in scores}) == 1
    tiles_q = -(-p.seqlen_q // 128)
    rows = []
    for one, other in zip(scores, outputs, strict=True):
        place = {name: one.arguments[name] for name in ("first_head", "first_tile_q", "tiles_q", "items", "tiles_k")}
        assert place == {name: other.arguments[name] for name in place}
        kept = one.operands()["p_map"].shape
        assert place["items"] * 128 * place["tiles_k"] * 128 <= kept[0] * kept[1] <= configs.CHUNK // 2
        heads = range(place["first_head"], place["first_head"] + place["items"] // place["tiles_q"])
        tiles = range(place["first_tile_q"], place["first_tile_q"] + place["tiles_q"])
        rows += itertools.product(heads, tiles)
    assert rows == [*itertools.product(range(3 * 16), range(tiles_q))]


def waits_for_ever(slices: int, stages: int, turn: int) -> bool:
    """Two groups that issue five products of each slice in turns, and let go of a slice when the next is issued."""
    whole = slices * 5
    loaded, issued, released, taken, given = 0, [0, 0], [0, 0], [0, 0], [1, 0]
    moves = True
    while moves and min(issued) < whole:
        moves = False
        if loaded < whole and loaded - min(released) < stages:
            loaded, moves = loaded + 1, True
        for group in (0, 1):
            c = issued[group] % slices
            begins, ends = c % turn == 0, c % turn == turn - 1 or c == slices - 1
            if issued[group] == min(loaded, whole) or (begins and taken[group] == given[group]):
                continue
            taken[group] += begins
            given[1 - group] += ends
            issued[group] += 1
            released[group] = issued[group] - (c < slices - 1)
            moves = True
    return min(issued) < whole


def test_turns_end_where_the_ring_is_shorter_than_a_product():
    assert waits_for_ever(8, 4, 8), "a whole product in turn, of which the ring holds half"
    for slices, stages in itertools.product(range(1, 17), range(2, 9)):
        assert not waits_for_ever(slices, stages, configs.slices_a_turn(slices, stages))
