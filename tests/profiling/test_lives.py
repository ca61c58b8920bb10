"""When buffers are in use: exact on a made-up ring, plausible on recorded launches, silent where marks contradict."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from registry import Target
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case
from registry.profiling import record
from registry.profiling.anatomy import Anatomy, Buffer, CodeStep, Role
from registry.profiling.figures import role_names
from registry.profiling.lives import lives, rings, uses
from registry.profiling.timeline import MEMORY, rows
from registry.profiling.trace import Trace, WarpSpan, read

RECORDED = Path(__file__).parent / "recorded"


def ring_of_two():
    """One reader, one producer and a ring of two slots; the reader lets go of a slot when its product is done."""
    barriers = {name: Buffer(name, "barriers", "2 barriers", 0, 16) for name in ("full", "empty")}
    barriers["empty"].arrivals = 1
    buffers = (Buffer("k", "tiles", "2 x 64 x 64", 0, 16384), *barriers.values())
    roles = (Role(0, 0, 4, None, multiplies=True), Role(1, 4, 1, None))
    reader = [
        *(CodeStep(0, "enter", "wait K"), CodeStep(0, "wait", "full"), CodeStep(0, "leave", "wait K")),
        *(CodeStep(0, "enter", "async QK"), CodeStep(0, "read", "k"), CodeStep(0, "leave", "async QK")),
        *(CodeStep(0, "arrive", "empty"), CodeStep(0, "enter", "softmax"), CodeStep(0, "leave", "softmax")),
    ]
    writer = [
        *(CodeStep(1, "enter", "wait slot"), CodeStep(1, "wait", "empty"), CodeStep(1, "leave", "wait slot")),
        CodeStep(1, "fill", "k", "full"),
    ]
    return Anatomy("k", 8, roles, buffers, 16384), (*reader, *writer)


def launch(count=8, period=1000):
    """Each use is found full at 0, let go of at 600 and by then waited for; the producer finds the slot at 650."""
    spans = []
    for i in range(count):
        at = i * period
        spans += [
            WarpSpan("k", 0, 0, 0, "wait K", at - 50, at),
            WarpSpan("k", 0, 0, 0, "async QK", at + 10, at + 600),
            WarpSpan("k", 0, 0, 0, "softmax", at + 610, at + 900),
            WarpSpan("k", 0, 0, 4, "wait slot", at + 100, at + 650),
        ]
    return spans


NAMES = {0: "consumer", 4: "producer"}


def test_a_ring_is_told_exactly():
    anatomy, steps = ring_of_two()
    (ring,) = rings(anatomy, steps)
    assert (ring.buffer, ring.stages, ring.filler, ring.full, ring.empty) == ("k", 2, 1, "full", "empty")
    found = lives(anatomy, steps, Trace(tuple(launch())), 0, NAMES)
    held = [one for one in found if one.what == "held"][1:-1]  # the window cuts the first and the last
    assert {round(one.end - one.begin) for one in held} == {600}
    assert [one.slot for one in held] == [1, 0, 1, 0, 1, 0], "counted from the last use, which is of the last slot"
    ahead = [one for one in found if one.what == "ahead"]
    assert {one.end - one.begin for one in ahead} == {1350}, "from when slot i was found empty until use i + 2"
    (use,) = uses(anatomy, steps, Trace(tuple(launch())), NAMES)
    assert use.slots == 2 and use.median_held == 600 and use.median_ahead == 1350
    assert 0.25 < use.held < 0.35 and 0 < use.in_use < 16384
    lanes = {row["lane"] for row in rows(Trace(tuple(launch())), 0, NAMES, memory=found)}
    assert {f"{MEMORY}k [0]", f"{MEMORY}k [1]"} <= lanes


def test_a_span_that_the_trace_lost_shifts_no_other():
    anatomy, steps = ring_of_two()
    spans = [span for span in launch() if not (span.name == "async QK" and span.begin == 4010)]
    found = [one for one in lives(anatomy, steps, Trace(tuple(spans)), 0, NAMES) if one.what == "held"]
    assert {round(one.end - one.begin) for one in found[1:-1]} == {600} and 4000 not in {one.begin for one in found}


def test_marks_that_contradict_each_other_tell_nothing_of_a_ring():
    """Let go of later than the slot is full again: then it is only said when it is read."""
    anatomy, steps = ring_of_two()
    slow = [WarpSpan("k", 0, 0, 0, s.name, s.begin, s.end + 2600) if s.name == "async QK" else s for s in launch(12)]
    found = lives(anatomy, steps, Trace(tuple(slow)), 0, NAMES)
    assert {one.what for one in found} <= {"read", "written"} and {one.slot for one in found} == {None}


def test_a_wait_that_is_not_marked_makes_no_ring():
    anatomy, steps = ring_of_two()
    unmarked = [step for step in steps if step.name != "wait K"]
    assert rings(anatomy, unmarked) == [] and rings(anatomy, ()) == []


@pytest.mark.slow(12)
@pytest.mark.parametrize(
    ("name", "variant", "shape", "config", "ring"),
    [
        ("gluon_fa3", "gluon_fa3", "b=4,hq=32,s=4096,d=64", {"consumers": 3}, "k"),
        ("gluon_matmul_ws", "gluon_matmul_ws", "m=4096,n=4096,k=4096", {"MODE": "coop", "BLOCK_N": 128}, "a_s"),
    ],
)
def test_recorded_launches_use_their_slots_in_turn(name, variant, shape, config, ring):
    variant = catalog.get().variants[variant]
    problem = Case.parse(variant.op, shape).problem(Target.named("H200"))
    legal = [one for one in variant.legal_configs(problem) if config.items() <= dict(one).items()]
    anatomy = record.anatomy(variant, problem, legal[0])
    steps = record.steps(variant, problem, legal[0], anatomy.kernel)
    if not steps:
        pytest.skip("this triton's marks cannot be compiled without a GPU")
    trace, roles = read(RECORDED / f"{name}.trace.json.gz"), role_names(anatomy.roles)
    by_name = {use.buffer: use for use in uses(anatomy, steps, trace, roles)}
    own = by_name[ring]
    assert own.slots > 1 and own.times > 20 and 0.2 < own.held < 0.9 and own.ahead + own.held <= 1
    for block in trace.blocks:
        found = [one for one in lives(anatomy, steps, trace, block, roles) if one.buffer == ring]
        for slot in range(own.slots):
            times = [(one.begin, one.end) for one in found if one.slot == slot]
            assert all(a[1] <= b[0] + 150 for a, b in zip(times, times[1:], strict=False)), "one use at a time"
