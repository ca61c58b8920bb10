"""Clocks: how long one launch takes on the device that runs it. One `sample` is one turn of one contestant in a round.

On a GPU every launch stands between two events, the L2 cache is flushed before it, and the host is kept ahead of the
device by work queued in front, so that a short kernel is not timed as the gap between two launches. `GraphTimer` times
replays of a graph of launches over rotated inputs instead: no host at all. `QueueTimer` needs no graph for that: it is
for programs at work. On a CPU the wall clock is enough.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Launches = Sequence[Callable[[], Any]]
"""The same launch over one or more sets of inputs."""


@dataclass(frozen=True)
class Timing:
    """One turn: the median, the 20th and 80th percentile of `launches` timed launches, in milliseconds."""

    ms: float
    low: float
    high: float
    launches: int
    state: dict[str, Any] = field(default_factory=dict)
    """Clocks and throttling as they were while it ran."""


class Timer(Protocol):
    """A clock that contestants take turns at."""

    def sample(self, launches: Launches, settle_ms: float, measure_ms: float) -> Timing: ...


def turn_order(contestants: Iterable[T], *seed: object) -> list[T]:
    """The order of one round, so that heat and power favour nobody; the same for the same seed."""
    waiting = list(contestants)
    return random.Random("/".join(map(str, seed))).sample(waiting, len(waiting))


def summary(times: Sequence[float], state: dict[str, Any] | None = None) -> Timing:
    """Median and spread of single times."""
    ordered = sorted(times)
    return Timing(quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered), state or {})


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:  # the difference of what is endless is no number
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class StandingClock:
    """A clock that stands still until a measured time is added: for tools that time a function themselves."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class WallTimer:
    """The host's clock, for devices that run a launch before it returns. `clock` gives nanoseconds."""

    MOST = 1000
    """Launches of a turn."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock

    def sample(self, launches: Launches, settle_ms: float, measure_ms: float) -> Timing:
        launch = launches[0]
        first = self._once(launch)
        for _ in range(_repeats(settle_ms - first, first, self.MOST) if settle_ms > first else 0):
            launch()
        return summary([self._once(launch) for _ in range(_repeats(measure_ms, first, self.MOST))])

    def _once(self, launch: Callable[[], Any]) -> float:
        start = self.clock()
        launch()
        return (self.clock() - start) / 1e6


class QueueTimer:
    """CUDA events around a row of launches over rotated inputs, which the host queues while the device waits: no graph,
    and next to no memory. What is in the L2 cache is what rotating the inputs leaves there."""

    MEMORY_BYTES = 160 << 20
    """How much the rotated inputs should fill: three times the largest L2 cache there is, and some."""
    AHEAD_MS = 0.02
    """Host time of one launch that the queue is filled for, at least; measured per contestant."""
    MOST = 200
    """Launches of a turn."""
    LONG_MS = 2.0
    """A launch so long is estimated from one."""

    def __init__(self, telemetry: Callable[[], dict[str, Any]] | None = None) -> None:
        import torch

        self._torch = torch
        self._telemetry = telemetry or dict
        self._cycles_per_ms = self._measure_spin()
        self._estimates: dict[int, tuple[Launches, float, float]] = {}

    def sample(self, launches: Launches, settle_ms: float, measure_ms: float) -> Timing:
        each, host = self._known(launches)
        for _ in range(_repeats(settle_ms, max(each, host), self.MOST) if settle_ms else 0):
            launches[0]()
        count = max(2, _repeats(measure_ms, each, self.MOST))
        start, end = self._event(), self._event()
        self._run_ahead(count * host, each)
        start.record()
        for turn in range(count):
            launches[turn % len(launches)]()
        end.record()
        state = self._telemetry()
        end.synchronize()
        return summary([start.elapsed_time(end) / count], state)

    def _known(self, launches: Launches) -> tuple[float, float]:
        """The estimate of a contestant's first turn, which holds for all of its turns."""
        held = self._estimates.get(id(launches))
        if held is None or held[0] is not launches:
            launches[0]()  # may compile
            each, host = self._estimate(launches[0], 1)
            if each < self.LONG_MS:
                each, host = self._estimate(launches[0], 3)
            held = self._estimates[id(launches)] = (launches, each, host)
        return held[1], held[2]

    def _estimate(self, launch: Callable[[], Any], times: int) -> tuple[float, float]:
        """(device, host) milliseconds of a launch, roughly."""
        start, end = self._event(), self._event()
        self._torch.cuda.synchronize()
        begun = time.perf_counter()
        start.record()
        for _ in range(times):
            launch()
        host = (time.perf_counter() - begun) * 1e3 / times
        end.record()
        self._torch.cuda.synchronize()
        return start.elapsed_time(end) / times, max(host + 2 * self.AHEAD_MS / 3, self.AHEAD_MS)

    def forget(self) -> None:
        """Drop the launches of a case and the memory that they hold."""
        self._estimates.clear()

    def _run_ahead(self, host_ms: float, each_ms: float) -> None:
        """Keep the device waiting while the host queues, where launches are so short that it would not get ahead."""
        if each_ms < 1.0:
            self._torch.cuda._sleep(int(min(host_ms * 1.3, 100.0) * self._cycles_per_ms))

    def _measure_spin(self) -> float:
        cycles = 2_000_000
        self._torch.cuda._sleep(cycles)
        start, end = self._event(), self._event()
        start.record()
        self._torch.cuda._sleep(cycles)
        end.record()
        self._torch.cuda.synchronize()
        return float(cycles / start.elapsed_time(end))

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)


class CudaTimer(QueueTimer):
    """CUDA events around each launch, with the L2 cache flushed before it. `telemetry` (see registry.tuning.machine) is
    read while the device is busy."""

    MEMORY_BYTES = 0
    FLUSH_BYTES = 256 << 20

    def __init__(self, telemetry: Callable[[], dict[str, Any]] | None = None) -> None:
        super().__init__(telemetry)
        cuda = self._torch.cuda
        flush = 2 * getattr(cuda.get_device_properties(cuda.current_device()), "L2_cache_size", 0)
        self._cache = self._torch.empty(max(flush, self.FLUSH_BYTES), dtype=self._torch.uint8, device="cuda")

    def sample(self, launches: Launches, settle_ms: float, measure_ms: float) -> Timing:
        each, host = self._known(launches)
        for _ in range(_repeats(settle_ms, max(each, host), self.MOST)):
            launches[0]()
        count = max(3, _repeats(measure_ms, each + 0.1, self.MOST))
        pairs = [(self._event(), self._event()) for _ in range(count)]
        self._run_ahead(count * host, each)
        for turn, (start, end) in enumerate(pairs):
            self._cache.zero_()
            start.record()
            launches[turn % len(launches)]()
            end.record()
        state = self._telemetry()
        self._torch.cuda.synchronize()
        return summary([start.elapsed_time(end) for start, end in pairs], state)


class GraphTimer:
    """Replays of one CUDA graph of many launches. What is in the L2 cache is what rotating the inputs leaves there."""

    MEMORY_BYTES = QueueTimer.MEMORY_BYTES
    LAUNCHES = 64
    """Of a graph, at most."""
    SPAN_MS = 0.5
    """How long a graph of short launches should take, so that its own start is nothing beside it."""
    LONG_MS, HEAT_MS = 0.1, 60.0
    """Launches so long make a card slower by up to 15% within tens of milliseconds: they run before the first turn, so
    that all turns are as training is, at the limit of its power."""

    def __init__(self, telemetry: Callable[[], dict[str, Any]] | None = None, most: int = 50) -> None:
        import torch

        self._torch = torch
        self._telemetry = telemetry or dict
        self._most = most
        self._graphs: dict[int, tuple[Launches, Any, int]] = {}
        self._heated = False

    def sample(self, launches: Launches, settle_ms: float, measure_ms: float) -> Timing:
        graph, count = self._graph(launches)
        each = self._time(graph.replay)
        if not self._heated and each > count * self.LONG_MS:
            settle_ms, self._heated = max(settle_ms, self.HEAT_MS), True
        for _ in range(_repeats(settle_ms, each, self._most)):
            graph.replay()
        rounds = max(3, _repeats(measure_ms, each, self._most))
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        state = self._telemetry()
        self._torch.cuda.synchronize()
        times = [a.elapsed_time(b) / count for a, b in zip(events, events[1:], strict=False)]
        return summary(times, state)

    def _graph(self, launches: Launches) -> tuple[Any, int]:
        held = self._graphs.get(id(launches))
        if held is not None and held[0] is launches:
            return held[1], held[2]
        side = self._torch.cuda.Stream()
        side.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(side):
            for launch in launches:
                launch()
            count = self._count(launches)
        self._torch.cuda.current_stream().wait_stream(side)
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for turn in range(count):
                launches[turn % len(launches)]()
        graph.replay()
        self._torch.cuda.synchronize()
        self._graphs[id(launches)] = (launches, graph, count)
        return graph, count

    def _count(self, launches: Launches) -> int:
        """How many launches a graph holds: every set of inputs, and as many as fill SPAN_MS where they are short."""
        each = self._time(launches[0]) if len(launches) < self.LAUNCHES else 0.0
        return max(len(launches), min(self.LAUNCHES, int(self.SPAN_MS / max(each, 1e-3))))

    def _time(self, run: Callable[[], Any]) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        self._torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    def forget(self) -> None:
        """Drop the graphs of a case and the memory that they hold."""
        self._graphs.clear()
        self._heated = False


def _repeats(budget_ms: float, each_ms: float, most: int) -> int:
    """How often something of that length fits into a time."""
    return max(1, min(most, int(budget_ms / max(each_ms, 1e-4))))


def timer_for(device: str, mode: str, telemetry: Callable[[], dict[str, Any]] | None = None) -> Timer:
    """The clock of a device ("cuda" or "cpu") in a mode ("events" or "graph")."""
    if device == "cpu":
        return WallTimer()
    return GraphTimer(telemetry) if mode == "graph" else CudaTimer(telemetry)
