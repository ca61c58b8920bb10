"""Options that describe a Problem, derived from the signature of each op's `of_shape`: a new op needs nothing here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import click

from registry.contract.describe import DTYPE_ALIASES, long_dtype
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.errors import InvalidArgument, UnknownOp
from registry.ops.op import Op
from registry.ops.parts.cases import MOST

_PLAIN = {"bool": bool, "float": float, "str": str}


def target_named(device: str | None, option: str = "--device") -> Target:
    """The target of that name, or this machine's: its first GPU, else its CPU."""
    if device is not None:
        try:
            return Target.named(device)
        except InvalidArgument as error:
            raise InvalidArgument(option, repr(device), error.allowed) from None
    import torch

    return Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def problem_options(op: Op) -> list[click.Parameter]:
    """--dtype, --shape (every size) and one option for each other argument of the op's `of_shape`."""
    sizes, others = _parameters(op)
    known = ",".join(name if p.default in (None, p.empty) else f"{name}={p.default}" for name, p in sizes.items())
    options: list[click.Parameter] = [
        click.Option(
            ["--shape"],
            metavar="SIZES",
            help=f"Sizes, and words as kreg tune takes them (causal); those left out are as here: {known}",
        ),
        click.Option(
            ["--device"], metavar="NAME", help='A target: "H100", "RTX 3090", "sm90", "cpu". [default: this machine]'
        ),
    ]
    for name, parameter in others.items():
        options.append(_option(name, parameter))
    return options


def problem_from(op: Op, values: Mapping[str, Any]) -> Problem:
    """The Problem that parsed options describe. Raises InvalidArgument, which names the argument."""
    sizes, others = _parameters(op)
    given, words = _shape(values.get("shape"), sizes, others)
    for name in others:
        value = values.get(name)
        value = words.get(name) if value is None else value
        if value is None:
            continue
        if "dtype" in name:
            value = long_dtype(value)
        elif _kind(others[name]) is None:
            value = _numbers(name, value)
        given[name] = value
    problem: Problem = op.problem_type.of_shape(target_named(values.get("device")), **given)  # type: ignore[attr-defined]
    return problem


def _parameters(op: Op) -> tuple[dict[str, inspect.Parameter], dict[str, inspect.Parameter]]:
    """The sizes (int) and the other arguments of the op's `of_shape`."""
    of_shape = getattr(op.problem_type, "of_shape", None)
    if of_shape is None:
        raise UnknownOp(op.name, ["ops whose problem type has of_shape(target, ...)"])
    found = {n: p for n, p in inspect.signature(of_shape).parameters.items() if p.kind is p.KEYWORD_ONLY}
    sizes = {name: p for name, p in found.items() if _annotation(p) == "int"}
    return sizes, {name: p for name, p in found.items() if name not in sizes}


def _annotation(parameter: inspect.Parameter) -> str:
    """ "int" for int and for int | None."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.split("|")[0].strip()


def _kind(parameter: inspect.Parameter) -> type | None:
    return _PLAIN.get(_annotation(parameter))


def _option(name: str, parameter: inspect.Parameter) -> click.Option:
    flag = "--" + name.replace("_", "-")
    kind = _kind(parameter)
    if kind is bool:
        return click.Option([flag, name], is_flag=True, default=None)
    shown = f"[default: {parameter.default}]" if parameter.default not in (None, "", parameter.empty) else ""
    if "dtype" in name:
        shown = f"A torch dtype or one of {', '.join(DTYPE_ALIASES)}. {shown}".strip()
    if kind is None:
        return click.Option([flag, name], metavar="N[,N]", help="One number or several; none for no limit.")
    return click.Option([flag, name], type=float if kind is float else str, help=shown or None)


def _shape(
    text: str | None, sizes: Mapping[str, inspect.Parameter], others: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes, and what else is said as `kreg tune` says it: "b=4,s=1024,causal,window=255:0,dtype=float16"."""
    found: dict[str, Any] = {}
    words: dict[str, Any] = {}
    for part in (text or "").replace(",", " ").split():
        name, given, value = part.partition("=")
        if name in found or name in words:
            raise InvalidArgument("--shape", f"two values of {name}", "one")
        kind = _kind(others[name]) if name in others else None
        if name in sizes and value.lstrip("-").isdecimal():
            found[name] = int(value)
            if found[name] > MOST:
                raise InvalidArgument("--shape", repr(part), f"sizes of up to {MOST}")
        elif kind is bool and value.lower() in ("true", "false", "") and bool(value) == bool(given):
            words[name] = value.lower() != "false"
        elif kind is float and _is_number(value):
            words[name] = float(value)
        elif name in others and kind not in (bool, float) and value:
            words[name] = value if kind is str else value.replace(":", ",")
        else:
            allowed = f"NAME=INTEGER with {', '.join(sizes)}, or a word or NAME=VALUE with {', '.join(others)}"
            raise InvalidArgument("--shape", repr(part), allowed)
    return found, words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def matching(configs: Iterable[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configs with these values, which are spelled as on a command line."""
    return [dict(c) for c in configs if all(str(c.get(name)) == str(value) for name, value in asked.items())]


def _numbers(name: str, text: str) -> int | tuple[int | None, ...] | None:
    """ "256" as 256, "256,0" as (256, 0), "none" as None."""
    try:
        found = [None if part in ("none", "") else int(part) for part in text.lower().replace(" ", "").split(",")]
    except ValueError:
        raise InvalidArgument(f"--{name}", repr(text), "integers or none, such as 256 or 256,0") from None
    return found[0] if len(found) == 1 else tuple(found)
