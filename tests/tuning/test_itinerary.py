"""Where a guided sweep goes while compilers are busy: with a clock, compilers and a GPU that are none."""

from __future__ import annotations

import heapq
import random

import pytest

from registry.contract.target import Target
from registry.ops.parts.cases import Case
from registry.tuning import journal, measure
from registry.tuning.contestants import Selection
from registry.tuning.guided import Guidance
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
        while not any(map(self.ready, keys)):
            later = [at for at in (*self.done.values(), *self.free) if at > self.clock.now]
            self.clock.now = min(later)
        self.waited += self.clock.now - begun

    def news(self):
        fresh = {key for key, at in self.done.items() if at <= self.clock.now} - self.heard
        self.heard |= fresh
        return {key: {"ok": True, "stack": 0} for key in fresh}

    def result(self, key, timeout):
        self.wait([key], timeout)
        return {"ok": True, "seconds": 1.0} if key in self.done else None

    def stop(self):
        self.at_the_end = len(self.queue)


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
        self.clock.now += {"limits": 1.0, "case": LOAD_S, "check": CHECK_S, "time": TURN_S}[did]
        if did == "case":
            self.loads += 1
            self.load = random.Random(str(command["case"])).random()
        if did == "time":
            ms = 1.0 + self.load + 0.3 * random.Random(command["variant"] + str(command["config"])).random()
            return {"ok": True, "ms": ms, "low": ms, "high": ms, "n": 9}
        return {"ok": True, "errors": {}, "first_s": 0.01} if did == "check" else {"ok": True, "limits": {}}


SHAPES = [
    Case.of("matmul", m=m, n=n, k=k, layout="nt")
    for m, n, k in ((17, 4096, 4096), (300, 8192, 2048), (1461, 7168, 5120), (4000, 4096, 1024), (8192, 3072, 8192))
    for m, n, k in ((m, n, k), (2 * m, n, k + 64))
]


def swept(tmp_path, monkeypatch, seconds, processes, guidance):
    clock, name = Clock(), "guided" if guidance else "full"
    compilers, device = Compilers(clock, seconds, processes), Device(clock)
    monkeypatch.setattr(measure, "CompilePool", lambda *_: compilers)
    sweep = Sweep(
        SHAPES,
        tmp_path / f"{name}.jsonl",
        effort=Effort(rounds=3),
        selection=Selection(max_configs=4),
        child=device,
        guidance=guidance,
        now=lambda: clock.now,
    )
    sweep.synced = float("inf")
    report = sweep.run()
    assert not report.unreached and report.measured == len(SHAPES) and not report.stopped
    print(
        f"{name}: {clock.now:.1f} s, {compilers.waited:.1f} of them for compilers, {report.turns} turns, "
        f"{device.loads} loads, {compilers.at_the_end} not begun to compile"
    )
    return clock.now, compilers, journal.read(report.path)


def spread(low, high):
    """Contestants take between so many seconds, each its own."""
    return lambda key: low + (high - low) * random.Random(str(key)).random()


@pytest.mark.parametrize(
    "seconds, processes",
    [(spread(1, 8), 14), (spread(1, 8), 3), (spread(0.2, 1), 14), (spread(0.2, 1), 1), (spread(0.001, 0.01), 14)],
    ids=["slow, 14", "slow, 3", "quick, 14", "quick, 1", "compiled before"],
)
def test_a_guided_sweep_takes_no_longer_than_a_full_one(tmp_path, monkeypatch, seconds, processes):
    full, _, every = swept(tmp_path, monkeypatch, seconds, processes, None)
    guided, _, some = swept(tmp_path, monkeypatch, seconds, processes, Guidance())
    count = lambda held: sum(len(case.timed) for case in held.cases.values())  # noqa: E731
    assert guided <= full
    assert 0.2 * count(every) < count(some) <= 0.34 * count(every)
