"""Checks of a declaration when it is registered: that its op knows its claims, that their values exist, and that its
functions can be called as they will be."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from registry.contract.capability import OWN_CLAIMS, Design, Requires, strings
from registry.contract.problem import PROBLEM_TYPES, Problem
from registry.contract.variant import Variant
from registry.errors import DeclarationError, shown

__all__ = ["HANDED", "Handed", "check_declaration", "never_met"]


class Handed(NamedTuple):
    """What an op hands to the functions of a variant."""

    tensors: tuple[str, ...]
    """By position."""
    fixed: tuple[str, ...]
    """Keywords of `run` alone: they are the same for one Problem, which `prepare` has seen."""
    varying: tuple[str, ...]
    """Keywords of `run` and of a prepared launch: they differ from call to call."""


HANDED: dict[str, Callable[[Variant], Handed]] = {}
"""By op, which adds itself: what it hands to a variant with these claims."""


def check_declaration(variant: Variant) -> None:
    """Raise DeclarationError for what cannot be right. An op that is not known yet is not asked."""
    try:
        check_claims(variant.requires, variant.op)
        _check_kinds("", variant, ("traceable", "builds_each_size", "summary"))
        _check_kinds("design: ", variant.design, [one.name for one in dataclasses.fields(Design)])
        _check_design(variant.design)
        _check_configs(variant)
        _check_functions(variant)
    except DeclarationError as error:
        raise DeclarationError(f"Variant {variant.name}: {error}") from None


def _check_design(design: Design) -> None:
    """Raise for sizes below those that there are, and for no language."""
    for name, value in vars(design).items():
        if isinstance(value, tuple):
            fine, allowed = all(type(one) is int and one > 0 for one in value), "positive integers"
        elif isinstance(value, str):
            fine, allowed = bool(value), "a name"
        else:
            fine, allowed = value >= 0, "0 or more"
        if not fine:
            raise DeclarationError(f"Design.{name}: got {shown(value)}; allowed: {allowed}")


def _check_configs(variant: Variant) -> None:
    """Raise for a config that is listed twice: it would be timed twice, and tables know it by its values."""
    listed = [] if callable(variant.configs) else [list(config.items()) for config in variant.configs]
    for place, config in enumerate(listed):
        if sorted(config) in map(sorted, listed[:place]):
            got = f"got {shown(dict(config))} twice"
            raise DeclarationError(f"configs: {got}; allowed: each once")


def check_claims(requires: Requires, op: str) -> None:
    """Raise DeclarationError for a claim that the op does not have, or a value that there is not."""
    _check_dtypes("dtypes", requires.dtypes)
    for name in _PLAIN:
        _check_claim(name, getattr(requires, name), getattr(Requires, name))
    if op not in PROBLEM_TYPES:
        return
    kind = PROBLEM_TYPES[op]
    allowed = kind.claims()
    for name, value in requires.claims.items():
        if name not in allowed:
            known = ", ".join(sorted({*OWN_CLAIMS, *allowed}))
            raise DeclarationError(f"Requires.{name}: got a claim that {op} does not have; allowed: {known}")
        if allowed[name] == ():
            strings(name, value)
        if name.startswith("dtypes") or name.endswith("dtypes"):
            _check_dtypes(name, value)
    _check_values(requires, op, kind)


def _check_dtypes(name: str, dtypes: tuple[str, ...]) -> None:
    import torch

    for dtype in dtypes:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise DeclarationError(
                f"Requires.{name}: got {shown(dtype)}; allowed: names of torch dtypes, such as 'bfloat16'"
            )


def _check_values(requires: Requires, op: str, kind: type[Problem]) -> None:
    for field, how in kind.queries().items():
        claim = requires.claim(how.claim) if how.claim else None
        known = kind.known_values.get(field)
        if known and isinstance(claim, tuple):
            for value in claim:
                if value not in known:
                    allowed = ", ".join(map(repr, filter(None, known)))
                    raise DeclarationError(f"Requires.{how.claim}: got {shown(value)}; allowed of {op}: {allowed}")
        if claim and how.dtypes and not how.dtypes & {*requires.dtypes}:
            got = f"{shown(claim)} beside dtypes {', '.join(requires.dtypes) or 'none'}"
            allowed = f"beside {' or '.join(sorted(how.dtypes))}, which alone ask for it"
            raise DeclarationError(f"Requires.{how.claim}: got {got}; allowed: {allowed}")
    unclaimed = kind.claims()
    several = {how.claim for how in kind.queries().values() if how.rule == "closed"}  # True, or the values allowed
    for name in requires.claims.keys() - several:
        if unclaimed[name] is not None or f"{name}_multiple" in unclaimed:
            _check_claim(name, requires.claims[name], unclaimed[name])
    for name, bounds in requires.claims.items():
        multiple = requires.claims.get(f"{name}_multiple")
        if multiple and bounds and bounds[1] // multiple * multiple < bounds[0]:
            got = f"{bounds}, in which no multiple of {multiple} lies"
            raise DeclarationError(f"Requires.{name}: got {got}; allowed: a range that holds some size")


_PLAIN = ("deterministic", "ieee", "base_alignment", "stride_alignment", "unit_inner_stride")
"""Claims of every op that are a flag or a number."""


def _check_claim(name: str, value: Any, unclaimed: Any) -> None:
    """Raise for a claim of another kind than what it is where it is not made: a flag, a number, a range."""
    allowed = ""
    if name.endswith("_alignment"):
        allowed = "" if type(value) is int and value in (1, 2, 4, 8, 16) else "1, 2, 4, 8 or 16"
    elif isinstance(unclaimed, bool):
        allowed = "" if isinstance(value, bool) else "True or False"
    elif isinstance(unclaimed, int):
        allowed = "" if type(value) is int and value > 0 else "a positive integer"
    elif unclaimed is None and value is not None:
        numbers = isinstance(value, tuple) and len(value) == 2 and all(type(one) is int for one in value)
        allowed = "" if numbers and 0 <= value[0] <= value[1] > 0 else "(lowest, highest), two integers of sizes"
    if allowed:
        raise DeclarationError(f"Requires.{name}: got {shown(value)}; allowed: {allowed}")


def _check_kinds(what: str, declared: Variant | Design, names: Iterable[str]) -> None:
    """Raise for a flag, number, text or tuple that is of another kind than its default."""
    for name in names:
        value, kind = getattr(declared, name), type(getattr(type(declared), name))
        if type(value) is not kind:
            raise DeclarationError(f"{what}{name}: got {shown(value)}; allowed: a value of type {kind.__name__}")


def never_met(variant: Variant) -> list[str]:
    """Why no call there can be meets the claims: of what every call has some value they allow none. Such a declaration
    is no mistake by itself, for claims may be added to one in steps, but nobody would see why it never runs."""
    requires, found = variant.requires, []
    if not requires.arch:
        found.append("arch: none is claimed")
    kind = PROBLEM_TYPES.get(variant.op)
    for field, how in kind.queries().items() if kind is not None else ():
        if how.rule in ("member", "range") and not requires.claim(how.claim):
            found.append(f"{how.claim}: none is claimed, and every call has a {field}")
    for name, spec in requires.toolchain.items():
        if not _some_version(spec):
            found.append(f"toolchain: no version of {name} is {spec}")
    return list(dict.fromkeys(found))


def _some_version(spec: str) -> bool:
    """Whether a version lies in a range: one that it names, one shortly after that, or the first."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    named = [one.version.removesuffix(".*") for one in SpecifierSet(spec)]
    versions = ["0", *(f"{version}{more}" for version in named for more in ("", ".1", ".0.0.0.1"))]
    try:
        return any(SpecifierSet(spec).contains(version, prereleases=True) for version in versions)
    except InvalidVersion:  # of "===", which compares text
        return True


# --- functions ----------------------------------------------------------------------------------------------------


def _check_functions(variant: Variant) -> None:
    if variant.op in HANDED:
        handed = HANDED[variant.op](variant)
        keywords = ("config", *handed.fixed, *handed.varying)
        _check_call(variant, "run", variant.run, handed.tensors, keywords)
        if variant.schedule is not None and "schedule" not in handed.varying:
            allowed = f"None: calls of {variant.op} do not come in steps"
            raise DeclarationError(f"schedule: got a function; allowed: {allowed}")
    for name, positional in (
        ("prepare", ("problem", "config")),
        ("builds", ("problem", "config")),
        ("schedule", ("problem", "config")),
        ("cost", ("problem", "config")),
        ("waits", ("problem",)),
        ("design_of", ("config",)),
    ):
        _check_call(variant, name, getattr(variant, name), positional)
    if callable(variant.configs):
        _check_call(variant, "configs", variant.configs, ("problem",))
    for name in ("shared_memory", "registers", "rule"):
        _check_call(variant, f"requires.{name}", getattr(variant.requires, name), ("problem", "config"))
    _check_call(variant, "requires.never", variant.requires.never, ("problem",))


def _check_call(
    variant: Variant, name: str, function: Any, positional: tuple[str, ...], keywords: tuple[str, ...] = ()
) -> None:
    """Whether a function can be called like this, as far as it tells; one that is not there need not be."""
    if function is None:
        return
    if not callable(function):
        raise DeclarationError(f"{name}: got {shown(function)}; allowed: a function")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise DeclarationError(f"{name}: got an async function; allowed: one that is not")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in, and silent about it
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join((*positional, *(["*", *keywords] if keywords else ())))
        raise DeclarationError(
            f"{name}: got {name}{signature} ({error}); allowed: what {variant.op} can call as {name}({called})"
        ) from None
