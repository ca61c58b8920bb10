"""What a variant may run (`Requires`), how it is built (`Design`), and why it refuses (`Reason`).

Legality is closed-world: `Requires()` claims nothing, and every field of a Problem must be answered by a claim. All
reasons are collected, never just the first, and each carries the value it met, the values allowed and, where one
exists, a fix.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from registry.contract.problem import Problem, Query, known_claims
from registry.errors import DeclarationError
from registry.errors import shown as spelled
from registry.notices import shown

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

TOOLS = ("torch", "triton", "driver", "cuda", "cudnn")
"""Whose versions a Target knows."""
Config = Mapping[str, Any]
MOST_DIGITS = 18
"""Of an integer in a config or a table: an int64 holds it, and int() and str() are far from their own limits."""
Budget = Callable[[Any, Config], int]


def too_long(value: object) -> bool:
    """Whether a value is an integer of more digits than configs and tables hold."""
    return type(value) is int and not -(10**MOST_DIGITS) < value < 10**MOST_DIGITS


@dataclass(frozen=True)
class Reason:
    """One reason why a variant may not run a problem."""

    code: str
    field: str
    got: Any
    allowed: Any
    fix: str | None = None
    operand: str | None = None

    def __str__(self) -> str:
        where = f"{shown(self.operand)}.{shown(self.field)}" if self.operand else shown(self.field)
        fix = f"; fix: {shown(self.fix)}" if self.fix else ""
        return f"{where}: got {shown(self.got)}, allowed {shown(self.allowed)}{fix}"


@dataclass(frozen=True)
class Design:
    """How a kernel is built. Never changes results: for tables, filters, plots and search."""

    warp_groups: int = 1
    """Consumer warp groups: those that issue matrix instructions."""
    pipeline_stages: int = 1
    """Buffers between memory and the matrix units."""
    warp_specialized: bool = False
    """Different warps run different code (producer and consumers)."""
    pipeline_tasks: int = 1
    """Concurrent roles inside one block, e.g. 2 for producer + consumers."""
    tile: tuple[int, ...] = ()
    persistent: bool = False
    dsl: str = "triton"


@dataclass(frozen=True, init=False)
class Requires:
    """What a variant claims to run. An absent claim is a refusal.

    `arch` entries are "sm90" (exactly), "sm80+" (that or any newer NVIDIA GPU), "cpu" or "any".
    `shared_memory` (bytes) and `registers` (32-bit, per block) are functions of (problem, config), held against the
    target; `rule(problem, config)` yields further Reasons. All three may rule out single configs. `never(problem)` may
    say beforehand that they rule out every config, which saves making all configs to refuse each.
    """

    arch: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    deterministic: bool = False
    ieee: bool = False
    """float32 in full precision; without it float32 is legal only where torch's setting permits tf32."""
    # memory
    layouts: tuple[str, ...] = ()
    base_alignment: int = 1
    stride_alignment: int = 1
    unit_inner_stride: bool = True
    # environment and resources
    toolchain: Mapping[str, str] = field(default_factory=dict)
    shared_memory: Budget | None = None
    registers: Budget | None = None
    rule: Callable[[Any, Config], Iterable[Reason]] | None = None
    never: Callable[[Any], bool] | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)
    """What is claimed of the op's own fields. Written as further keywords, `Requires(causal=True, head_dim=(64, 128))`,
    and read as attributes; each op's Problem says which there are."""

    def __init__(self, **given: Any) -> None:
        claims = given.pop("claims", {})
        if not isinstance(claims, Mapping):
            raise DeclarationError(f"Requires.claims: got {spelled(claims)}; allowed: a dict of claims by name")
        for own in dataclasses.fields(self):
            default = own.default if own.default is not dataclasses.MISSING else {}
            object.__setattr__(self, own.name, given.pop(own.name, default))
        claims = {name: _listed(value) for name, value in ({**claims} | given).items()}
        object.__setattr__(self, "claims", claims)
        object.__setattr__(self, "_let_through", (None, {}))  # a target, and which of its kinds of problems are
        object.__setattr__(self, "_asking", {})  # by type of problems, how their sizes are held against the claims
        for name in ("arch", "dtypes", "layouts"):
            object.__setattr__(self, name, strings(name, getattr(self, name)))
        for entry in self.arch:
            if not re.fullmatch(r"sm[1-9]\d+\+?|cpu|any", entry):
                raise DeclarationError(f'Requires.arch: got {spelled(entry)}; allowed: "sm90", "sm80+", "cpu", "any"')
        if not isinstance(self.toolchain, Mapping):
            raise DeclarationError(f"Requires.toolchain: got {spelled(self.toolchain)}; allowed: versions by name")
        for name, spec in self.toolchain.items():
            if name not in TOOLS:
                raise DeclarationError(f"Requires.toolchain: got {spelled(name)}; allowed: {', '.join(TOOLS)}")
            try:
                _specifiers(spec)
            except (ValueError, TypeError, AttributeError) as error:
                raise DeclarationError(
                    f"Requires.toolchain[{spelled(name)}]: got {spelled(spec)}; allowed: e.g. '>=3.6,<4'"
                ) from error

    def __getattr__(self, name: str) -> Any:
        claims = self.__dict__.get("claims", {})  # absent while a copy is being made
        known = claims if name in claims else known_claims()
        if name not in known:
            raise AttributeError(f"Requires has no {spelled(name)}: no op has such a claim")
        return known[name]

    def claim(self, name: str) -> Any:
        """The claim of that name; None where the op has such a claim and the variant does not make it."""
        return getattr(self, name) if name in _OWN else self.claims.get(name)


def _listed(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value, key=str))
    return tuple(value) if isinstance(value, list) else value


OWN_CLAIMS = tuple(f.name for f in dataclasses.fields(Requires) if f.name != "claims")
"""What every variant may claim, whatever the op."""
_OWN = frozenset(OWN_CLAIMS)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """The claim, if it is a list of words."""
    listed = isinstance(value, (tuple, list, set, frozenset))
    if not listed or not all(isinstance(item, str) and item for item in value):
        raise DeclarationError(f"Requires.{name}: got {spelled(value)}; allowed: a tuple of strings, none empty")
    return tuple(value)


def reasons_against(requires: Requires, problem: Problem) -> list[Reason]:
    """Every reason, whatever the config, why a variant with these claims may not run the problem."""
    return list(_reasons(requires, problem))


def _reasons(requires: Requires, problem: Problem) -> Iterator[Reason]:
    yield from target_reasons(requires, problem)
    for rule, name, how in rules_of(type(problem)):  # type: ignore[arg-type]
        yield from rule(requires, problem, name, how)


@functools.cache
def rules_of(kind: type[Problem]) -> list[tuple[Rule, str, Query]]:
    """How each field of a kind of problem is judged."""
    every = [
        (RULES[how.rule] if isinstance(how.rule, str) else how.rule, name, how) for name, how in kind.queries().items()
    ]
    return [(rule, name, how) for rule, name, how in every if rule is not _fact]


def config_reasons(requires: Requires, problem: Problem, config: Config) -> list[Reason]:
    """Every reason why this config may not run a problem that `reasons_against` lets through."""
    return [*_budget_reasons(requires, problem, config), *_rule_reasons(requires, problem, config)]


def config_meets(requires: Requires, problem: Problem, config: Config) -> bool:
    """Whether `config_reasons` is empty, told by the first reason; a budget takes longer to work out than a rule."""
    if requires.rule is not None and next(_rule_reasons(requires, problem, config), None) is not None:
        return False
    target = problem.target
    for budget, allowed in ((requires.shared_memory, target.shared_memory), (requires.registers, target.registers)):
        if budget is not None and not _holds(budget(problem, config), allowed):
            return next(_budget_reasons(requires, problem, config), None) is None  # which says what it got
    return True


def _holds(need: Any, allowed: int) -> bool:
    try:
        return bool(0 <= need <= allowed)
    except TypeError:
        return False


def _budget_reasons(requires: Requires, problem: Problem, config: Config) -> Iterator[Reason]:
    target = problem.target
    for name, allowed in (("shared_memory", target.shared_memory), ("registers", target.registers)):
        budget: Budget | None = getattr(requires, name)
        if budget is None:
            continue
        need = budget(problem, config)
        try:
            too_much = not need <= allowed
            if not need >= 0:
                raise TypeError
        except TypeError:
            text = f"Requires.{name}: got {spelled(need)}; allowed: a function that gives a number"
            raise DeclarationError(text) from None
        if too_much:
            fix = "use a smaller tile or fewer stages"
            yield Reason("resources", name, need, f"<= {allowed} on {target.name}", fix)


def _rule_reasons(requires: Requires, problem: Problem, config: Config) -> Iterator[Reason]:
    answer = requires.rule(problem, config) if requires.rule is not None else ()
    try:
        found = iter(answer)
    except TypeError:
        raise DeclarationError(f"Requires.rule: got {spelled(answer)}; allowed: a list of Reasons") from None
    for reason in found:
        if not isinstance(reason, Reason):
            raise DeclarationError(f"Requires.rule: got {type(reason).__name__}; allowed: Reasons")
        yield reason


@functools.cache
def _specifiers(spec: str) -> SpecifierSet:
    """A version range, parsed once. packaging is imported here, for it would be a third of the cost of our import."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(spec)


@functools.cache
def _within(spec: str, version: str) -> bool:
    return _specifiers(spec).contains(version, prereleases=True)


def arch_matches(claims: Iterable[str], arch: str) -> bool:
    """Whether an architecture is among claims such as "sm90", "sm80+", "cpu", "any"."""
    for entry in claims:
        if entry in ("any", arch):
            return True
        if entry.endswith("+") and arch.startswith("sm") and int(arch[2:]) >= int(entry[2:-1]):
            return True
    return False


def target_reasons(requires: Requires, problem: Problem) -> Iterator[Reason]:
    target = problem.target
    if not arch_matches(requires.arch, target.arch):
        yield Reason("arch", "arch", target.arch, ", ".join(requires.arch) or "none declared")
    for name, spec in requires.toolchain.items():
        version = getattr(target, name, "")
        if not version and target.arch == "cpu" and name == "driver":
            continue
        if not version or not _within(spec, version):
            yield Reason("toolchain", name, version or "not installed", spec, f'pip install "{name}{spec}"')


# --- rules: one function per way in which a field is judged, quick where nothing is asked that is not claimed -----


def _fact(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    return ()


def _flag(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    got = getattr(problem, name)
    if not got or (claim := requires.claim(how.claim)):
        return ()
    return (Reason("unclaimed", name, got, "off", how.fix(problem, claim) if how.fix else None),)


def _member(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    got, claim = getattr(problem, name), requires.claim(how.claim) or ()
    if got in claim:
        return ()
    fix = how.fix(problem, claim) if how.fix else None
    return (Reason("unclaimed", name, got, ", ".join(claim) or "none declared", fix),)


def _optional_member(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    """As `member`, but the empty value asks for nothing."""
    return _member(requires, problem, name, how) if getattr(problem, name) else ()


def _range(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    got, claim = getattr(problem, name), requires.claim(how.claim)
    multiple = requires.claim(f"{how.claim}_multiple") or 1
    low, high = claim if claim is not None else (0, 0)
    if claim is not None and low <= got <= high and got % multiple == 0:
        return ()
    allowed = (
        "none declared" if claim is None else f"{low}..{high}" + (f" in steps of {multiple}" if multiple > 1 else "")
    )
    padded = -(-max(got, low) // multiple) * multiple
    worth_it = got < padded <= min(high, 2 * got)  # more than half of it would be padding
    return (Reason("range", name, got, allowed, f"pad {name} {got} to {padded}" if worth_it else None),)


def _multiple(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    got, claim = getattr(problem, name), requires.claim(how.claim) or 1
    if not got % claim:
        return ()
    return (Reason("multiple", name, got, f"multiples of {claim}", f"pad {name} {got} to {-(-got // claim) * claim}"),)


def _closed(requires: Requires, problem: Problem, name: str, how: Query) -> Iterable[Reason]:
    """A field without a rule of its own: its default asks for nothing, all else must be claimed by name."""
    got, claim = getattr(problem, name), requires.claim(name)
    default = next(f.default for f in dataclasses.fields(problem) if f.name == name)
    if got == default or claim is True or (isinstance(claim, (tuple, list, set, frozenset)) and got in claim):
        return ()
    return (Reason("unclaimed", name, got, default if claim in (None, False, ()) else claim),)


def _operands(requires: Requires, problem: Problem, name: str, how: Query) -> Iterator[Reason]:
    """Memory facts of each operand: base alignment, inner contiguity, stride alignment."""
    for fact in problem.operands if requires.unit_inner_stride else ():
        if not fact.unit_inner_stride:
            inner, fix = fact.strides[-1], f"call .contiguous() on {fact.name}: its "
            if inner == 1:
                fix += "rows overlap, one element apart"
                yield Reason("stride", "unit_inner_stride", "1 twice", "1 in the last alone", fix, fact.name)
            else:
                yield Reason("stride", "unit_inner_stride", inner, 1, f"{fix}inner stride is {inner}", fact.name)
    yield from _alignment(requires, problem)


def _alignment(requires: Requires, problem: Problem) -> Iterator[Reason]:
    base, unit = requires.base_alignment, requires.stride_alignment
    for fact in problem.operands:
        if fact.base_alignment < base:
            allowed = f"multiples of {requires.base_alignment} bytes"
            fix = f"call .clone() on {fact.name}: its storage offset breaks the alignment"
            yield Reason("alignment", "base_alignment", f"{fact.base_alignment} bytes", allowed, fix, fact.name)
        if not fact.stride_alignment % unit:  # mostly so, and told at once
            continue
        strides = [(dim, s) for dim, s in fact.outer_strides() if s % unit]
        if strides and not (requires.unit_inner_stride and not fact.unit_inner_stride):
            dim, stride = strides[0]
            allowed = f"multiples of {requires.stride_alignment} bytes"
            helps = not fact.shape[-1] * fact.itemsize % unit  # then a dense copy has such strides alone
            how = f"call .contiguous() on {fact.name}" if helps else f"pad the rows of {fact.name}"
            fix = f"{how}: its stride of {stride} bytes in dimension {dim} is no multiple of {unit}"
            yield Reason("alignment", "stride_alignment", f"{stride} bytes", allowed, fix, fact.name)


Rule = Callable[["Requires", Any, str, "Query"], Iterable[Reason]]
RULES: dict[str, Rule] = {
    "fact": _fact,
    "flag": _flag,
    "member": _member,
    "optional_member": _optional_member,
    "range": _range,
    "multiple": _multiple,
    "closed": _closed,
    "operands": _operands,
}
