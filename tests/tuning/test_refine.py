"""Measuring between neighbours that disagree: a border is closed in on, and what is no border is left alone."""

from pathlib import Path

import pytest
from test_tuning_fit import one, results_of

from registry import Target
from registry.ops.parts.cases import Case
from registry.tuning import journal, refine
from registry.tuning.measure import Effort, SweepReport

H200 = Target.named("H200")
BORDER = 700


def products(sizes, **more):
    return [Case.of("matmul", m=m, n=4096, k=4096, **more) for m in sizes]


def times(facts):
    """One is the fastest up to a border, the other from there."""
    few = facts["m"] < BORDER
    return {one("a"): 1.0 if few else 1.3, one("b"): 1.3 if few else 1.0}


def refined(cases, times, budget=None):
    """What `kreg tune --refine` comes to measure, were it run on these made-up times."""
    measured = []

    def sweep(cases, effort):
        measured.append([case.text for case in cases])
        known.extend(cases)
        return SweepReport(
            Path("made-up.jsonl"), measured=len(cases), stopped="spent" if budget == len(measured) else ""
        )

    known: list[Case] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "read", lambda path: results_of(known, times))
        report = refine.refined(sweep, cases, Effort())
    assert report.measured == sum(map(len, measured))
    return known, measured


def test_a_border_is_closed_in_on():
    known, passes = refined(products((64, 512, 4096)), times)
    sizes = sorted(case.sizes["m"] for case in known)
    below, above = max(m for m in sizes if m < BORDER), min(m for m in sizes if m >= BORDER)
    assert above / below <= refine.CLOSE
    assert len(known) < 3 + 9, "and little else is measured"
    assert refine.between(results_of(known, times).of("matmul"), H200) == []


def test_what_is_nearest_to_a_border_comes_where_it_costs_most():
    cases = [*products((64, 4096)), *products((64, 4096), layout="nt")]

    def worse_when_turned(facts):
        return {key: ms**2 if facts["layout"] == "nt" else ms for key, ms in times(facts).items()}

    first, *_ = refine.between(results_of(cases, worse_when_turned).of("matmul"), H200)
    assert first == Case.of("matmul", m=512, n=4096, k=4096, layout="nt")


@pytest.mark.parametrize(
    "times",
    [
        lambda facts: {one("a"): 1.0, one("b"): 2.0},
        lambda facts: {one("a"): 1.0, one("b"): 1.01 if facts["m"] < BORDER else 0.99},
        lambda facts: {one("a"): 1.0} if facts["m"] < BORDER else {one("b"): 1.0},
    ],
    ids=["one winner", "a tie", "nothing to compare"],
)
def test_what_is_no_border(times):
    assert refine.between(results_of(products((64, 512, 4096)), times).of("matmul"), H200) == []


def test_it_ends_with_the_budget():
    _, passes = refined(products((64, 512, 4096)), times, budget=2)
    assert len(passes) == 2


def test_it_ends_where_half_ways_leave_no_results():
    """Nothing may run there, say."""
    cases, measured = products((64, 4096)), []

    def sweep(cases, effort):
        measured.append([case.text for case in cases])
        assert len(measured) < 9
        return SweepReport(Path("made-up.jsonl"), nobody=[case.text for case in cases[:1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "read", lambda path: results_of(cases, times))
        report = refine.refined(sweep, cases, Effort())
    assert len(measured) == 2 and len(report.nobody) == 2


def test_half_way_is_a_shape_that_exists():
    """Heads and masks are those of one of the two; a window that lists came back from a file is a window."""
    cases = [Case.of("attention", b=1, hq=8, hkv=h, s=s, d=128, window=(64, 0)) for s, h in ((256, 8), (4096, 2))]
    by_heads = lambda f: {one("a"): 1.0 + (f["heads_kv"] == 2), one("b"): 1.0 + (f["heads_kv"] == 8)}  # noqa: E731
    found = refine.between(results_of(cases, by_heads).of("attention"), H200)
    assert sorted(case.text for case in found) == sorted(
        Case.of("attention", b=1, hq=8, hkv=h, s=1024, d=128, window=(64, 0)).text for h in (8, 2)
    )
