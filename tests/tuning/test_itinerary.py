"""Where a guided sweep goes while compilers are busy: with a clock, compilers and a GPU that are none."""

from __future__ import annotations

import heapq
import json
import random

import pytest

from registry.contract.target import Target
from registry.ops.parts.cases import Case
from registry.tuning import journal, measure
from registry.tuning.contestants import Contestant, LineUp, Selection
from registry.tuning.guided import Guidance, Guide
from registry.tuning.machine import target_data
from registry.tuning.measure import Effort, Sweep

LOAD_S, CHECK_S, TURN_S = 0.1, 0.05, 0.03


class Clock:
    now = 0.0


class Compilers:
    """As CompilePool: of each contestant it says when one of its processes has compiled it."""

    def __init__(self, clock, seconds, count):
        self.clock, self.seconds, self.count = clock, seconds, count
        self.free = [5.0] * count  # they start
        self.queue, self.done, self.waited = [], {}, 0.0
        self.heard = set()

    def submit(self, commands):
        self.queue += commands

    def first(self, keys):
        self._until(self.clock.now)
        ahead = [key for key in dict.fromkeys(keys) if key in self.queue]
        self.queue = ahead + [key for key in self.queue if key not in ahead]

    def _until(self, now):
        """Take what was begun by now."""
        while self.queue and self.free[0] <= now:
            begun = heapq.heappop(self.free)
            key = self.queue.pop(0)
            self.done[key] = begun + self.seconds(key)
            heapq.heappush(self.free, self.done[key])

    def ready(self, key):
        self._until(self.clock.now)
        return key not in self.queue and self.done.get(key, 0.0) <= self.clock.now

    def wait(self, keys, timeout):
        begun = self.clock.now
        while not any(map(self.ready, keys)) and self.clock.now < begun + timeout:
            later = [at for at in (*self.done.values(), *self.free) if at > self.clock.now]
            self.clock.now = min(*later, begun + timeout)
        self.waited += self.clock.now - begun

    def news(self):
        fresh = {key for key, at in self.done.items() if at <= self.clock.now} - self.heard
        self.heard |= fresh
        return {key: self.answer(key) for key in fresh}

    def result(self, key, timeout):
        self.wait([key], timeout)
        return self.answer(key) if key in self.done else None

    def answer(self, key):
        return {"ok": True, "seconds": 1.0, "stack": 0}

    def stop(self):
        self.not_begun = len(self.queue)


class Device:
    """As the worker's Child: takes its time by the clock, and a config's time is some smooth function of it."""

    running = True

    def __init__(self, clock):
        self.clock, self.loads = clock, 0
        self.welcome = {"target": target_data(Target.named("H200")), "machine": {"device": "H200"}}

    def start(self):
        pass

    def stop(self):
        pass

    def ask(self, command, timeout):
        did = command["do"]
        self.clock.now += {"declared": 0.0, "limits": 1.0, "case": LOAD_S, "check": CHECK_S, "time": TURN_S}[did]
        if did == "case":
            self.loads += 1
            self.load = random.Random(str(command["case"])).random()
        if did == "time":
            by = [random.Random(text).random() for text in (command["variant"], str(command["config"]))]
            ms = (1.0 + self.load) * (1.0 + 0.5 * by[0] + 0.05 * by[1])
            return {"ok": True, "ms": ms, "low": ms, "high": ms, "n": 9}
        return {"ok": True, "errors": {}, "first_s": 0.01} if did == "check" else {"ok": True, "limits": {}}


SHAPES = [
    Case.of("matmul", m=m, n=n, k=k, layout="nt")
    for m, n, k in ((17, 4096, 4096), (300, 8192, 2048), (1461, 7168, 5120), (4000, 4096, 1024), (8192, 3072, 8192))
    for m, n, k in ((m, n, k), (2 * m, n, k + 64))
]


def swept(path, monkeypatch, seconds, processes, guidance=None, effort=None):
    clock = Clock()
    compilers, device = Compilers(clock, seconds, processes), Device(clock)
    monkeypatch.setattr(measure, "CompilePool", lambda *_: compilers)
    selection = Selection(max_configs=4)
    more = {"selection": selection, "child": device, "guidance": guidance, "now": lambda: clock.now}
    report = Sweep(SHAPES, path, effort=effort or Effort(rounds=3), **more).run()
    print(
        f"{path.stem}: {clock.now:.1f} s, {compilers.waited:.1f} of them for compilers, {report.turns} turns, "
        f"{device.loads} loads, {compilers.not_begun} not begun to compile"
    )
    return clock.now, report, journal.read(path)


def spread(low, high):
    """Contestants take between so many seconds, each its own."""
    return lambda key: low + (high - low) * random.Random(str(key)).random()


@pytest.mark.parametrize(
    "seconds, processes",
    [(spread(1, 8), 14), (spread(1, 8), 3), (spread(0.2, 1), 14), (spread(0.2, 1), 1), (spread(0.001, 0.01), 14)],
    ids=["slow, 14", "slow, 3", "quick, 14", "quick, 1", "compiled before"],
)
def test_a_guided_sweep_takes_no_longer_than_a_full_one(tmp_path, monkeypatch, seconds, processes):
    full, of_all, every = swept(tmp_path / "full.jsonl", monkeypatch, seconds, processes)
    guided, report, some = swept(tmp_path / "guided.jsonl", monkeypatch, seconds, processes, Guidance())
    for one in (of_all, report):
        assert not one.unreached and one.measured == len(SHAPES) and not one.stopped
    count = lambda held: sum(len(case.timed) for case in held.cases.values())  # noqa: E731
    assert 0.2 * count(every) < count(some) <= 0.34 * count(every)
    assert guided <= full


def test_the_second_look_measures_something(tmp_path, monkeypatch):
    """Also where compilers are slow: shapes that were complete are loaded again, and are complete again."""
    path = tmp_path / "r.jsonl"
    swept(path, monkeypatch, spread(1, 8), 3, Guidance(tolerance=0.02))  # the first look leaves some of the share
    done, again = set(), 0
    for record in map(json.loads, path.read_text().splitlines()):
        done |= {record["case"]} if record["kind"] == "done" else set()
        again += record["kind"] == "check" and record["case"] in done
    assert again > 3 and all(case.done for case in journal.read(path).cases.values())


def test_a_budget_ends_a_guided_sweep_and_the_next_goes_on(tmp_path, monkeypatch):
    path, quick = tmp_path / "r.jsonl", spread(0.2, 1)
    took, report, held = swept(path, monkeypatch, quick, 3, Guidance(), Effort(rounds=3, budget_s=12.0))
    assert report.stopped and 0 < len(report.unreached) < len(SHAPES) and took < 13
    assert sum(case.done for case in held.cases.values()) == report.measured == len(SHAPES) - len(report.unreached)
    _, report, held = swept(path, monkeypatch, quick, 3, Guidance())
    assert not report.stopped and len(held.cases) == len(SHAPES) and all(case.done for case in held.cases.values())


def test_what_does_not_compile_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(Compilers, "answer", lambda self, key: {"ok": int(key[1], 16) % 2 == 0, "why": "does not fit"})
    _, report, held = swept(tmp_path / "r.jsonl", monkeypatch, spread(0.2, 1), 3, Guidance())
    assert report.failed and not report.unreached and all(case.timed for case in held.cases.values())


def test_elsewhere_is_measured_while_compilers_are_busy():
    """What is there goes ahead of what is expected to bring more, if not by much; where all wait, it is said so."""
    ones = tuple(Contestant("x.y", {"c": c}, c == 1, "f") for c in range(1, 10))
    cases = [Case.of("attention", b=2, hq=4, s=512 * n, d=64) for n in (1, 2, 3)]
    made = [LineUp(case, case.problem(Target.named("H200")), 1e12, ones, {}) for case in cases]
    guide = Guide(made, Guidance(share=0.8))
    for place in range(3):
        guide.tell(place, ones[0].key, 1.0 + 0.1 * place)
    first = guide.next(0)
    guide.ready = lambda place, one: one != first
    second = guide.next(0)
    assert second != first, "another that may be as good"
    guide.ready = lambda place, one: False
    assert guide.next(0) == first, "nothing is there: this is what to wait for"
    looked = guide.worth_another_look()
    offered = []
    while (place := next(looked)) is not None:
        offered.append(place)
        guide.waits[place] = first
    assert sorted(set(offered)) == [0, 1, 2], "each is offered before the compilers are waited for"
    assert guide.waits and next(looked) in offered and not guide.waits, "asked anew: nobody waits for what is there"
