"""`python -m registry.testing`: check variants without pytest, as on a machine that is only there for a few minutes."""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from registry import testing
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.ops.known import all_ops


def main(argv: Sequence[str] | None = None) -> int:
    """Check what the arguments name; 0 where everything passed."""
    given = _parser().parse_args(argv)
    os.environ.setdefault(*testing.DETERMINISTIC_SETTING)
    if given.jobs > 1:
        reports = _in_parallel(list(sys.argv[1:] if argv is None else argv), given.jobs)
        for report in reports:
            print(report)
        _write(reports, given.json)
    else:
        reports = _in_this_process(given)
    return 0 if given.list or (reports and all(report.passed for report in reports)) else 1


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
    add("--json", type=Path, help="write all outcomes here, after each variant")
    add("--list", action="store_true", help="only show what would be checked")
    return parser


def _in_this_process(given: argparse.Namespace) -> list[testing.Report]:
    reports: list[testing.Report] = []
    for name, target in _chosen(given.variant, given.target):
        checks = testing.checks_for(name, target, given.level, repeat=given.repeats)
        checks = [check for check in _shard(checks, given.shard) if fnmatch.fnmatch(check.name, given.only)]
        if given.list:
            print(f"{name} on {target.name}", *(check.name for check in checks), sep="\n  ")
        elif checks:
            reports.append(testing.Report(name, target.name, given.level, _watched(checks, given.timeout)))
            print(reports[-1], flush=True)
            _write(reports, given.json)
    if given.ops and not given.list:
        device = "cuda" if torch.cuda.is_available() and given.target != "cpu" else "cpu"
        for op in all_ops():
            if checks := _shard(testing.checks_of_op(op, device), given.shard):
                reports.append(testing.Report(f"op {op}", device, "", _watched(checks, given.timeout)))
                print(reports[-1], flush=True)
                _write(reports, given.json)
    return reports


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


def _watched(checks: Sequence[testing.Check], timeout: float) -> list[testing.Outcome]:
    """Run checks; a hang ends the process with a traceback, since a hung GPU kernel cannot be interrupted."""
    cases = []
    for check in checks:
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__ or 2)
        try:
            cases.append(check.run())
        finally:
            faulthandler.cancel_dump_traceback_later()
        if testing.is_sticky(cases[-1]):
            break
    return cases


def _in_parallel(arguments: list[str], jobs: int) -> list[testing.Report]:
    """Every shard in a process of its own; one that dies is a failure of its own."""
    merged: dict[tuple[str, str], testing.Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{index}.json" for index in range(1, jobs + 1)]
        processes = []
        for index, path in enumerate(paths, 1):
            own = ["--jobs", "1", "--shard", f"{index}/{jobs}", "--json", str(path)]
            command = [sys.executable, "-m", "registry.testing", *arguments, *own]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for index, (path, process) in enumerate(zip(paths, processes, strict=True), 1):
            printed = process.communicate()[0]
            for found in json.loads(path.read_text()) if path.exists() else []:
                report = testing.Report.from_dict(found)
                known = merged.setdefault((report.subject, report.target), report)
                known.cases += report.cases if known is not report else []
            if process.returncode not in (0, 1) or not path.exists():
                case = testing.Outcome(
                    "ends by itself", False, detail=f"exit code {process.returncode}: {printed[-2000:]}"
                )
                merged[f"process {index}", ""] = testing.Report(f"process {index}", "", "", [case])
    return list(merged.values())


def _write(reports: list[testing.Report], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([report.to_dict() for report in reports], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
