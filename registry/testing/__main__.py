"""`python -m registry.testing`: check variants without pytest, as on a machine that is only there for a few minutes."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from registry import testing
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.ops.known import all_ops

Merged = dict[tuple[str, str, str], testing.Report]
"""Reports by subject, target and level."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check what the arguments name; 0 where everything passed."""
    given = _parser().parse_args(argv)
    os.environ.setdefault(*testing.DETERMINISTIC_SETTING)
    if given.list or given.journal:
        _in_this_process(given)
        return 0
    reports = _in_children(given, list(sys.argv[1:] if argv is None else argv))
    for report in reports:
        print(report)
    return 0 if reports and all(report.passed for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m registry.testing", description=__doc__)
    add = parser.add_argument
    add("--variant", action="append", default=[], metavar="NAME", help="name or pattern, repeatable; default: all")
    add("--target", help="cuda, cpu, or a GPU's name with TRITON_INTERPRET=1; default: wherever a variant is legal")
    add("--level", choices=("quick", "full"), default="quick")
    add("--repeats", type=int, help="how often deterministic launches are compared")
    add("--only", default="*", metavar="PATTERN", help="run only checks whose name matches")
    add("--ops", action="store_true", help="check the ops too: opcheck, torch.compile, empty tensors")
    add("--jobs", type=int, default=1, metavar="N", help="share the checks among N processes, which compile at once")
    add("--shard", default="1/1", metavar="I/N", help="run only every Nth check, from the Ith on")
    add("--timeout", type=float, default=300, help="seconds before a hanging check ends its process")
    add("--json", type=Path, help="write all outcomes here, as they come")
    add("--list", action="store_true", help="only show what would be checked")
    add("--journal", type=Path, help=argparse.SUPPRESS)  # where a child writes what it begins and what came of it
    return parser


def _in_this_process(given: argparse.Namespace) -> None:
    """List the checks, or run them and write down each as it begins and as it ends."""
    for name, target in _chosen(given.variant, given.target):
        checks = testing.checks_for(name, target, given.level, repeat=given.repeats)
        checks = [check for check in _shard(checks, given.shard) if fnmatch.fnmatch(check.name, given.only)]
        if given.list:
            print(f"{name} on {target.name}", *(check.name for check in checks), sep="\n  ")
        else:
            _watched((name, target.name, given.level), checks, given)
    if given.ops and not given.list:
        device = "cuda" if torch.cuda.is_available() and given.target != "cpu" else "cpu"
        for op in all_ops():
            _watched((f"op {op}", device, ""), _shard(testing.checks_of_op(op, device), given.shard), given)
    if given.journal:
        _note(given.journal, {"done": True})


def _chosen(patterns: Sequence[str], target: str | None) -> list[tuple[str, Target]]:
    """(variant, target) of each pattern, in the order asked for; an unknown name is an error."""
    known = sorted(catalog.get().variants)
    names = [n for pattern in patterns or ["*"] for n in (fnmatch.filter(known, pattern) or [pattern])]
    found = []
    for name in dict.fromkeys(names):
        if target in (None, "cuda", "cpu"):
            places = testing.places(name)
            found += [(name, place) for place in places if target is None or (place.arch == "cpu") == (target == "cpu")]
        else:
            found.append((name, Target.named(str(target))))
    return found


def _shard(checks: list[testing.Check], shard: str) -> list[testing.Check]:
    index, count = map(int, shard.split("/"))
    return checks[index - 1 :: count]


def _watched(subject: tuple[str, str, str], checks: Sequence[testing.Check], given: argparse.Namespace) -> None:
    """Run checks; a hang ends the process with a traceback, since a hung GPU kernel cannot be interrupted."""
    for check in checks:
        _note(given.journal, {"subject": subject, "begins": check.name})
        faulthandler.dump_traceback_later(given.timeout, exit=True, file=sys.__stderr__ or 2)
        try:
            outcome = check.run()
        finally:
            faulthandler.cancel_dump_traceback_later()
        _note(given.journal, {"subject": subject, "outcome": asdict(outcome)})
        if testing.is_sticky(outcome):
            break


def _note(journal: Path, line: dict[str, Any]) -> None:
    """Add a line that is there even if the process ends in the next moment."""
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _in_children(given: argparse.Namespace, arguments: list[str]) -> list[testing.Report]:
    """Every shard in a process of its own, for a kernel may end the process that runs it, with whatever status: a
    check that began and did not end is a failure, and so is a process that did not come to its end."""
    index, count = map(int, given.shard.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for job in range(given.jobs):
            journal, printed = Path(folder) / f"{job}.journal", Path(folder) / f"{job}.out"
            own = ["--jobs", "1", "--shard", f"{index + job * count}/{count * given.jobs}", "--journal", str(journal)]
            command = [sys.executable, "-m", "registry.testing", *arguments, *own]
            with printed.open("wb") as out:
                children.append((journal, printed, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)))
        while True:
            running = [process for *_, process in children if process.poll() is None]
            merged: Merged = {}
            for job, (journal, printed, process) in enumerate(children, 1):
                said = printed.read_text(encoding="utf-8", errors="replace")[-2000:]
                ending = "" if process in running else f"the process ended with status {process.returncode}: {said}"
                _merge(merged, journal, ending, f"process {job}")
            _write(list(merged.values()), given.json)  # as results come: this process may be ended too
            if not running:
                return list(merged.values())
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(2.0)


def _merge(merged: Merged, journal: Path, ending: str, process: str) -> None:
    """Add what one child wrote down, and what its silence means once it has ended."""
    written = journal.read_text(encoding="utf-8").split("\n")[:-1] if journal.exists() else []
    lines = [json.loads(line) for line in written]
    begun: tuple[Any, str] | None = None
    for line in lines:
        if "begins" in line:
            begun = tuple(line["subject"]), line["begins"]
        elif "outcome" in line:
            begun = None
            _report(merged, tuple(line["subject"])).cases.append(testing.Outcome(**line["outcome"]))
    if not ending:
        return
    if begun is not None:
        subject, name = begun
        _report(merged, subject).cases.append(testing.Outcome(name, False, detail=f"never came back: {ending}"))
    elif not lines or "done" not in lines[-1]:
        _report(merged, (process, "", "")).cases.append(testing.Outcome("ends by itself", False, detail=ending))


def _report(merged: Merged, subject: Any) -> testing.Report:
    name, target, level = subject
    return merged.setdefault(subject, testing.Report(name, target, level, []))


def _write(reports: list[testing.Report], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([report.to_dict() for report in reports], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
