"""Raw results: an append-only file of JSON lines, safe against crashes, and what it says when it is read back.

Kinds of line: `run` (what was measured on), `case` (a shape, its facts, who may run it), `check` (the accuracy gate),
`sample` (one turn of one contestant in one round), `failed`, `done` (a case is complete), `limits` (what the card
reaches at best), `carried` (a later source of a variant that launches the same). A line that was cut off by a crash is
passed over; a writer begins on a fresh line after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from registry import garbage
from registry.contract.problem import PROBLEM_TYPES
from registry.contract.target import Target
from registry.disk import make_folder
from registry.errors import RegistryError
from registry.ops.parts.cases import Case, digest
from registry.tuning.lines import DAMAGED, check_record, checked_limits, parsed
from registry.tuning.timing import quantile

FORMAT = 1
MIXED = "mixed"
"""The mode of a file that was joined from several: each of its cases says how it was timed."""


class ResultsError(RegistryError):
    """Results that cannot be written or are not results."""


def contestant_key(variant: str, config: Mapping[str, Any]) -> str:
    """A short name of a variant with a config."""
    return digest([variant, dict(config)])[:10]


class Journal:
    """Appends records to a file that only one process writes. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def __enter__(self) -> Journal:
        try:
            make_folder(self.path.parent)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            lock(self._file, self.path)
            self._begin_on_fresh_line()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, kind: str, **values: Any) -> None:
        """Append one record whole or not at all. In the file (not yet on the disk: see `sync`) when this returns."""
        assert self._file is not None
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise ResultsError(f"{self.path}: {error.strerror}; what was written before is kept") from error

    def sync(self) -> None:
        """Force everything written to the disk."""
        assert self._file is not None
        try:
            os.fsync(self._file)
        except OSError as error:
            raise ResultsError(f"{self.path}: {error.strerror}") from error

    def _begin_on_fresh_line(self) -> None:
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def lock(file: int, path: Path, *, wait: bool = False) -> None:
    """Hold a file for this process, or say who else does. Systems without flock go unlocked."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise ResultsError(f"{path}: another process writes to it") from None
    except OSError:  # a file system without locks
        return


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """Everything known of one contestant on one case."""

    variant: str
    config: dict[str, Any]
    first: bool = False
    """Whether this is the variant's own first legal config, the one a table means that names none."""
    fingerprint: str = ""
    samples: dict[int, dict[str, Any]] = field(default_factory=dict)
    check: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None

    @property
    def timed(self) -> bool:
        return bool(self.samples) and self.failure is None

    @functools.cached_property
    def ms(self) -> float:
        """Median over the rounds of each round's median."""
        return quantile(sorted(s["ms"] for s in self.samples.values()), 0.5)

    @property
    def spread(self) -> float:
        """Half the distance between the rounds' quartiles over the median: the noise of `ms` between rounds."""
        ordered = sorted(s["ms"] for s in self.samples.values())
        return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 2 / self.ms if len(ordered) > 1 else 0.0


@dataclass(frozen=True)
class Carried:
    """That a later source of a variant launches what an older one did, as tools/carry.py found: what was measured of
    the older counts for the later. It holds wherever in the file it stands, after what was carried before it."""

    variant: str
    old: str
    new: str
    but: Mapping[str, Collection[str]]
    """Case -> keys of contestants that are launched in another way now."""

    def source(self, case: str, key: str, known: str) -> str:
        """Of one of the variant's contestants, of which that one is known."""
        return self.new if known == self.old and key not in self.but.get(case, ()) else known


@dataclass
class CaseResults:
    """Everything known of one case."""

    op: str
    text: str
    shape: dict[str, Any]
    facts: dict[str, Any]
    flops: float
    entries: dict[str, Entry] = field(default_factory=dict)
    illegal: dict[str, str] = field(default_factory=dict)
    mode: str = "events"
    """How it was timed; a file that was joined from several says it of each case."""
    done: bool = False
    machine: Mapping[str, Any] | None = None
    """What it was measured on, where that is not what its results were."""

    @property
    def timed(self) -> dict[str, Entry]:
        return {key: entry for key, entry in self.entries.items() if entry.timed}

    @property
    def best(self) -> dict[str, Entry]:
        """Each variant's fastest config."""
        found: dict[str, Entry] = {}
        for entry in self.timed.values():
            if entry.variant not in found or entry.ms < found[entry.variant].ms:
                found[entry.variant] = entry
        return found

    @property
    def noise(self) -> float:
        """The usual spread between rounds."""
        spreads = sorted(entry.spread for entry in self.timed.values())
        return quantile(spreads, 0.5) if spreads else 0.0

    def tflops(self, entry: Entry) -> float:
        return self.flops / entry.ms / 1e9 if self.flops else 0.0


@dataclass
class Results:
    """A results file read back."""

    path: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    mode: str = "events"
    cases: dict[str, CaseResults] = field(default_factory=dict)
    bad_lines: list[int] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    """What the card reaches at best, where it was measured: see registry.tuning.limits."""
    carried: dict[str, list[Carried]] = field(default_factory=dict)
    """By variant."""

    def source(self, case: str, key: str, variant: str, measured: str) -> str:
        """The latest source that what was measured of a contestant is known to hold for."""
        for one in self.carried.get(variant, ()):
            measured = one.source(case, key, measured)
        return measured

    def of(self, op: str) -> list[CaseResults]:
        found = [case for case in self.cases.values() if case.op == op]
        for case in found:
            _complete(case)
        return found

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(case.op for case in self.cases.values()))

    def joined(self, others: Sequence[Results]) -> Results:
        """With the cases of other devices of the same architecture: what is fastest on one is mostly fastest on the
        other. A shape that was measured on several is a case of each. Raises ResultsError for another architecture."""
        cases = dict(self.cases)
        for other in others:
            if other.machine.get("arch") != self.machine.get("arch"):
                is_not = f"{self.machine.get('arch')}, which {self.path} is of"
                raise ResultsError(
                    f"{other.path}: was measured on {other.machine.get('arch', 'nothing')}, not {is_not}"
                )
            for name, case in other.cases.items():
                here = f"{name} on {other.machine.get('device', other.path)}" if name in self.cases else name
                cases.setdefault(here, replace(case, machine=other.machine))
        return replace(self, cases=cases)


def _complete(case: CaseResults) -> None:
    """Derive facts that tables have learnt to ask for since the case was recorded."""
    known = PROBLEM_TYPES.get(case.op)
    if known is None or not known.derived_kinds.keys() - case.facts.keys() or "op" not in case.shape:
        return
    derived = Case.from_data(case.shape).problem(Target.named("cpu")).derived_facts()
    case.facts.update({name: value for name, value in derived.items() if name not in case.facts})


def records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, record) of each line; None for a line that is none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = parsed(line)
                check_record(record)
                yield number, record
            except DAMAGED:
                yield number, None


def holds_other(path: Path) -> bool:
    """Whether a file holds something of which no line is a record: it is no journal, and must not become one."""
    if not Path(path).is_file():
        return False
    lines = records(path)
    first = next(lines, None)
    return first is not None and first[1] is None and all(record is None for _, record in lines)


def read(path: Path) -> Results:
    """A results file as cases and contestants. A file that is not there has no cases."""
    found = Results(str(path))
    if not Path(path).is_file():
        return found
    with garbage.none_looked_for():
        for number, record in records(path):
            try:
                if record is None:
                    found.bad_lines.append(number)
                else:
                    take(found, record)
            except DAMAGED:
                found.bad_lines.append(number)
    return found


def take(found: Results, record: dict[str, Any]) -> None:
    kind = record["kind"]
    if kind == "run":
        _take_run(found, record)
        return
    if kind == "limits":
        found.limits = checked_limits(record["limits"])
        return
    if kind == "carried":
        _take_carried(found, Carried(record["variant"], record["from"], record["to"], record["but"]))
        return
    if kind == "case":
        _take_case(found, record)
        return
    case = found.cases[record["case"]]
    if kind == "done":
        case.done = True
        return
    entry = case.entries[record["key"]]
    if kind == "sample":
        entry.samples[record["round"]] = record
        vars(entry).pop("ms", None)
    elif kind == "check":
        entry.check, entry.failure = record, None
    elif kind == "failed":
        entry.failure = record


def _take_case(found: Results, record: dict[str, Any]) -> None:
    if found.mode == MIXED and "mode" not in record:
        raise ValueError("does not say how it was timed")
    known = found.cases.get(record["case"])
    fresh = CaseResults(
        record["op"],
        record["text"],
        record["shape"],
        record["facts"],
        record["flops"],
        illegal=record.get("illegal", {}),
        mode=str(record.get("mode", found.mode)),
    )
    fresh.entries = dict(known.entries) if known else {}
    for key, (variant, config, first, measured) in record["contestants"].items():
        fingerprint = found.source(record["case"], key, variant, measured)
        held = fresh.entries.get(key)
        if held is None or held.fingerprint != fingerprint:
            fresh.entries[key] = Entry(variant, config, first, fingerprint)
    found.cases[record["case"]] = fresh


def _take_carried(found: Results, one: Carried) -> None:
    found.carried.setdefault(one.variant, []).append(one)
    for name, case in found.cases.items():
        for key, entry in case.entries.items():
            if entry.variant == one.variant:
                entry.fingerprint = one.source(name, key, entry.fingerprint)


def _take_run(found: Results, record: dict[str, Any]) -> None:
    machine = record["machine"]
    if record.get("format") != FORMAT:
        raise ResultsError(f"{found.path}: format {record.get('format')}, this version reads {FORMAT}")
    if found.machine:
        differing = [n for n in ("device", "driver", "torch", "triton") if machine.get(n) != found.machine.get(n)]
        if differing or record["mode"] != found.mode:
            what = ", ".join(f"{n} {found.machine.get(n)} and {machine.get(n)}" for n in differing) or "two modes"
            raise ResultsError(f"{found.path}: mixes measurements of {what}; write to another file")
    found.machine, found.mode = found.machine or machine, record["mode"]
