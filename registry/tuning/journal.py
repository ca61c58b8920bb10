"""Raw results: an append-only file of JSON lines, safe against crashes, and what it says when it is read back.

Kinds of line: `run` (what was measured on), `case` (a shape, its facts, who may run it), `check` (the accuracy gate),
`sample` (one turn of one contestant in one round), `failed`, `done` (a case is complete), `limits` (what the card
reaches at best). A line that was cut off by a crash is passed over; a writer begins on a fresh line after it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from registry import garbage
from registry.contract.problem import PROBLEM_TYPES
from registry.contract.target import Target
from registry.errors import RegistryError
from registry.ops.parts.cases import Case, digest
from registry.tables.match import kind_of
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


def make_folder(path: Path) -> None:
    """A folder, with those around it, that nobody else may write to, whatever the umask says."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


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


# What a line must hold, so that nobody who reads results has to doubt it: JSON can be valid and still be no result.

DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a line of anything but our own making may raise."""
_decoded = msgspec.json.Decoder().decode
_TEXT, _NUMBER, _MAPPING = (str,), (int, float), (dict,)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "run": {"machine": _MAPPING, "mode": _TEXT},
    "case": {"case": _TEXT, "op": _TEXT, "text": _TEXT, "shape": _MAPPING, "flops": _NUMBER, "contestants": _MAPPING},
    "sample": {"case": _TEXT, "key": _TEXT, "round": (int,), "ms": _NUMBER},
    "check": {"case": _TEXT, "key": _TEXT},
    "failed": {"case": _TEXT, "key": _TEXT, "why": _TEXT},
    "done": {"case": _TEXT},
    "limits": {"limits": _MAPPING},
}


def parsed(line: str) -> dict[str, Any]:
    """A line as a mapping. Raises one of DAMAGED for what is none."""
    try:
        record = _decoded(line)
    except ValueError:  # or a line with a NaN, which json takes
        record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError(f"expects a mapping, got {type(record).__name__}")
    return record


def check_record(record: Mapping[str, Any]) -> None:
    """Raise one of DAMAGED unless a line of a journal holds what its kind must hold."""
    kind = record["kind"]
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ValueError(f"no such kind of line: {kind!r}")
    check_types(record, fields)
    if kind == "run":
        check_machine(record["machine"])
    elif kind == "limits":
        checked_limits(record["limits"])
    elif kind == "case":
        check_facts(record["op"], record["facts"])
        check_flops(record["flops"])
        check_types(record.get("illegal", {}), dict.fromkeys(record.get("illegal", {}), _TEXT))
        for variant, config, first, fingerprint in record["contestants"].values():
            check_types({"variant": variant, "fingerprint": fingerprint}, {"variant": _TEXT, "fingerprint": _TEXT})
            check_types({"first": first}, {"first": (bool,)})
            check_config(config)
    elif kind == "sample":
        check_time(record["ms"])
    elif kind == "failed" and not isinstance(record.get("detail", ""), str):
        raise TypeError("detail: expects text")


def check_types(record: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]]) -> None:
    for name, kinds in fields.items():
        value = record[name]
        if type(value) in kinds:  # as nearly all are: there are hundreds of thousands
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name}: got {type(value).__name__}")


def check_time(ms: float) -> None:
    if not 0 < ms < 1e12:
        raise ValueError(f"ms: got {ms}")


def check_flops(flops: float) -> None:
    if not 0 <= flops < 1e30:
        raise ValueError(f"flops: got {flops}")


def check_machine(machine: Mapping[str, Any]) -> None:
    for name in ("device", "arch", "driver", "torch", "triton", "date"):
        if not isinstance(machine.get(name, ""), (str, type(None))):
            raise TypeError(f"machine.{name}: got {type(machine[name]).__name__}")
    datetime.date.fromisoformat(machine.get("date") or "2000-01-01")
    check_types(machine, {"device": _TEXT})


def checked_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """{"gbs": ..., "tflops": {dtype: ...}}, all positive. Raises one of DAMAGED for anything else."""
    gbs, tflops = float(limits["gbs"]), {str(k): float(v) for k, v in limits["tflops"].items()}
    if not all(0 < rate < 1e9 for rate in (gbs, *tflops.values())):
        raise ValueError(f"limits: got {limits}")
    return {"gbs": gbs, "tflops": tflops}


def check_config(config: Mapping[str, Any]) -> None:
    if not isinstance(config, dict) or not all(isinstance(value, (bool, int, float, str)) for value in config.values()):
        raise TypeError("config: expects a flat mapping")


def check_facts(op: str, facts: Mapping[str, Any]) -> None:
    """Facts are compared with each other and with tables, which takes values of the kinds that the op says."""
    check_types({"facts": facts}, {"facts": _MAPPING})
    kinds = PROBLEM_TYPES[op].fact_kinds() if op in PROBLEM_TYPES else {}
    for name, how in kinds.items():
        allowed = {"int": (int,), "float": (int, float), "str": (str,)}.get(kind_of(how))
        value = facts.get(name)
        if allowed and value is not None and (not isinstance(value, allowed) or isinstance(value, bool)):
            raise TypeError(f"facts.{name}: got {type(value).__name__}")


def take(found: Results, record: dict[str, Any]) -> None:
    kind = record["kind"]
    if kind == "run":
        _take_run(found, record)
        return
    if kind == "limits":
        found.limits = checked_limits(record["limits"])
        return
    if kind == "case":
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
        for key, (variant, config, first, fingerprint) in record["contestants"].items():
            held = fresh.entries.get(key)
            same = held is not None and held.fingerprint == fingerprint
            fresh.entries[key] = held if held and same else Entry(variant, config, first, fingerprint)
        found.cases[record["case"]] = fresh
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
