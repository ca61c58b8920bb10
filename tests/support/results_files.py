"""Small files of results, as a sweep writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from registry.contract.target import Target
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, digest
from registry.tuning.journal import contestant_key

MACHINE = dict(device="NVIDIA H200", arch="sm90", driver="580.1", torch="2.11.0", triton="3.6.0", date="2026-01-02")
Times = dict[str, list[tuple[dict[str, Any], list[float]]]]


def lines(op: str, shapes: dict[str, Times], mode: str = "events", **machine: Any) -> list[str]:
    """A journal of {shape: {variant: [(config, milliseconds of each round), ...]}}."""
    records: list[dict[str, Any]] = [{"kind": "run", "format": 1, "machine": {**MACHINE, **machine}, "mode": mode}]
    for text, times in shapes.items():
        case = Case.parse(op, text)
        problem = case.problem(Target.named("H200"))
        key = digest([op, case.text])
        keys = {contestant_key(v, c): (v, c, rounds) for v, found in times.items() for c, rounds in found}
        records.append(
            {
                "kind": "case",
                "case": key,
                "op": op,
                "text": case.text,
                "shape": case.data(),
                "facts": problem.facts(),
                "flops": op_named(op).flops(problem),
                "illegal": {"nobody.has_this": "arch: got sm90, allowed sm120"},
                "contestants": {k: [v, c, True, "abc"] for k, (v, c, _) in keys.items()},
            }
        )
        for k, (_, _, rounds) in keys.items():
            records += [
                {"kind": "sample", "case": key, "key": k, "round": n, "ms": ms, "sm_mhz": 1980, "watts": 400 + n}
                for n, ms in enumerate(rounds)
            ]
        records.append({"kind": "done", "case": key})
    return [json.dumps(record) for record in records]


def write(path: Path, *arguments: Any, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines(*arguments, **more)) + "\n", encoding="utf-8")
    return path
