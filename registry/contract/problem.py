"""A Problem is one call, frozen: what is asked, of which shapes, with which memory facts, on which target.

Each field says how it is judged. `query(...)` names a rule and the claim in `Requires` that the rule reads; `fact(...)`
marks a size that every kernel must take. A field with neither is judged closed-world: at any value but its default a
variant is illegal until it claims the field. So adding a field can make a variant refuse, never misread, a problem.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from registry.contract.likeness import in_octaves
from registry.contract.once import once
from registry.contract.target import Target


@dataclass(frozen=True)
class Query:
    """How one field of a Problem is held against a variant's claims."""

    rule: str | Callable[..., Any]
    """A name in registry.contract.capability.RULES, or such a function for a field that needs one of its own."""
    claim: str
    fix: Callable[[Any, Any], str | None] | None = None
    """(problem, claim) -> what the caller can do about it, if anything."""
    unclaimed: Any = None
    """What `Requires.<claim>` is where a variant does not claim it."""
    dtypes: frozenset[str] = frozenset()
    """The only ones whose calls can ask for the claim; none named is any."""


_UNCLAIMED: Mapping[Any, Any] = {"flag": False, "closed": False, "member": (), "optional_member": (), "multiple": 1}
_SIZES = ("fact", "multiple")
_NOT_FACTS = ("target", "operands")
_KEY = "registry.query"
FACT = Query("fact", "")


def query(
    rule: str | Callable[..., Any],
    *,
    claim: str,
    default: Any = dataclasses.MISSING,
    fix: Callable[[Any, Any], str | None] | None = None,
    unclaimed: Any = None,
) -> Any:
    """Declare a Problem field that `rule` (see registry.contract.capability.RULES) holds against `Requires.<claim>`.

    `unclaimed` is what the claim is where a variant makes none; the rules by name have one of their own.
    """
    unclaimed = _UNCLAIMED.get(rule, unclaimed)
    return dataclasses.field(default=default, metadata={_KEY: Query(rule, claim, fix, unclaimed)})


def derived_flag(
    claim: str, fix: Callable[[Any, Any], str | None] | None = None, dtypes: frozenset[str] = frozenset()
) -> Any:
    """Declare a flag that `__post_init__` sets from other fields, where it can be set for these `dtypes` alone."""
    return dataclasses.field(init=False, metadata={_KEY: Query("flag", claim, fix, False, dtypes)})


def fact(default: Any = dataclasses.MISSING) -> Any:
    """Declare a Problem field that restricts nobody: sizes and facts that tables may match on."""
    return dataclasses.field(default=default, metadata={_KEY: FACT})


PROBLEM_TYPES: dict[str, type[Problem]] = {}
"""The type of each op's problems."""


def known_claims() -> dict[str, Any]:
    """The claims of all ops, each with what it is where a variant does not make it."""
    return {name: value for kind in PROBLEM_TYPES.values() for name, value in kind.claims().items()}


@dataclass(frozen=True)
class OperandFact:
    """What matters of one tensor besides its values. Strides count elements, the alignment counts bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    base_alignment: int = 16

    @once
    def unit_inner_stride(self) -> bool:
        """True where the last dimension, and no other, is contiguous (or has one element, where no stride matters).

        Windows that move on by one element (`unfold(-1, size, 1)`) have a stride of 1 twice. A library that takes the
        order of memory from strides swaps the two in its result, and no copy engine takes rows at such distances.
        """
        if self.shape[-1] == 1:
            return True
        strides = self.strides
        return strides[-1] == 1 and (strides.count(1) == 1 or not self._unit_outside())

    def _unit_outside(self) -> bool:
        return any(s == 1 and size > 1 for size, s in zip(self.shape[:-1], self.strides[:-1], strict=True))

    def outer_strides(self) -> Iterator[tuple[int, int]]:
        """(dimension, stride in bytes) of each dimension, but the unit one, that has more than one element."""
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            if size > 1 and stride != 1:
                yield dim, stride * self.itemsize

    @once
    def stride_alignment(self) -> int:
        """The largest power of two up to 16 that divides every outer stride, in bytes."""
        combined, itemsize = 16, self.itemsize
        for size, stride in zip(self.shape, self.strides):  # noqa: B905 - of one length, and asked often
            if size > 1 and stride != 1:
                combined |= stride * itemsize
        return combined & -combined


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Base of each op's problem. Subclasses add fields; nothing here knows an op."""

    target: Target = fact()
    dtype: str = query("member", claim="dtypes")
    deterministic: bool = query(
        "flag",
        claim="deterministic",
        default=False,
        fix=lambda problem, claim: "torch.use_deterministic_algorithms(False)",
    )
    operands: tuple[OperandFact, ...] = query("operands", claim="base_alignment", default=())

    op: ClassVar[str] = ""
    derived_kinds: ClassVar[Mapping[str, str]] = {}
    """Kinds ("int", "str", "bool") of what `derived_facts` adds."""

    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """All values of facts that have few, so that a table which names another is refused."""

    more_claims: ClassVar[Mapping[str, Any]] = {}
    """Claims that rules of this op's own read besides those of the fields, and what each is where none is made."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "op" in vars(cls):
            PROBLEM_TYPES[cls.op] = cls

    @classmethod
    def fact_kinds(cls) -> dict[str, str]:
        """What a table may match on, with the annotation that says of which kind it is."""
        fields = {f.name: f.type for f in dataclasses.fields(cls) if f.name not in _NOT_FACTS}
        return {**fields, **cls.derived_kinds}  # type: ignore[dict-item]

    @classmethod
    def queries(cls) -> dict[str, Query]:
        """Each field's query, in declaration order."""
        return _queries(cls)

    @classmethod
    def claims(cls) -> dict[str, Any]:
        """All that a variant of this op may claim of its problems, and what each is where it claims nothing."""
        found: dict[str, Any] = {}
        for how in cls.queries().values():
            if how.claim:
                found.setdefault(how.claim, how.unclaimed)
            if how.rule == "range":
                found.setdefault(f"{how.claim}_multiple", 1)
        return {**found, **cls.more_claims}

    def facts(self, names: frozenset[str] | None = None) -> dict[str, Any]:
        """What tables and errata may match on: every field but the target and the operands, plus derived facts. With
        `names`, those of them that are facts of this op: what nobody asks for need not be derived."""
        if names is None:
            every, values = _facts(type(self))  # type: ignore[arg-type]
            return {**dict(zip(every, values(self), strict=True)), **self.derived_facts()}
        fields, derived = _facts_among(type(self), names)  # type: ignore[arg-type]
        found = {name: getattr(self, name) for name in fields}
        if derived:
            found |= {name: value for name, value in self.derived_facts().items() if name in derived}
        return found

    def likeness(self) -> Mapping[str, float]:
        """Coordinates in which problems that lie near each other are likely to be served best by the same kernel: by
        default every fact, sizes in octaves. An op that knows better says what else its kernels feel, such as waves."""
        return alike(self.facts())

    @property
    def growing(self) -> bool:
        """Whether the next call is likely to be of a size that was never seen, as over a cache that grows by tokens."""
        return False

    def derived_facts(self) -> dict[str, Any]:
        """Facts that tables may match on besides the fields."""
        return {}

    def kind(self) -> tuple[Any, ...]:
        """The problem class that a quarantine covers: everything but sizes."""
        asked = {name: how for name, how in self.queries().items() if name not in _NOT_FACTS}
        values = tuple(getattr(self, name) for name, how in asked.items() if how.rule not in _SIZES)
        return (self.op, self.target.arch, *values)

    def results(self) -> tuple[str, ...]:
        """What a launch returns: one tensor as it is, several as a tuple. None may follow them."""
        return ("out",)

    def unasked(self) -> tuple[str, ...]:
        """Those of the results that this call did not ask for: None may stand in their place."""
        return ()

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of results, where the problem tells; of others nothing is known beforehand."""
        return {}

    def misfit(self, returned: Any) -> str:
        """Why what a launch returned is not what the op takes apart; "" where it is."""
        names, many = self.results(), isinstance(returned, (tuple, list))
        if len(names) == 1:
            fits = not many
        else:
            fits = many and len(returned) >= len(names) and all(one is None for one in returned[len(names) :])
        if fits:
            found = dict(zip(names, returned if many else (returned,), strict=False))
            return self._no_tensor(found) or self._misshaped(found)
        got = f"{len(returned)} results" if many else type(returned).__name__
        return f"returned {got}; allowed: {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}"

    def _no_tensor(self, results: Mapping[str, Any]) -> str:
        import torch

        for name, found in results.items():
            if not isinstance(found, torch.Tensor) and not (found is None and name in self.unasked()):
                return f"returned {found if found is None else type(found).__name__} for {name}; allowed: a tensor"
        return ""

    def _misshaped(self, results: Mapping[str, Any]) -> str:
        for name, (shape, dtype) in self.result_shapes().items():
            found: Any = results.get(name)
            kind = str(getattr(found, "dtype", "")).removeprefix("torch.")
            if kind and (tuple(found.shape), kind) != (shape, dtype):
                return f"returned {name} of {tuple(found.shape)} in {kind}; allowed: {shape} in {dtype}"
        return ""

    def on(self, target: Target) -> Problem:
        """The same question on another target."""
        return dataclasses.replace(self, target=target)

    def summary(self) -> str:
        """One line for errors and logs."""
        shown = ", ".join(
            f"{name}={value}" for name, value in self.facts().items() if value not in (False, None, 0.0, "")
        )
        return f"{self.op} on {self.target.name} ({self.target.arch}): {shown}"


def alike(facts: Mapping[str, Any]) -> dict[str, float]:
    """Coordinates of these facts: sizes in octaves, each word one of its own, what is set or not."""
    found: dict[str, Any] = {}
    sizes = []
    for name, value in facts.items():
        kind = type(value)
        if kind is int:  # as most are
            found[name] = value
            sizes.append(name)
        elif kind is str or isinstance(value, str):
            found[f"{name}={value}"] = 2.0
        elif value is None or isinstance(value, (bool, tuple)):
            found[name] = 2.0 * bool(value)
        else:
            found[name] = value
            sizes.append(name)
    found.update(zip(sizes, in_octaves([found[name] for name in sizes]), strict=True))
    return found


@functools.cache
def _facts(kind: type[Problem]) -> tuple[tuple[str, ...], Callable[[Problem], tuple[Any, ...]]]:
    """The fields that are facts, and what reads them."""
    names = tuple(name for name in _queries(kind) if name not in _NOT_FACTS)
    return names, operator.attrgetter(*names)


@functools.lru_cache(maxsize=256)
def _facts_among(kind: type[Problem], names: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Those of these names that are fields, and those that are derived of them."""
    fields, _ = _facts(kind)  # type: ignore[arg-type]
    return tuple(name for name in fields if name in names), names & frozenset(kind.derived_kinds)


_QUERIES: dict[type, dict[str, Query]] = {}


def _queries(cls: type[Problem]) -> dict[str, Query]:
    found = _QUERIES.get(cls)
    if found is None:
        found = {
            f.name: f.metadata.get(_KEY) or Query("closed", f.name, unclaimed=False) for f in dataclasses.fields(cls)
        }
        _QUERIES[cls] = found
    return found
