"""What `kreg tune --guided` would have measured of a finished sweep, and what it would have picked:

    python benchmarks/guided_replay.py benchmarks/results/h200/attention.jsonl

Every contestant that was timed may be asked for, and answers with the time that the sweep recorded; so may those that
failed, and fail again. Before the results: `--timelines FILE`, recorded timelines; `--learn FILE`, earlier results;
`--draw SEED:COUNT`, so many of the shapes, in an order drawn at random (as many as there are: all).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from registry.cli.tune import GUIDED_DROP
from registry.contract.target import Target
from registry.tuning import journal, observed
from registry.tuning.contestants import Contestant, LineUp
from registry.tuning.guided import Guidance, Guide, of_results
from registry.tuning.journal import CaseResults, Entry, Results
from registry.tuning.timing import quantile


@dataclass
class Replay:
    """One op of one sweep, guided."""

    shapes: int
    contestants: int
    tried: int
    turns: int
    guided_turns: int
    lost: list[float]
    """Of each shape: the time of the best that was tried over that of the best there was, less one."""

    @property
    def mean(self) -> float:
        return sum(self.lost) / len(self.lost)

    def __str__(self) -> str:
        lost = sorted(self.lost)
        same = sum(share <= 0.01 for share in lost) / len(lost)
        return (
            f"{self.shapes} shapes: {self.tried} of {self.contestants} contestants measured "
            f"({100 * self.tried / self.contestants:.1f}%), {self.guided_turns} of {self.turns} turns "
            f"({100 * self.guided_turns / self.turns:.1f}%); picks {100 * self.mean:.2f}% slower on average, "
            f"median {100 * quantile(lost, 0.5):.2f}%, 95th percentile {100 * quantile(lost, 0.95):.1f}%, worst "
            f"{100 * lost[-1]:.0f}%; within 1% on {100 * same:.1f}% of shapes"
        )


def replay(results: Results, op: str, guidance: Guidance | None = None, draw: tuple[int, int] | None = None) -> Replay:
    cases = [case for case in results.of(op) if case.timed]
    if draw is not None:
        cases = random.Random(draw[0]).sample(cases, min(draw[1], len(cases)))
    plans = [(case, line_up(case, Target.named(results.machine["device"]))) for case in cases]
    guide = Guide([planned for _, planned in plans], guidance)
    found = Replay(len(plans), 0, 0, 0, 0, [])
    tried: list[list[Entry]] = [[] for _ in plans]
    for looked in (lambda: range(len(plans)), guide.worth_another_look):
        for place in looked():
            while place is not None and (one := guide.next(place)) is not None:
                entry = plans[place][0].timed.get(one.key)
                guide.tell(place, one.key, entry.ms if entry else None)
                tried[place] += [entry] if entry else []
    for (case, _), own in zip(plans, tried, strict=True):
        best = min(entry.ms for entry in own)
        found.lost.append(best / min(entry.ms for entry in case.timed.values()) - 1)
        found.contestants += len(case.timed)
        found.tried += len(own)
        found.turns += sum(len(entry.samples) for entry in case.timed.values())
        found.guided_turns += sum(len(e.samples) if e.first or e.ms <= best * GUIDED_DROP else 1 for e in own)
    return found


def line_up(case: CaseResults, target: Target) -> LineUp:
    """All that were tried on a shape, also those that failed."""
    tried = [e for e in case.entries.values() if e.timed or e.failure]
    return replace(
        of_results(case, target),
        contestants=tuple(Contestant(e.variant, e.config, e.first, e.fingerprint) for e in tried),
    )


def main(arguments: Sequence[str]) -> int:
    guidance, rest, draw = Guidance(), list(arguments), None
    while rest[:1] and rest[0].startswith("--"):
        option, given = rest[:2]
        if option == "--timelines":
            guidance = replace(guidance, observed=(*guidance.observed, *observed.read(Path(given))))
        elif option == "--learn":
            guidance = replace(guidance, learnt=(*guidance.learnt, *journal.read(Path(given)).cases.values()))
        else:
            seed, count = given.split(":")
            draw = int(seed), int(count)
        del rest[:2]
    for path in rest:
        results = journal.read(Path(path))
        for op in results.ops:
            print(f"{path}: {op}: {replay(results, op, guidance, draw)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
