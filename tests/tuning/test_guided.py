"""A guided sweep: the same pick at a third of the measurements, on a recorded sweep and on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.parts.cases import Case
from registry.tuning import journal, worker
from registry.tuning.contestants import Contestant, LineUp, Selection
from registry.tuning.guided import Guidance, Guide
from registry.tuning.measure import Effort, Sweep

pytestmark = pytest.mark.usefixtures("quick_python")

ROOT = Path(__file__).parents[2]
FAKES = str(ROOT / "tests" / "support" / "tuning_fakes.py")
QUICK = Effort(rounds=2, settle_ms=0.5, measure_ms=1.0, check_timeout=20.0, turn_timeout=10.0, drop=1.1)


def load_replay():
    name = "guided_replay"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow(4)
def test_it_finds_the_picks_of_a_recorded_sweep_with_a_third_of_the_contestants():
    """The smallest of the H200's sweeps; docs/tuning.md has the others, by the same script."""
    results = journal.read(ROOT / "benchmarks" / "results" / "h200" / "older_attention_backward.jsonl")
    found = load_replay().replay(results, "attention_backward")
    print(found)
    assert found.tried <= found.contestants / 3 and found.mean < 0.01


def plans(shapes=6, configs=9):
    """Shapes on which config c of the one variant takes 1 + 0.2 |c - 4| times the least."""
    target = Target.named("H200")
    found = []
    for number in range(shapes):
        case = Case.of("attention", b=2, hq=4, s=512 * (number + 1), d=64)
        ones = tuple(Contestant("x.y", {"c": c + 1}, c == 0, "f") for c in range(configs))
        found.append(LineUp(case, case.problem(target), 1e12, ones, {}))
    return found


def run(guide, made, time=lambda place, one: (1 + 0.2 * abs(one.config["c"] - 4)) * 1.5):
    asked = [[] for _ in made]
    for looked in (lambda: range(len(made)), guide.worth_another_look):
        for place in looked():
            while (one := guide.next(place)) is not None:
                asked[place].append(one.config["c"])
                guide.tell(place, one.key, time(place, one))
    return asked


def test_what_one_shape_teaches_spares_the_others():
    made = plans()
    asked = run(Guide(made), made)
    total = sum(map(len, asked))
    assert all(asked) and total <= 0.33 * 6 * 9 + 1
    assert 4 in asked[-1] and len(asked[-1]) <= 3, "the best config is asked for first once it is known"


def test_nothing_is_asked_for_twice_and_a_share_of_one_asks_for_everything():
    made = plans(2)
    asked = run(Guide(made, Guidance(share=1.0, tolerance=0.0)), made)
    assert [sorted(one) for one in asked] == [list(range(1, 10))] * 2


def seen(config, stalled):
    from registry.tuning.observed import Observed

    return Observed("x.y", config, {"in flight": 0.9, "stalled": stalled, "others stalled": 0.5})


def test_configs_that_stand_still_alike_are_alike():
    """c=1 and c=9 are far apart by their values; recorded timelines bring them together, and c=2 away from c=1."""
    made = plans(1)
    recorded = (seen({"c": 1}, 0.1), seen({"c": 9}, 0.1), seen({"c": 2}, 0.8))

    def apart(guide, one, other):
        configs = guide.expected.configs
        weights = (torch.ones(held.shape[1], dtype=torch.float64) for held in (configs.sizes, configs.names))
        return float(configs.distance(*(torch.tensor([c - 1]) for c in (one, other)), *weights))

    import torch

    plain, told = Guide(made), Guide(made, Guidance(observed=recorded))
    assert apart(told, 1, 9) == pytest.approx(apart(plain, 1, 9)) and apart(told, 1, 2) > apart(plain, 1, 2) + 5
    assert apart(told, 5, 6) == pytest.approx(apart(plain, 5, 6)), "nobody recorded them: the variant's means for both"


def test_what_the_compiler_ran_out_of_registers_for_is_expected_to_be_slower():
    made = plans(1)
    guide = Guide(made)
    first = guide.next(0)
    guide.compiled(0, first.key, {"ok": True, "stack": 128})
    assert guide.next(0) != first, "another of the same expectation goes first"
    guide.compiled(0, guide.next(0).key, {"ok": False, "why": "does not compile"})


@pytest.mark.parametrize("text", ["", "[]", '{"timelines": [{}]}', '{"timelines": 7}'])
def test_figures_that_are_none_are_named(tmp_path, text):
    from registry.tuning import observed

    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InvalidArgument, match="t.json.*kreg profile --figures"):
        observed.read(tmp_path / "t.json")


def test_shares_are_shares(tmp_path):
    import json

    from registry.tuning import observed

    figures = {"any_in_flight": 1.5, "roles": []}
    (tmp_path / "t.json").write_text(
        json.dumps({"timelines": [{"variant": "v", "shape": "", "config": {}, "figures": figures}]})
    )
    with pytest.raises(InvalidArgument, match="shares from 0 to 1"):
        observed.read(tmp_path / "t.json")


def test_what_was_kept_back_goes_where_most_is_still_expected():
    """Late shapes show that config 9 is fast: the first ones, done long ago, are looked at again for it."""
    made = plans(8)
    time = lambda place, one: 0.5 if one.config["c"] == 9 else 1 + 0.05 * one.config["c"]  # noqa: E731
    guide, asked = Guide(made, Guidance(share=0.5)), []
    for looked in (lambda: range(8), guide.worth_another_look):
        asked.append([[] for _ in made])
        for place in looked():
            while (one := guide.next(place)) is not None:
                asked[-1][place].append(one.config["c"])
                guide.tell(place, one.key, time(place, one))
    once, again = asked
    assert not any(set(one) & set(other) for one, other in zip(once, again, strict=True))
    assert all(9 in one + other for one, other in zip(once, again, strict=True))
    assert sum(map(len, once + again)) <= 0.5 * 8 * 9 + 1


def test_the_second_look_goes_from_shape_to_shape_and_ends_where_nobody_asks():
    made = plans(8)
    guide, turns = Guide(made, Guidance(share=0.5)), []
    for place in range(8):
        while (one := guide.next(place)) is not None:
            guide.tell(place, one.key, 1.0 + 0.01 * one.config["c"] * (place + 1))
    for place in guide.worth_another_look():
        one = guide.next(place)
        assert one is not None, "what is yielded has something to ask for"
        guide.tell(place, one.key, 1.0 + 0.01 * one.config["c"] * (place + 1))
        turns.append(place)
    assert len(set(turns)) > 1 and guide._allowed < 1
    idle = Guide(made, Guidance(share=0.5))
    for place in range(8):
        idle.tell(place, idle.next(place).key, 1.0)
    assert set(idle.worth_another_look()) == set(range(8)), "each is offered, and that is the end"


def test_a_variant_that_was_given_up_on_early_is_tried_where_nobody_tried_it():
    """y.z was slow on the one long shape that tried it, so no short one expects anything of it."""
    target, entries = Target.named("H200"), [("x.y", c) for c in (1, 2, 3)] + [("y.z", c) for c in (1, 2, 3)]
    made = []
    for length in (65536, 49152, *(64 + 16 * n for n in range(10))):
        case = Case.of("attention", b=2, hq=4, s=length, d=64)
        ones = tuple(Contestant(name, {"c": c}, c == 1, "f") for name, c in entries)
        made.append(LineUp(case, case.problem(target), 1e12, ones, {}))
    guide = Guide(made, Guidance(share=0.4))
    for place, planned in enumerate(made):
        for one in planned.contestants:
            if one.variant == "x.y" or (place == 0 and one.first):
                guide.tell(place, one.key, 4.0 if one.variant == "y.z" else 1.0)
    guide._allowed, guide._left = 0.0, 5.0
    place = next(guide.worth_another_look())
    assert place >= 2 and guide.next(place).variant == "y.z"


def test_a_shape_that_surprises_is_looked_at_longer():
    made = plans(6)
    calm, odd = Guide(made), Guide(made)
    for guide in (calm, odd):
        for place in range(5):
            while (one := guide.next(place)) is not None:
                guide.tell(place, one.key, 1.5 + 0.3 * abs(one.config["c"] - 4))
        first = guide.next(5)
        guide.tell(5, first.key, 1.5 if guide is calm else 15.0)
    assert odd.expected._unsure(5) > calm.expected._unsure(5) + 0.5


def test_weights_are_learnt_from_what_was_measured():
    """Of two sizes that shapes differ in, the one that sets times apart gets the larger weight."""
    import torch

    from registry.tuning.expectation import FIRST, Expectation, Features

    shapes = Features.of([{"m": 2**m, "n": 2**n} for m in range(6) for n in range(6)])
    configs = Features.of([{"c": 2**c} for _ in range(36) for c in range(6)])
    place = torch.arange(36).repeat_interleave(6)
    variant, nothing = torch.zeros(216, dtype=torch.long), torch.zeros(216, dtype=torch.float64)
    found = Expectation(shapes, configs, variant, place, nothing, torch.zeros(216, 2, dtype=torch.float64))
    for row in range(216):
        m, c = int(place[row]) // 6, row % 6
        found.tell(row, 0.3 * (m % 2) + 0.1 * abs(c - m))
        if row == FIRST - 2:
            found.learn()
            assert found.learnt == 0, "too few yet"
    usual = found._split(found.weights)[1]
    found.learn()
    learnt = found._split(found.weights)[1]
    assert found.learnt == 216 and learnt[0] > 3 * learnt[1] and usual[0] == usual[1]


def test_it_descends_as_torch_does():
    import torch

    from registry.tuning.expectation import RATE, STEPS, lessened

    valley = lambda at: ((at - torch.tensor([1.0, -2.0, 0.1])) ** 2 * torch.tensor([1.0, 10.0, 0.1])).sum()  # noqa: E731
    theirs = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        valley(theirs).backward()
        optimizer.step()
    torch.testing.assert_close(lessened(valley, torch.zeros(3)), theirs.detach())


def test_a_contestant_that_fails_is_passed_over():
    made = plans(3)
    asked = run(Guide(made), made, lambda place, one: None if one.config["c"] == 4 else one.config["c"] * 1.0)
    assert all(asked)


def test_a_variant_that_fails_everywhere_is_soon_left_alone_and_has_no_share():
    """As a loop on the host is under a graph: to ask for it on each shape would leave nothing for the others."""
    target, made = Target.named("H200"), []
    for length in range(512, 512 * 13, 512):
        case = Case.of("attention", b=2, hq=4, s=length, d=64)
        ones = tuple(Contestant("x.y", {"c": c}, c == 1, "f") for c in range(1, 9))
        made.append(LineUp(case, case.problem(target), 1e12, (Contestant("y.z", {}, True, "f"), *ones), {}))
    guide, failed, timed = Guide(made), 0, 0
    for looked in (lambda: range(12), guide.worth_another_look):
        for place in looked():
            while (one := guide.next(place)) is not None:
                guide.tell(place, one.key, None if one.variant == "y.z" else 1.0 + 0.1 * one.config["c"])
                failed, timed = failed + (one.variant == "y.z"), timed + (one.variant == "x.y")
    assert failed <= 6 and 12 <= timed <= 0.33 * 12 * 8


def test_what_variants_guess_of_their_configs_is_expected(monkeypatch):
    """Against one another: a guess may be in any unit."""
    from registry.tuning import guided

    made = plans(1)
    monkeypatch.setattr(guided, "guess_of", lambda one, problem: 5.0 + abs(one.config["c"] - 7))
    assert Guide(made).next(0).config["c"] == 7
    monkeypatch.setattr(guided, "guess_of", lambda one, problem: 5.0)
    assert Guide(made).next(0).config["c"] == 1, "where it guesses nothing, those that it lists early"


def test_the_first_look_leaves_each_shape_its_part():
    """Shapes that keep promising spend what is kept for a second look at most."""
    import random

    made, draw = plans(10), random.Random(0)
    guide, counts = Guide(made), []
    for place in range(10):
        before = guide._left
        while (one := guide.next(place)) is not None:
            guide.tell(place, one.key, 4.0 ** draw.gauss(0.0, 1.0))
        counts.append(before - guide._left)
    assert min(counts) >= 2 and sum(counts) <= 0.33 * 10 * 9


def test_earlier_measurements_are_learnt_from():
    made = plans()
    target = made[0].problem.target
    entries = {
        one.key: journal.Entry(
            one.variant, one.config, one.first, "f", {0: {"ms": (1 + 0.2 * abs(one.config["c"] - 4)) * 1.5}}
        )
        for one in made[0].contestants
    }
    case = made[0].case
    known = journal.CaseResults("attention", case.text, case.data(), case.problem(target).facts(), 1e12, entries)
    asked = run(Guide(made[1:], Guidance(learnt=(known,))), made[1:])
    assert asked[0][0] in (3, 4, 5), "near the best, where a first shape begins with its first config"


def test_a_sweep_may_have_one_contestant():
    made = plans(2, configs=1)
    assert run(Guide(made), made) == [[1], [1]] and run(Guide([]), []) == []


def test_a_share_is_a_share():
    with pytest.raises(InvalidArgument, match="share"):
        Guidance(share=0)


@pytest.mark.slow(8)
def test_a_guided_sweep_measures_some_and_goes_on_where_it_was(tmp_path):
    path = tmp_path / "r.jsonl"
    cases = [Case.of("attention", hq=2, s=8 * (n + 1), d=8, dtype="float32", causal=True) for n in range(2)]
    with worker.child("cpu", plugins=[FAKES]) as child:
        sweep = lambda **more: Sweep(  # noqa: E731
            cases,
            path,
            device="cpu",
            effort=QUICK,
            selection=Selection(("fake.good", "torch_*")),
            plugins=[FAKES],
            child=child,
            **more,
        ).run()
        report = sweep(guidance=Guidance(share=0.5))
        results = journal.read(path)
        tried = [len(case.entries) for case in results.cases.values()]
        assert report.measured == 2 and all(case.timed for case in results.cases.values())
        assert 2 <= sum(tried) < 10 and not results.bad_lines
        assert sweep(guidance=Guidance(share=0.5)).turns == 0, "nothing is left to do"
        sweep()
        everything = journal.read(path)
        assert all(len(case.entries) == 5 for case in everything.cases.values()), "a full sweep measures the rest"


def test_what_tiles_make_of_a_product():
    """Rounds: whole tiles in whole rounds over the SMs, against the work shared out evenly; traffic: bytes per FLOP."""
    import math

    from registry.ops.parts.tiling import product_tiling

    target, tile = Target.named("H200"), {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    of = lambda products, **more: product_tiling(target, products, tile | more)  # noqa: E731
    ask = lambda sizes, **more: of({sizes: 1}, **more).rounds  # noqa: E731
    full = of({(128 * 132, 128, 4096): 1})
    assert full.rounds == pytest.approx(0.0) and full.traffic == pytest.approx(math.log(2 / 128))
    assert ask((128 * 133, 128, 4096)) == pytest.approx(math.log(2 * 132 / 133)), "one tile too many: two rounds"
    assert ask((1, 128, 4096)) > ask((128, 128, 4096)), "rows of a tile that no product has"
    assert ask((128, 128, 4096), SPLIT=4) == ask((128, 128, 4096), SPLIT_K=4, SPLIT=2)
    assert ask((128, 128, 4096)) - ask((128, 128, 4096), SPLIT=4) == pytest.approx(math.log(4))
    assert ask((1, 4096, 64), SWAP=True) == ask((4096, 1, 64))
    assert of({(64, 4096, 64): 64}).rounds > ask((4096, 4096, 64)), "each group begins new tiles"
    assert of({(128, 128, 64): 1, (128, 128, 6400): 1}).rounds == pytest.approx(math.log(132 * 6400 / 6464)), "the long"
    assert product_tiling(target, {(1, 1, 1): 1}, {"num_warps": 4}) is None


def test_groups_are_as_long_as_their_shape_says():
    """No problem knows it, for it is on the device; a guide does, and takes shapes that differ in it for different."""
    from registry.ops.known import op_named

    of = op_named("grouped_mm").tuning.products
    target = Target.named("H200")

    def lineup(**shape):
        case = Case.of("grouped_mm", e=6, m=600, n=256, k=128, **shape)
        return LineUp(case, case.problem(target), 1e9, (Contestant("x.y", {"c": 1}, True, "f"),), {})

    even, empty = lineup(), lineup(spread="empty")
    assert of(even.problem, {"spread": "even"}) == {(100, 256, 128): 6}
    some = of(empty.problem, {"spread": "empty"})
    assert sum(some.values()) == 2 and sum(m * count for (m, _, _), count in some.items()) == 600
    inner = lineup(form="inner", layout="tn", spread="one")
    assert of(inner.problem, {"spread": "one"}) == {(600, 256, 0): 5, (600, 256, 128): 1}
    expected = Guide([even, empty, lineup()]).expected
    assert expected.alike([0], [2]) == 1.0 and expected.alike([0], [1]) < 1.0


def test_of_configs_that_nobody_tried_the_one_whose_tiles_fit_goes_first():
    case = Case.of("matmul", m=128 * 132, n=128, k=4096)
    target = Target.named("H200")
    sizes = [{"BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_K": 64} for rows in (256, 192, 128)]
    ones = tuple(Contestant(f"x.v{place}", config, True, "f") for place, config in enumerate(sizes))
    guide = Guide([LineUp(case, case.problem(target), 1e12, ones, {})])
    assert guide.next(0).config["BLOCK_M"] == 128
