"""Two sets of results beside each other: what got slower or faster by more than the noise of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.tuning.journal import CaseResults, Entry, Results

LEAST = 0.02
"""A change below this share is none: two runs of one binary on one card differ by as much."""
TIMES_NOISE = 3.0
"""A change counts beyond so many times the spread between rounds, of both measurements together."""
COMPARED = ("device", "driver", "torch", "triton")


def compare(new: Mapping[str, Results], old: Mapping[str, Results]) -> dict[str, Any]:
    """Each variant's best config on each shape that both hold in the same mode of measuring."""
    before = _latest(old)
    now = _latest(new)
    rows, same = [], 0
    for key in now.keys() & before.keys():
        changed = _changed(now[key], before[key])
        if changed is None:
            same += 1
        else:
            op, text, variant, mode = key
            rows.append({"op": op, "shape": text, "variant": variant, "mode": mode, **changed})
    rows.sort(key=lambda row: -row["change"])
    return {
        "rows": rows,
        "slower": sum(row["change"] > 0 for row in rows),
        "faster": sum(row["change"] < 0 for row in rows),
        "same": same,
        "only_new": len(now.keys() - before.keys()),
        "only_old": len(before.keys() - now.keys()),
        "machines": _machines(new, old),
    }


def _latest(runs: Mapping[str, Results]) -> dict[tuple[str, str, str, str], tuple[CaseResults, Entry]]:
    """By (op, shape, variant, mode); of several files the newest counts."""
    found = {}
    for results in sorted(runs.values(), key=lambda results: str(results.machine.get("date", ""))):
        for case in results.cases.values():
            for name, entry in case.best.items():
                found[case.op, case.text, name, results.mode] = (case, entry)
    return found


def _changed(new: tuple[CaseResults, Entry], old: tuple[CaseResults, Entry]) -> dict[str, Any] | None:
    """How much longer it takes, where that is more than noise: the time now over the time before, less one."""
    change = new[1].ms / old[1].ms - 1
    noise = TIMES_NOISE * (_noise(*new) ** 2 + _noise(*old) ** 2) ** 0.5
    if abs(change) <= max(LEAST, noise):
        return None
    same_config = new[1].config == old[1].config
    return {
        "change": change,
        "noise": noise,
        "ms": [old[1].ms, new[1].ms],
        "config": "the same" if same_config else "another",
        "source": "changed" if new[1].fingerprint != old[1].fingerprint else "the same",
    }


def _noise(case: CaseResults, entry: Entry) -> float:
    """The spread between rounds, or the shape's usual one where this contestant's few rounds happen to agree."""
    return max(entry.spread, case.noise)


def _machines(new: Mapping[str, Results], old: Mapping[str, Results]) -> list[str]:
    """In what the two were measured differently: such a change is not the kernels' doing alone."""
    found = []
    for name in COMPARED:
        here, there = ({str(r.machine.get(name)) for r in runs.values()} for runs in (new, old))
        if here != there:
            found.append(f"{name}: {', '.join(sorted(there))} before, {', '.join(sorted(here))} now")
    return found
