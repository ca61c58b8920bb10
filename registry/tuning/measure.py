"""The sweep: for every case, gate every contestant, then time the survivors in shuffled rounds, and keep every turn.

All contestants of a case take one turn a round, in an order shuffled anew, so that heat and power favour nobody.
Each turn is in the journal before the next one begins, and a sweep that was stopped goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from registry.contract.target import Target
from registry.notices import both_ends
from registry.ops.parts.cases import Case
from registry.toolbox.compile_pool import HIDE_GPU, Child, CompilePool, WorkerDied
from registry.tuning import journal as journals
from registry.tuning import worker
from registry.tuning.answering import who_answers
from registry.tuning.contestants import Contestant, LineUp, Selection, compile_commands, line_up
from registry.tuning.extra import load_plugins
from registry.tuning.fit import check_number
from registry.tuning.guided import Guidance
from registry.tuning.itinerary import Itinerary, Visit, guide_for
from registry.tuning.journal import CaseResults, Journal
from registry.tuning.machine import target_from
from registry.tuning.timing import turn_order
from registry.tuning.watching import Watcher

LEAST_DROP = 1.05
"""Who is within this factor of the best stays to the end: single rounds differ by so much."""
SYNC_EVERY_S = 1.0
"""How much a machine that loses its power may lose."""


@dataclass(frozen=True)
class Effort:
    """How much time each measurement gets."""

    rounds: int = 7
    least_rounds: int = 3
    settle_ms: float = 10.0
    measure_ms: float = 25.0
    drop: float = 1.6
    """After the first round, contestants slower than the best by this factor take no further part. Each round after it
    halves what is allowed, down to `least_drop`: turns go to those between whom they can still decide."""
    least_drop: float = LEAST_DROP
    """More where the card comes to its limit of power within a shape: there single rounds differ by 10%."""
    budget_s: float | None = None
    check_timeout: float = 120.0
    turn_timeout: float = 30.0
    case_timeout: float = 180.0

    def __post_init__(self) -> None:
        for name in ("rounds", "least_rounds", "drop", "least_drop"):
            check_number(name, getattr(self, name), 1, 1e6)
        for name in ("settle_ms", "budget_s"):
            check_number(name, getattr(self, name) or 0.0, 0, 1e9)
        for name in ("measure_ms", "check_timeout", "turn_timeout", "case_timeout"):
            check_number(name, getattr(self, name), 1e-6, 1e9)


@dataclass
class SweepReport:
    """What became of a sweep."""

    path: Path
    measured: int = 0
    turns: int = 0
    failed: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    """Shapes not measured, or not to the end. What was measured of them is kept."""
    nobody: list[str] = field(default_factory=list)
    """Shapes that no variant taken part may run, with the reasons."""
    silent: list[str] = field(default_factory=list)
    """Variants whose declarations hung, or ended the process that asked."""
    restarts: int = 0
    pruned: int = 0
    stopped: str = ""

    def and_then(self, other: SweepReport) -> SweepReport:
        """Of two sweeps into one file, one after the other."""
        added = {name: getattr(self, name) + getattr(other, name) for name in _COUNTED}
        return replace(other, **added)


_COUNTED = ("measured", "turns", "failed", "unreached", "nobody", "silent", "restarts", "pruned")


class Sweep:
    """One run over some cases on one device."""

    def __init__(
        self,
        cases: Sequence[Case],
        path: Path,
        *,
        device: str = "cuda",
        mode: str = "events",
        effort: Effort | None = None,
        selection: Selection | None = None,
        plugins: Sequence[str] = (),
        watcher: Watcher | None = None,
        child: Child | None = None,
        compile_processes: int | None = None,
        retry_failed: bool = False,
        guidance: Guidance | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cases = list(cases)
        self.effort = effort or Effort()
        self.selection = selection or Selection()
        self.watcher = watcher or Watcher()
        self.own_child = child is None
        self.child = child or worker.child(device, mode, plugins)
        self.mode, self.plugins = mode, plugins
        self.guidance = guidance
        """Measure what a model of the measurements so far expects something of, instead of everything."""
        self.processes, self.retry_failed, self.now = compile_processes, retry_failed, now
        self.report = SweepReport(path)
        self.synced = 0.0
        self.loaded: str | None = None
        self.launched: set[str] = set()
        """Contestants that were launched in the worker that runs now, so that nothing is left to compile."""
        self.refused: dict[str, Any] | None = None
        self.deadline = None if self.effort.budget_s is None else now() + self.effort.budget_s

    def run(self) -> SweepReport:
        """Measure what is not measured yet. Stopping it, at any time and in any way, keeps what was measured."""
        self.held = journals.read(self.report.path)
        with self._child_for_now(), Journal(self.report.path) as self.journal:
            load_plugins(self.plugins)
            self.child.start()
            target = target_from(self.child.welcome["target"])
            header = {"format": journals.FORMAT, "machine": self.child.welcome["machine"], "mode": self.mode}
            journals.take(self.held, {"kind": "run", **header})  # refuses to mix machines in one file
            self.journal.write("run", **header)
            asked = self.selection, self.child, self.effort.check_timeout, self.watcher.note
            selection, self.report.silent = who_answers(self.cases, *asked)
            plans = [line_up(case, target, selection, self.mode) for case in self.cases]
            self._measure(plans, target)
        return self.report

    def _limits(self) -> None:
        """What the card reaches at best, once a file. Results without it are as good, but for a roofline's roof."""
        try:
            answer = self.child.ask({"do": "limits"}, self.effort.check_timeout)
        except WorkerDied:
            self.report.restarts += 1
            return
        if answer["ok"]:
            self.journal.write("limits", limits=answer["limits"])

    @contextlib.contextmanager
    def _child_for_now(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.own_child:
                self.child.stop()

    def _measure(self, plans: list[LineUp], target: Target) -> None:
        self.pool = CompilePool(lambda: worker.child("cpu", plugins=self.plugins, environment=HIDE_GPU), self.processes)
        left = [planned for planned in plans if planned.contestants and not self._complete(planned)]
        self.report.pruned = sum(planned.pruned for planned in plans)
        self.report.nobody = [_why_nobody(planned) for planned in plans if not planned.contestants]
        self.watcher.begin(left, sum(len(planned.contestants) * (1 + self.effort.rounds) for planned in left))
        self.report.unreached = [planned.case.text for planned in left]
        try:
            commands = compile_commands(left, target, self.guidance is not None)
            self.pool.submit(commands)
            if target.arch != "cpu" and not self.held.limits:
                self._limits()  # while the first kernels are compiled
            if not (self._all(left) if self.guidance is None else self._some(left)):
                self.report.stopped = "the budget is spent"
        finally:
            self.pool.stop()

    def _all(self, left: Sequence[LineUp]) -> bool:
        """Measure everything. Whether the budget was enough."""
        for index, planned in enumerate(left):
            share = self._time_left() / (len(left) - index)
            if self._time_left() <= 0 or not self._case(planned, share):
                return False
            self.report.unreached.remove(planned.case.text)
        return True

    def _some(self, left: Sequence[LineUp]) -> bool:
        """Measure what a guide asks for. Whether the budget was enough."""
        assert self.guidance is not None
        guide = guide_for(left, self.guidance, self.held)
        for visit in Itinerary(guide, left, self.pool, self._time_left).visits():
            planned = left[visit.place]
            if planned.case.text not in self.report.unreached:  # until it is complete again
                self.report.unreached.append(planned.case.text)
                self.report.measured -= self.held.cases[planned.key].done
            if not self._case(planned, self._time_left() / len(self.report.unreached), visit):
                break
            if not visit.waits:
                self.report.unreached.remove(planned.case.text)
        return not self.report.unreached

    def _time_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - self.now()

    def _complete(self, planned: LineUp) -> bool:
        """Whether every contestant has failed, was dropped, or has all its rounds, with the source it has now."""
        known = self.held.cases.get(planned.key)
        if known is None or not known.done:
            return False
        if self.guidance is not None:
            return not self.retry_failed and all(
                one.fingerprint == known.entries[one.key].fingerprint
                for one in planned.contestants
                if one.key in known.entries
            )
        for contestant in planned.contestants:
            entry = known.entries.get(contestant.key)
            if entry is None or entry.fingerprint != contestant.fingerprint or (entry.failure and self.retry_failed):
                return False
        return True

    # --- one case -------------------------------------------------------------------------------------------------

    def _case(self, planned: LineUp, share: float, visit: Visit | None = None) -> bool:
        """Measure a case in about `share` seconds. Whether it was finished, for now, before the budget was."""
        begun, self.refused = self.now(), None
        self._record_case(planned, [] if visit else planned.contestants)
        if visit:
            alive = self._chosen(planned, visit)
            if visit.waits:
                return self._time_left() > 0
        else:
            alive = [c for c in planned.contestants if self._admit(planned, c)]
        known = self.held.cases[planned.key]
        rounds, number = self.effort.rounds, 0
        while number < rounds and alive:
            round_begun = self.now()
            order = turn_order(alive, planned.key, number)
            if self._time_left() <= 0:
                break
            for contestant in order:
                if number not in known.entries[contestant.key].samples:
                    self._turn(planned, contestant, number)
            alive = [c for c in alive if known.entries[c.key].failure is None]
            before, alive = len(alive), self._drop_slow(alive, known, number)
            self.watcher.resize(-(before - len(alive)) * (rounds - 1 - number))
            if number == 0:
                spent, each = self.now() - begun, max(self.now() - round_begun, 1e-6)
                rounds = self._affordable(share - spent, each * max(1, len(alive)) / max(1, len(order)), rounds)
            number += 1
        if alive and number >= rounds:
            self._record("done", case=planned.key, rounds=number)
            self.report.measured += 1
        return number >= rounds or (not alive and self._time_left() > 0)

    def _record_case(self, planned: LineUp, contestants: Sequence[Contestant]) -> None:
        """What is measured of a case, in full or, where a guide chooses, so far."""
        self._record(
            "case",
            case=planned.key,
            op=planned.case.op,
            text=planned.case.text,
            shape=planned.case.data(),
            facts=_plain(planned.problem.facts()),
            flops=planned.flops,
            illegal=planned.illegal,
            contestants={c.key: [c.variant, c.config, c.first, c.fingerprint] for c in contestants},
        )

    def _chosen(self, planned: LineUp, visit: Visit) -> list[Contestant]:
        """One turn of each contestant that the guide asks for, and those of an earlier run."""
        before = self.held.cases[planned.key].entries
        tried = [one for one in planned.contestants if one.key in before and before[one.key].timed]
        while self._time_left() > 0 and (one := visit.next()) is not None:
            self._record_case(planned, [one])
            if self._admit(planned, one):
                self._turn(planned, one, 0)
            entry = self.held.cases[planned.key].entries[one.key]
            visit.tell(one, entry.ms if entry.timed else None)
            if entry.timed:
                tried.append(one)
        return tried

    def _affordable(self, left_s: float, round_s: float, rounds: int) -> int:
        if left_s == float("inf"):
            return rounds
        return max(self.effort.least_rounds, min(rounds, 1 + int(left_s / round_s)))

    def _drop_slow(self, alive: list[Contestant], known: CaseResults, number: int) -> list[Contestant]:
        """Those near the best after round `number`."""
        allowed = max(min(self.effort.drop, self.effort.least_drop), 1 + (self.effort.drop - 1) / 2**number)
        best = min((known.entries[c.key].ms for c in alive), default=0.0)
        return [c for c in alive if known.entries[c.key].ms <= best * allowed]

    def _admit(self, planned: LineUp, contestant: Contestant) -> bool:
        """Compile and gate a contestant, unless an earlier sweep did."""
        entry = self.held.cases[planned.key].entries[contestant.key]
        self.watcher.step(f"{planned.case.text}  {contestant}")
        if entry.failure is not None and not self.retry_failed:
            return False
        if entry.failure is None and entry.check is not None:
            return True
        compiled = self.pool.result((planned.key, contestant.key), self._time_left())
        if self._time_left() <= 0:
            return False
        if compiled is not None and not compiled["ok"]:
            self._fail(planned, contestant, compiled)
            return False
        answer = self._ask(planned, {"do": "check", **_named(contestant)})
        if not answer["ok"]:
            self._fail(planned, contestant, answer)
            return False
        if compiled is not None:
            answer["compile_s"] = compiled.get("seconds")
        answer.pop("ok")
        self._record("check", case=planned.key, key=contestant.key, **answer)
        return True

    def _turn(self, planned: LineUp, contestant: Contestant, number: int) -> None:
        """One turn of one contestant: timed, then written at once."""
        self.watcher.step(f"{planned.case.text}  round {number + 1}  {contestant}")
        command = {
            "do": "time",
            **_named(contestant),
            "settle_ms": self.effort.settle_ms,
            "measure_ms": self.effort.measure_ms,
        }
        answer = self._ask(planned, command)
        if not answer.pop("ok"):
            self._fail(planned, contestant, answer)
            return
        self._record("sample", case=planned.key, key=contestant.key, round=number, **answer)
        self.report.turns += 1

    def _ask(self, planned: LineUp, command: dict[str, Any]) -> dict[str, Any]:
        """An answer, or the refusal that stands for a worker that died over it. A first launch may take longer."""
        try:
            if self.loaded != planned.key or not self.child.running:
                self.launched.clear()
                loaded = self._load(planned)
                if not loaded["ok"]:
                    return loaded
            launched = command["key"] in self.launched
            answer = self.child.ask(command, self.effort.turn_timeout if launched else self.effort.check_timeout)
            self.launched.add(command["key"])
            return answer
        except WorkerDied as error:
            self.report.restarts += 1
            self.loaded = None
            return {"ok": False, "why": error.why, "detail": error.detail}

    def _load(self, planned: LineUp) -> dict[str, Any]:
        """Give the worker the case. Its inputs are the oracle's and torch's business, so it may take a while."""
        self.loaded = None
        if self.refused is None:
            try:
                answer = self.child.ask({"do": "case", "case": planned.case.data()}, self.effort.case_timeout)
            except WorkerDied as error:
                answer = {"ok": False, "why": error.why, "detail": error.detail}
            if answer["ok"]:
                self.loaded = planned.key
                return answer
            self.refused = {**answer, "why": f"inputs: {answer['why']}"}
        return dict(self.refused)

    def _fail(self, planned: LineUp, contestant: Contestant, answer: dict[str, Any]) -> None:
        why = {name: value for name, value in answer.items() if name not in ("ok", "fatal")}
        text = f"{contestant} on {planned.case.text}: {why['why']}: {why.get('detail', '')}"
        self.report.failed.append(text)
        self.watcher.note(both_ends(text, 400))
        self._record("failed", case=planned.key, key=contestant.key, **why)

    def _record(self, kind: str, **values: Any) -> None:
        """Write a record, and take it in as a reader would. A write survives this process; a sync, the machine."""
        if kind in ("case", "done"):
            values["at"] = round(time.time(), 1)
        self.journal.write(kind, **values)
        if kind in ("failed", "done") or time.monotonic() - self.synced > SYNC_EVERY_S:
            self.journal.sync()
            self.synced = time.monotonic()
        journals.take(self.held, {"kind": kind, **values})


def _why_nobody(planned: LineUp) -> str:
    reasons = [f"{name}: {why}" for name, why in planned.illegal.items()]
    return f"{planned.case.text}: " + ("; ".join(reasons[:2]) or "no variant is of that name")


def _named(contestant: Contestant) -> dict[str, Any]:
    return {"variant": contestant.variant, "config": contestant.config, "key": contestant.key}


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}
