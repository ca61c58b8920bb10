"""Take sweeps into the journals that tables are fitted to:

    python tools/fold.py benchmarks/results/h200 new/random_1_matmul.jsonl new/random_1_attention.jsonl

Each finished case goes to FOLDER/OP.jsonl with how it was timed, for such a file holds cases that were timed in several
ways. A case that is there already is replaced where it stands: the order of cases decides which trees of a fit see
which. What was carried (tools/carry.py) stays so. Measurements of another device, driver, torch or triton than the
file's are refused, and nothing is written.

With `--beside` what other variants took on a case stays. Where the two runs had another clock (by 2%), what was timed
now is brought to that of before, by how much longer or shorter the contestants took that both runs timed (the median of
their ratios; `scaled` says it in each line). A case of which there are none is left as it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.disk import write_atomic
from registry.tuning import journal
from registry.tuning.journal import MIXED, ResultsError
from registry.tuning.store import KEYED

Lines = list[dict[str, Any]]

CLOCKS = 1.02
"""The factor by which the clocks of two runs may differ, for times of one to stand beside the other's."""


class JournalLines:
    """A journal's lines by case, in its order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads: Lines = []
        """What is about the run."""
        self.cases: dict[str, Lines] = {}
        self.read = journal.read(path)
        if self.read.bad_lines:
            raise ResultsError(f"{path}: line {self.read.bad_lines[0]} is damaged")
        for _, line in journal.records(path) if path.is_file() else ():
            assert line is not None
            (self.cases.setdefault(line["case"], []) if "case" in line else self.heads).append(line)

    @property
    def run(self) -> dict[str, Any]:
        found = next((line for line in self.heads if line["kind"] == "run"), None)
        if found is None:
            raise ResultsError(f"{self.path}: does not say what it was measured on")
        return found

    def mix(self) -> None:
        """Let each case say for itself how it was timed."""
        mode = self.run["mode"]
        self.heads = [{**line, "mode": MIXED} if "mode" in line else line for line in self.heads]
        for case, lines in self.cases.items():
            self.cases[case] = [
                {**line, "mode": line.get("mode", mode)} if line["kind"] == "case" else line for line in lines
            ]

    def finished(self) -> dict[str, Lines]:
        """Cases of which every contestant had its turn, with the sources that their measurements hold for."""
        done = {case: lines for case, lines in self.cases.items() if any(line["kind"] == "done" for line in lines)}
        return {case: [self._carried(line) for line in lines] for case, lines in done.items()}

    def _carried(self, line: dict[str, Any]) -> dict[str, Any]:
        if line["kind"] != "case" or not self.read.carried:
            return line
        named = {
            key: [variant, config, first, self.read.source(line["case"], key, variant, source)]
            for key, (variant, config, first, source) in line["contestants"].items()
        }
        return {**line, "contestants": named}

    def text(self) -> str:
        every = [*self.heads, *(line for lines in self.cases.values() for line in lines)]
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in every)


def fold(folder: Path, sweeps: Sequence[Path], beside: bool = False) -> dict[str, tuple[int, int]]:
    """Per op, how many cases are new and how many replaced others. Raises ResultsError before anything is written."""
    held: dict[str, JournalLines] = {}
    counts: dict[str, tuple[int, int]] = {}
    for path in sweeps:
        sweep = JournalLines(path)
        machine = sweep.run["machine"]
        sweep.mix()
        for case, lines in sweep.finished().items():
            op = next(line["op"] for line in lines if line["kind"] == "case")
            if op not in held:
                held[op] = JournalLines(folder / f"{op}.jsonl")
            into = held[op]
            into.heads = into.heads or sweep.heads
            if into.run["mode"] != MIXED:
                into.mix()
            theirs = into.run["machine"]
            differing = [f"{name} {machine.get(name)}" for name in KEYED if machine.get(name) != theirs.get(name)]
            if differing:
                raise ResultsError(f"{path} into {into.path}: {', '.join(differing)}; its own are of {theirs}")
            new, again = counts.get(op, (0, 0))
            before = into.cases.get(case)
            if before is not None and beside:
                if _case_line(before)["mode"] != _case_line(lines)["mode"]:
                    continue
                scale = 1.0 if _at_one_clock(before, lines) else _slower(before, lines)
                if scale is None:
                    continue
                lines = _joined(before, lines if scale == 1.0 else [_scaled(line, scale) for line in lines])
            counts[op] = (new, again + 1) if before is not None else (new + 1, again)
            into.cases[case] = lines
    for into in held.values():
        write_atomic(into.path, into.text())
    return counts


def _case_line(lines: Lines) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == "case")


def _at_one_clock(*runs: Lines) -> bool:
    """Whether both ran at about the same clock, in the median, where both say."""
    told = [[line["sm_mhz"] for line in lines if line.get("sm_mhz")] for lines in runs]
    clocks = [statistics.median(each) for each in told if each]
    return len(clocks) < 2 or max(clocks) <= CLOCKS * min(clocks)


def _slower(before: Lines, lines: Lines) -> float | None:
    """How many times as long contestants took before, of those that both timed; None if there are none."""
    was, now = _took(before), _took(lines)
    ratios = [was[key] / now[key] for key in was.keys() & now.keys()]
    return round(statistics.median(ratios), 4) if ratios else None


def _took(lines: Lines) -> dict[str, float]:
    """The median time of each contestant, by its key."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["kind"] == "sample":
            found.setdefault(line["key"], []).append(line["ms"])
    return {key: statistics.median(each) for key, each in found.items()}


def _scaled(line: dict[str, Any], by: float) -> dict[str, Any]:
    if line["kind"] != "sample":
        return line
    return {**line, **{name: round(line[name] * by, 9) for name in ("ms", "low", "high") if name in line}, "scaled": by}


def _joined(before: Lines, lines: Lines) -> Lines:
    """A case of before with what a sweep measured of some variants in the place of what they took then."""
    was, now = _case_line(before), _case_line(lines)
    again = {variant for variant, *_ in now["contestants"].values()} | {*now.get("illegal", ())}
    stays = {key: one for key, one in was["contestants"].items() if one[0] not in again}
    illegal = {name: why for name, why in was.get("illegal", {}).items() if name not in again}
    whole = {**was, "contestants": {**stays, **now["contestants"]}, "illegal": {**illegal, **now.get("illegal", {})}}
    kept = [line for line in before if line.get("key") in stays]
    return [whole, *kept, *(line for line in lines if line["kind"] != "case")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP")
    parser.add_argument("--beside", action="store_true", help="what other variants took on a case stays")
    given = parser.parse_args()
    try:
        counts = fold(given.folder, given.sweeps, given.beside)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 1
    for op, (new, again) in counts.items():
        print(f"{op}: {new} new, {again} measured again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
