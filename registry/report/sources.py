"""Files of results as a report takes them. What is no result, or damaged, is passed over, named and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import InvalidArgument
from registry.tuning import journal, observed
from registry.tuning.journal import Results, ResultsError
from registry.tuning.lines import DAMAGED, check_machine, checked_limits

SHOWN_LINES = 5


@dataclass
class Sources:
    """All that was read."""

    runs: dict[str, Results] = field(default_factory=dict)
    """Sweeps by a short name."""
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """CPU cost of calls: {"machine": {...}, "unit": ..., "figures": {call: [...]}} by name."""
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a card reaches at best, by device: registry.tuning.limits."""
    timelines: list[dict[str, Any]] = field(default_factory=list)
    """Figures of recorded launches, as `kreg profile --figures` writes them."""
    passed_over: list[str] = field(default_factory=list)
    """What could not be used, and why, for people."""


def read(paths: Iterable[Path], option: str = "RESULTS") -> Sources:
    """Results files, and all those in folders. A path that is not there is an error of the argument that named it; one
    that is no result is named."""
    found = Sources()
    files = [file for path in paths for file in _files(path, option)]
    names = _short_names(files)
    for file in files:
        try:
            _take(found, names[file], file)
        except (ResultsError, OSError, *DAMAGED) as error:
            found.passed_over.append(f"{file}: {_what(error)}")
    return found


def _files(path: Path, option: str) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".json"))
    if not path.is_file():
        raise InvalidArgument(option, str(path), "files of results or folders that hold some")
    return [path]


def _short_names(files: list[Path]) -> dict[Path, str]:
    """The stem of each file, with as many folders as it takes to tell them apart."""
    names = {}
    for file in files:
        parts = file.with_suffix("").parts
        alike = [other for other in files if other != file and other.stem == file.stem]
        names[file] = "/".join(parts[-2:]) if alike else file.stem
        if any(names.get(other) == names[file] for other in alike):
            names[file] = str(file.with_suffix(""))
    return names


def _take(found: Sources, name: str, file: Path) -> None:
    if file.suffix == ".jsonl":
        _take_sweep(found, name, file)
        return
    text = file.read_text(encoding="utf-8")
    if not text.strip():
        found.passed_over.append(f"{file}: no measurement in it")
        return
    data = json.loads(text)
    if isinstance(data, Mapping) and "timelines" in data:
        found.timelines += observed.rows(file)
        return
    if not isinstance(data, Mapping) or not isinstance(data.get("machine"), Mapping):
        raise ValueError("no file of results: it names no machine")
    check_machine(data["machine"])
    if isinstance(data.get("figures"), Mapping):
        found.calls[name] = {
            **data,
            "figures": {str(k): sorted(map(float, v)) for k, v in data["figures"].items() if v},
        }
    elif isinstance(data.get("limits"), Mapping):
        found.limits[data["machine"]["device"]] = checked_limits(data["limits"])
    else:
        raise ValueError("no file of results that a report knows")


def _take_sweep(found: Sources, name: str, file: Path) -> None:
    results = journal.read(file)
    bad = results.bad_lines
    if bad and not (results.cases or results.machine):
        found.passed_over.append(f"{file}: no measurement in it ({_counted(len(bad), 'line')}, none of kreg tune's)")
        return
    if bad:
        lines = ", ".join(map(str, bad[:SHOWN_LINES])) + (", ..." if len(bad) > SHOWN_LINES else "")
        found.passed_over.append(f"{file}: {_counted(len(bad), 'damaged line')} passed over ({lines})")
    if any(case.timed for case in results.cases.values()):
        found.runs[name] = results
    else:
        found.passed_over.append(f"{file}: no measurement in it")
    if results.limits and results.machine:
        found.limits.setdefault(results.machine["device"], results.limits)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _what(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, (ResultsError, ValueError)) and text else f"{type(error).__name__}: {text}"
