"""Declarations as words and as plain data: what `kreg list` and docs/variants.md say about each variant.

Everything is derived from the fields of Requires and Design, so a new claim or trait shows up without a change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from registry.contract.capability import OWN_CLAIMS, Design, Reason, Requires
from registry.contract.problem import PROBLEM_TYPES, Problem, known_claims
from registry.contract.variant import Variant
from registry.notices import shown

SHORT_DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "e5m2",
}
DTYPE_ALIASES: Mapping[str, str] = {short: dtype for dtype, short in SHORT_DTYPES.items()} | {
    "half": "float16",
    "e4m3": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
}
"""What options and shapes may say for a dtype of torch's."""


def short_dtype(dtype: str) -> str:
    """ "bf16" for "bfloat16": the name that the command line takes, too."""
    return SHORT_DTYPES.get(dtype, dtype)


def long_dtype(name: str) -> str:
    """ "bfloat16" for "bf16"; what is no short name, as it is."""
    return DTYPE_ALIASES.get(name.lower(), name)


def dtypes_text(dtypes: tuple[str, ...]) -> str:
    return " ".join(map(short_dtype, dtypes))


def features(requires: Requires) -> list[str]:
    """What is claimed beyond the plain case: "causal", "gqa", "activations: relu gelu"."""
    found = [name for name in ("deterministic", "ieee") if getattr(requires, name)]
    for name, unclaimed in _claimed(requires):
        value = requires.claims[name]
        if unclaimed is False and value:
            found.append(name if value is True else f"{name}: {plain_data(value)}")
        elif unclaimed == () and value and "dtypes" not in name:
            found.append(f"{name}: {' '.join(value)}")
    return found


def sizes(requires: Requires) -> list[str]:
    """Which sizes are claimed: "head_dim 64..256 in steps of 8", "seqlen_k in steps of 128"."""
    found, known = [], known_claims()
    for name, unclaimed in _claimed(requires):
        base, value = name.removesuffix("_multiple"), requires.claims[name]
        if unclaimed == 1 and value > 1 and base not in requires.claims:
            found.append(f"{base} in steps of {value}")
        elif value is not None and f"{name}_multiple" in known:
            (low, high), step = value, requires.claims.get(f"{name}_multiple", 1)
            span = str(low) if low == high else f"{low}..{high}"
            found.append(f"{name} {span}" + (f" in steps of {step}" if step > 1 else ""))
    return found


def _claimed(requires: Requires) -> list[tuple[str, Any]]:
    """The op's own claims that are made, in the op's order, each with what it is where it is not made."""
    return [(name, unclaimed) for name, unclaimed in known_claims().items() if name in requires.claims]


def memory(requires: Requires) -> list[str]:
    """How operands may lie in memory: their orders, alignments, inner strides."""
    found = [" ".join(requires.layouts)] if requires.layouts else []
    if requires.base_alignment > 1:
        found.append(f"bases aligned to {requires.base_alignment} bytes")
    if requires.stride_alignment > 1:
        found.append(f"strides aligned to {requires.stride_alignment} bytes")
    if not requires.unit_inner_stride and "strided" in requires.layouts:
        found.append("any inner stride")
    return found


def limits(requires: Requires) -> list[str]:
    """What is held against the toolchain and against the target, config by config."""
    found = [f"{name} {spec}" for name, spec in requires.toolchain.items()]
    checked = [name for name in ("shared_memory", "registers", "rule") if getattr(requires, name) is not None]
    return found + ([f"{' and '.join(checked).replace('_', ' ')} checked per config"] if checked else [])


def design_traits(design: Design) -> list[str]:
    """How a kernel is built, dsl first, the plain case left out: "gluon", "2 warp groups", "warp-specialized"."""
    found = [design.dsl]
    if design.warp_groups > 1:
        found.append(f"{design.warp_groups} warp groups")
    if design.pipeline_stages > 1:
        found.append(f"{design.pipeline_stages} stages")
    if design.warp_specialized:
        found.append("warp-specialized")
    if design.pipeline_tasks > 1:
        found.append(f"{design.pipeline_tasks} tasks")
    if design.persistent:
        found.append("persistent")
    if design.tile:
        found.append(f"tile {'x'.join(map(str, design.tile))}")
    return found


def variant_data(variant: Variant) -> dict[str, Any]:
    """The whole declaration as plain data. Functions (rules, budgets) are shown as true."""
    known = PROBLEM_TYPES[variant.op].claims() if variant.op in PROBLEM_TYPES else variant.requires.claims
    claims = [name for name in known if name not in OWN_CLAIMS]
    return {
        "name": variant.name,
        "op": variant.op,
        "summary": variant.summary,
        "origin": variant.origin,
        "requires": {name: _plain(getattr(variant.requires, name)) for name in (*OWN_CLAIMS, *claims)},
        "design": {f.name: _plain(getattr(variant.design, f.name)) for f in dataclasses.fields(variant.design)},
        "configs": None if callable(variant.configs) else [dict(config) for config in variant.configs],
        "prepares": variant.prepare is not None,
    }


def _plain(value: Any) -> Any:
    if callable(value):
        return True
    if isinstance(value, Mapping):
        return {name: plain_data(item) for name, item in value.items()}
    return plain_data(value)


def config_text(config: Mapping[str, Any]) -> str:
    """A config in one line; empty for the empty one."""
    return ", ".join(f"{name}={value}" for name, value in config.items())


def reason_data(reason: Reason) -> dict[str, Any]:
    found = {name: getattr(reason, name) for name in ("code", "field", "operand", "got", "allowed", "fix")}
    return {name: shown(value) if isinstance(value, str) else plain_data(value) for name, value in found.items()}


def problem_data(problem: Problem) -> dict[str, Any]:
    target = problem.target
    return {
        "op": problem.op,
        **{name: plain_data(value) for name, value in problem.facts().items()},
        "target": {"arch": target.arch, "name": target.name, "sm_count": target.sm_count},
    }


def plain_data(value: Any) -> Any:
    """Anything as JSON can hold it."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    return shown(value)
