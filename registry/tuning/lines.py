"""What a line of raw results must hold, so that nobody who reads results has to doubt it: JSON can be valid and still
be no result."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from registry.contract.problem import PROBLEM_TYPES
from registry.tables.match import kind_of

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
    "carried": {"variant": _TEXT, "from": _TEXT, "to": _TEXT, "but": _MAPPING},
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
    elif kind == "carried":
        check_types(record["but"], dict.fromkeys(record["but"], (list,)))
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
