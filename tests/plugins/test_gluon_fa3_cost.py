"""What gluon_fa3 guesses its configs to take, dense, packed and over pages: what decides, not how many microseconds."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from registry import Target
from registry.ops.attention.problem import AttentionProblem
from registry.ops.attention_varlen.problem import VarlenProblem
from registry.plugins import gluon_fa3
from registry.plugins.gluon_fa3 import varlen
from registry.plugins.gluon_fa3.cost import ALONE, TIMES, span_of
from registry.plugins.gluon_fa3.cost import cost as dense_cost
from registry.plugins.gluon_fa3.varlen.cost import cost as packed_cost

H200 = Target.named("H200")
SMS = H200.sm_count
SHARING = {"BLOCK_N": 64, "consumers": 1, "overlap": False}  # an SM has room for two at head dim 128
WIDER = {"BLOCK_N": 128, "consumers": 1, "overlap": False}  # and for one of these
TWO_GROUPS = {"BLOCK_N": 128, "consumers": 2, "overlap": False}


def attention(**sizes):
    return AttentionProblem.of_shape(H200, **{"b": 1, "hq": 1, "s": 64, "sk": 4096, "d": 128, **sizes})


def packed(**sizes):
    return VarlenProblem.of_shape(H200, **{"b": 1, "hq": 1, "sq": 64, "sk": 4096, "d": 128, **sizes})


def launch(config):
    return TIMES[128, config["consumers"], config["BLOCK_N"]][0]


def first(variant, problem):
    """The config that a variant would try first by its guess alone."""
    return min(variant.configs_for(problem), key=lambda config: variant.cost(problem, config))


@pytest.mark.parametrize("problem, cost", [(attention, dense_cost), (packed, packed_cost)], ids=["dense", "packed"])
def test_a_tile_alone_takes_longer_than_half_of_two_in_both_guesses(problem, cost):
    """One tile an SM, two, three, and four, all alike; heads share keys, so that memory is not what they wait for."""
    took = [cost(problem(b=times, hq=SMS, hkv=1), SHARING) - launch(SHARING) for times in (1, 2, 3, 4)]
    assert [one / took[0] for one in took] == pytest.approx([1, 2 / ALONE, 2 / ALONE + 1, 4 / ALONE])
    took = [cost(problem(b=times, hq=SMS, hkv=1), WIDER) - launch(WIDER) for times in (1, 2, 3, 4)]
    assert [one / took[0] for one in took] == pytest.approx([1, 2, 3, 4]), "nothing shares its SM"


def test_few_tiles_go_through_wide_blocks_alone_and_many_share_sms():
    alone, shared = first(gluon_fa3.VARIANT, attention(hq=SMS)), first(gluon_fa3.VARIANT, attention(hq=2 * SMS))
    assert (alone["consumers"], alone["BLOCK_N"]) == (1, 128)
    assert (shared["consumers"], shared["BLOCK_N"]) == (1, 64)


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("alike", [True, False])
def test_more_to_do_never_takes_less_long(room, alike):
    draw = random.Random(room)
    for _ in range(2000):
        usual = draw.uniform(1, 60)
        longest = usual if alike else usual * draw.uniform(1, 40)
        tiles = draw.choice([draw.randint(1, 3 * SMS), draw.randint(1, 40 * SMS)])
        took = span_of(tiles, usual, longest, alike, SMS, room) * (1 - 1e-9)
        assert took <= span_of(tiles + draw.randint(1, SMS), usual, longest, alike, SMS, room)
        more = draw.uniform(1, 1.5)
        assert took <= span_of(tiles, usual * more, longest * more, alike, SMS, room)
        assert took <= span_of(tiles, usual, longest * (1 if alike else more), alike, SMS, room)
        exact = took * (1 + 1e-8)
        assert exact >= longest * (ALONE if room == 2 and tiles <= SMS else 1), "none of the longest tile is left out"
        assert exact * SMS >= tiles * usual, "and no SM does more than a block in the time of one"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_more_of_a_problem_never_takes_less_long(d, causal):
    base = {"hq": 8, "d": d, "causal": causal}
    for config in gluon_fa3.VARIANT.configs_for(attention(s=1000, sk=2000, **base)):
        for sizes in ({"b": range(1, 120, 7)}, {"s": range(64, 2001, 64)}):
            (name, values), known = *sizes.items(), {"s": 1000, "sk": 2000, **base}
            took = [dense_cost(attention(**{**known, name: value}), config) for value in values]
            assert causal or all(a <= b for a, b in itertools.pairwise(took)), (name, config)
            assert name != "b" or all(a <= b for a, b in itertools.pairwise(took)), (name, config)
        keys = [dense_cost(attention(s=512, sk=value, **base), config) for value in range(512, 9000, 256)]
        assert all(a <= b for a, b in itertools.pairwise(keys)), config


def test_a_far_longer_sequence_is_waited_for_alone():
    """Its tiles share SMs while others last. 132 tiles of it, and of the others ever more."""
    sizes = {"hq": SMS, "kv": "paged", "sq": 64, "sk": 65536, "t": 64}
    alone = packed_cost(packed(**sizes), SHARING)
    # As many others again, of a 32nd of the keys (with so few queries): beside the longest they cost it little.
    beside = packed_cost(packed(**{**sizes, "b": 2, "sq": 8, "t": 16}), SHARING)
    assert alone <= beside < 1.1 * alone
    many = [packed_cost(packed(**{**sizes, "b": b, "sq": 8, "t": 8 * b}), SHARING) for b in (2, 4, 16, 64, 256)]
    assert all(a <= b for a, b in itertools.pairwise(many))
    assert many[2] > 1.2 * alone, "but many take time from it"
    wide = [packed_cost(packed(**{**sizes, "b": b, "sq": 8, "t": 8 * b}), WIDER) for b in (1, 16)]
    assert wide[0] < alone, "where nothing else is left, wider blocks are done with it earlier"


def test_overlapped_tiles_pay_where_each_sm_has_many():
    few = packed(b=4, hq=8, sq=512, sk=512, causal=True)
    many = packed(b=64, hq=64, sq=2048, sk=2048, causal=True)
    assert first(varlen.VARIANT, few)["overlap"] is False
    assert first(varlen.VARIANT, many)["overlap"] is True


def test_lengths_that_nobody_knows_have_half_a_tile_empty():
    """129 queries are two tiles of 128 rows; in the mean over lengths about them they are one and a half."""
    exact = packed(b=64, hq=64, sq=129, sk=4096)
    assert packed_cost(exact, TWO_GROUPS) == packed_cost(packed(b=64, hq=64, sq=256, sk=4096), TWO_GROUPS)
    spread = {"b": 64, "hq": 64, "sk": 4096, "tk": 64 * 4096, "sq": 1024}
    took = [packed_cost(packed(t=1024 + 63 * mean, **spread), TWO_GROUPS) for mean in range(64, 400, 8)]
    assert all(a <= b for a, b in itertools.pairwise(took))
    steps = [b - a for a, b in itertools.pairwise(took)][8:]
    assert max(steps) < 1.01 * min(steps), "without steps where a mean passes a whole number of tiles"


@pytest.mark.parametrize("problem, cost", [(attention, dense_cost), (packed, packed_cost)], ids=["dense", "packed"])
def test_a_soft_cap_takes_time_in_both_guesses_most_with_several_groups(problem, cost):
    def longer(config):
        plain, capped = (cost(problem(hq=SMS, hkv=1, softcap=cap), config) for cap in (0.0, 30.0))
        return (capped - launch(config)) / (plain - launch(config))

    assert longer(SHARING) == pytest.approx(longer(WIDER))
    assert 1.2 < longer(WIDER) < longer(TWO_GROUPS) < 1.6


def test_every_config_is_guessed():
    dims = itertools.product((40, 64, 96, 128, 192, 256), (64, 128, 256))
    for (d, dv), causal, cap in itertools.product(dims, (False, True), (0.0, 30.0)):
        more = {"d": d, "dv": dv, "causal": causal, "softcap": cap, "hq": 8, "sk": 777}
        asked = [(gluon_fa3.VARIANT, attention(s=777, **more)), (varlen.VARIANT, packed(b=3, sq=777, **more))]
        for variant, one in asked:
            assert all(0 < variant.cost(one, config) < math.inf for config in variant.configs_for(one))
