"""`python -m registry.testing`: check variants without pytest, as on a machine that is only there for a few minutes.

    python -m registry.testing --variant acme.flash                    # on every device here that it claims
    python -m registry.testing --variant acme.flash --target H100      # without one: interpreted
    python -m registry.testing --variant acme.flash --plugin flash.py  # of a file that nobody installed

Checks run in processes of their own, for a kernel may end the one that runs it. Each is written down before it begins,
and what came of it as it comes; after a crash the next process goes on with the check that follows.
"""

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from registry import testing
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.errors import RegistryError
from registry.notices import drop_output
from registry.ops.known import all_ops
from registry.testing import interpreted, processes
from registry.tuning.extra import load_plugins

Subject = tuple[str, str, str]
"""What is checked, on which target, at which level."""
Merged = dict[Subject, testing.Report]
MOST_SECONDS = 1_000_000
MOST_ENDINGS = 3
"""Of processes that run one share of the checks, before the rest is left out."""
LAST_WORDS = 2000
"""Bytes of what a process printed before it ended."""
DRAWING, DRAWN = "problems are drawn", "drawn"
OUT_OF_MEMORY = "OutOfMemoryError"
PAUSES = (0.5, 2.0, 5.0)
"""Seconds before a check that found no memory is tried again."""
LEAST_TO_DRAW = 60
"""Seconds that this has, however short the checks shall be."""
STICKY = 3
"""Exit status after a CUDA error, which breaks its process: the next one goes on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check what the arguments name; 0 where everything passed, whether or not anybody reads what is printed."""
    try:
        status, lines = _checked(argv)
    except SystemExit as end:  # of the parser, or of a broken device
        status, lines = (end.code if isinstance(end.code, int) else 1), []
    try:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    except BrokenPipeError:
        drop_output()
    return status


def _checked(argv: Sequence[str] | None) -> tuple[int, list[str]]:
    """The exit status, and what there is to say."""
    parser = _parser()
    given = parser.parse_args(argv)
    os.environ.setdefault(*testing.DETERMINISTIC_SETTING)
    try:
        if given.target not in (None, "cuda", "cpu"):
            Target.named(given.target)
            if not given.compile_only and not torch.cuda.is_available():
                interpreted.ask_for_it()
        load_plugins(given.plugin)
        _names(given.variant)
    except RegistryError as error:
        parser.error(str(error))
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json: got {given.json}; allowed: a file in a folder that is there")
    if given.list or given.journal:
        return 0, _in_this_process(given)
    reports = _in_children(given, list(sys.argv[1:] if argv is None else argv))
    lines = list(map(str, reports)) or [
        "nothing to check: no variant claims a device that is here (--target), or no check has that name (--only)"
    ]
    return 0 if reports and all(report.passed for report in reports) else 1, lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m registry.testing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variant", action="append", default=[], metavar="NAME", help="name or pattern, repeatable; default: all")
    add("--plugin", action="append", default=[], metavar="FILE", help="also the variants of this file or module")
    add("--target", help="cuda, cpu, or a GPU's name: kernels are interpreted where none is here; default: all that is")
    add("--level", choices=("quick", "full"), default="quick")
    add("--draw", type=_positive, default=0, metavar="N", help="draw other problems and values than everybody checks")
    add("--repeats", type=_positive, help="how often deterministic launches are compared")
    add("--only", default="*", metavar="PATTERN", help="run only checks whose name matches")
    add("--ops", action="store_true", help="check the ops too: opcheck, torch.compile, empty tensors")
    add(
        "--jobs",
        type=_positive,
        default=1,
        metavar="N",
        help="share the checks among N processes, which compile at once",
    )
    add("--shard", default=(1, 1), type=_part, metavar="I/N", help="run only every Nth check, from the Ith on")
    add("--timeout", type=_seconds, default=300, help="seconds before a hanging check ends its process")
    add("--json", type=Path, help="write all outcomes here, as they come")
    add("--list", action="store_true", help="only show what would be checked")
    add("--compile-only", action="store_true", help="only the checks that compile; they need no GPU")
    add("--journal", type=Path, help=argparse.SUPPRESS)  # where a child writes what it begins and what came of it
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < MOST_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"got {text!r}; allowed: seconds, more than 0 and less than {MOST_SECONDS}")


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    found = _positive(index), _positive(count)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: I/N with I from 1 to N")
    return found


def _in_this_process(given: argparse.Namespace) -> list[str]:
    """List the checks, or run them and write down each as it begins and as it ends."""
    listed = []
    for name, target in _chosen(given.variant, given.target):
        subject = name, target.name, given.level
        checks = _drawn(subject, target, given)
        checks = [check for check in _shard(checks, given.shard) if fnmatch.fnmatch(check.name, given.only)]
        if given.list:
            listed.append("\n  ".join((f"{name} on {target.name}", *(check.name for check in checks))))
        else:
            _watched(subject, checks, given)
    if given.ops and not given.list:
        device = "cuda" if torch.cuda.is_available() and given.target != "cpu" else "cpu"
        for op in all_ops():
            _watched((f"op {op}", device, ""), _shard(testing.checks_of_op(op, device), given.shard), given)
    if given.journal:
        _note(given.journal, {"done": True})
    return listed


def _drawn(subject: Subject, target: Target, given: argparse.Namespace) -> list[testing.Check]:
    """The checks of a variant, for which its declaration is asked; none where that hung in a process before."""
    options = {"repeat": given.repeats, "compile_only": given.compile_only, "draw": given.draw}
    before = [line for line in _lines(given.journal) if tuple(line.get("subject") or ()) == subject]
    if any(line.get("begins") == DRAWING for line in before) and not any(DRAWN in line for line in before):
        return []
    if given.journal is None:
        return testing.checks_for(subject[0], target, given.level, **options)
    if not before:
        _note(given.journal, {"subject": subject, "begins": DRAWING, "about": "its declaration is asked"})
    with _ending_after(max(given.timeout, LEAST_TO_DRAW)):
        found = testing.checks_for(subject[0], target, given.level, **options)
    _note(given.journal, {"subject": subject, DRAWN: True})
    return found


def _chosen(patterns: Sequence[str], target: str | None) -> list[tuple[str, Target]]:
    """(variant, target) of each pattern, in the order asked for."""
    found = []
    for name in _names(patterns):
        if target in (None, "cuda", "cpu"):
            places = testing.places(name)
            found += [(name, place) for place in places if target is None or (place.arch == "cpu") == (target == "cpu")]
        else:
            found.append((name, Target.named(str(target))))
    return found


def _names(patterns: Sequence[str]) -> list[str]:
    """The variants that the patterns name; one that names none is an error."""
    known = sorted(catalog.get().variants)
    names: list[str] = []
    for pattern in patterns or ["*"]:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise catalog.get().unknown(pattern, "any")
        names += matching
    return list(dict.fromkeys(names))


def _shard(checks: list[testing.Check], shard: tuple[int, int]) -> list[testing.Check]:
    index, count = shard
    return checks[index - 1 :: count]


def _watched(subject: Subject, checks: Sequence[testing.Check], given: argparse.Namespace) -> None:
    """Run the checks that no process before this one began. A hang ends the process with a traceback, since a hung GPU
    kernel cannot be interrupted."""
    begun = {
        line["begins"]
        for line in _lines(given.journal)
        if tuple(line.get("subject", ())) == subject and "begins" in line
    }
    outcomes = []
    for check in checks:
        if check.name in begun:
            continue
        _note(given.journal, {"subject": subject, "begins": check.name, "about": check.about})
        with _ending_after(given.timeout):
            outcomes.append(_run(check))
        _note(given.journal, {"subject": subject, "outcome": asdict(outcomes[-1])})
        if testing.is_sticky(outcomes[-1]):
            raise SystemExit(STICKY)
    if any(not outcome.passed for outcome in outcomes):
        with _ending_after(given.timeout):
            smallest = testing.smallest(checks, outcomes)
        _note(given.journal, {"subject": subject, "smallest": smallest})
        if testing.breaks_process(smallest):  # while it was looked for: what follows is not to blame
            raise SystemExit(STICKY)


def _run(check: testing.Check) -> testing.Outcome:
    """Of processes that share a GPU, one may have the memory that another needs: nothing is wrong with a kernel for it.
    So what a check took is given back, and one that found too little is tried again."""
    for pause in (*PAUSES, None):
        outcome = check.run()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if pause is None or OUT_OF_MEMORY not in outcome.detail:
            break
        time.sleep(pause)
    return outcome


@contextlib.contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _note(journal: Path, line: dict[str, Any]) -> None:
    """Add a line that is there even if the process ends in the next moment."""
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(journal: Path | None) -> list[dict[str, Any]]:
    """What is written down; a line that was not finished counts for nothing."""
    if journal is None or not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").split("\n")[:-1]]


class _Shard:
    """Some of the checks, and the processes that run them, one after the other: a kernel may end the one that runs it,
    with whatever status, so what began and did not end is a failure, and so is an end without a word."""

    def __init__(self, folder: Path, job: int, arguments: list[str], shard: str) -> None:
        self.name, self.journal = f"process {job}", folder / f"{job}.journal"
        own = ["--jobs", "1", "--shard", shard, "--journal", str(self.journal)]
        self._command = processes.command(*arguments, *own)
        self._printed = folder / f"{job}.out"
        self._endings = 0
        self._start()

    def _start(self) -> None:
        self._seen = len(_lines(self.journal))
        with self._printed.open("wb") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT)

    def goes_on(self) -> bool:
        """Whether there is more to come: starts the next process where the last one ended in the middle of a check."""
        if self.process.poll() is None:
            return True
        lines = _lines(self.journal)
        if lines and "done" in lines[-1]:
            return False
        said = self._last_words()
        ending = f"the process ended with status {self.process.returncode}: {said}"
        if lines and "begins" in lines[-1]:
            last = lines[-1]
            outcome = _failed(last["begins"], f"never came back: {ending}", last["about"])
            _note(self.journal, {"subject": last["subject"], "outcome": outcome})
        self._endings += 1
        got_nowhere = len(lines) == self._seen
        if got_nowhere or self._endings == MOST_ENDINGS:
            said = (
                ending if got_nowhere else f"{MOST_ENDINGS} processes ended like this; the other checks were left out"
            )
            subject = lines[-1].get("subject") if lines and not got_nowhere else None
            _note(self.journal, {"subject": subject or [self.name, "", ""], "outcome": _failed("ends by itself", said)})
            _note(self.journal, {"done": True})
            return False
        self._start()
        return True

    def _last_words(self) -> str:
        with self._printed.open("rb") as printed:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_WORDS))
            return printed.read().decode("utf-8", "replace")


def _failed(name: str, detail: str, about: str = "") -> dict[str, Any]:
    return asdict(testing.Outcome(name, False, detail=detail, about=about))


def _in_children(given: argparse.Namespace, arguments: list[str]) -> list[testing.Report]:
    """Every shard in processes of its own; what they write down is gathered as it comes."""
    index, count = given.shard
    with tempfile.TemporaryDirectory() as folder:
        shards = [
            _Shard(Path(folder), job, arguments, f"{index + job * count}/{count * given.jobs}")
            for job in range(given.jobs)
        ]
        while True:
            running = [shard for shard in shards if shard.goes_on()]
            merged: Merged = {}
            for shard in shards:
                _merge(merged, shard.journal)
            _write(list(merged.values()), given.json)  # as results come: this process may be ended too
            if not running:
                return list(merged.values())
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].process.wait(2.0)


def _merge(merged: Merged, journal: Path) -> None:
    """Add what one shard wrote down."""
    for line in _lines(journal):
        if "outcome" in line:
            report, found = _report(merged, tuple(line["subject"])), line["outcome"]
            report.cases.append(testing.Outcome(**found | {"traits": tuple(found["traits"])}))
        elif "smallest" in line:
            report = _report(merged, tuple(line["subject"]))
            report.smallest = report.smallest or line["smallest"]


def _report(merged: Merged, subject: Any) -> testing.Report:
    name, target, level = subject
    return merged.setdefault(subject, testing.Report(name, target, level, []))


def _write(reports: list[testing.Report], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([report.to_dict() for report in reports], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
