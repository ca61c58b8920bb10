"""Whether a variant's claims let a problem through: the quick test that a launch makes.

The answer is that of the rules in capability.py. What depends only on a problem's target, flags and words is worked
out once for each kind of problem. Sizes are tested each time, but for those that the claims do not restrict.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from registry.contract.capability import RULES, Requires, Rule, rules_of, target_reasons
from registry.contract.problem import Problem, Query

CLASSES = 256
"""Kinds of problems of which it is kept whether claims let them through; they go when there are more."""
_R = TypeVar("_R", bound=Rule)
_Rules = list[tuple[Rule, str, Query]]
_Passes = Callable[[Any], bool]

Asks = Callable[[Requires, Rule, str, Query], "_Passes | None"]
"""What makes of a rule, and of what a variant claims, a question about many problems; None where all pass."""

_OF_WORDS: dict[Any, tuple[str, ...]] = {RULES[name]: () for name in ("flag", "member", "optional_member")}
"""Rules that are asked once for each kind of problems, with what they look at besides their own field."""
_ASKED: dict[Any, Asks] = {}
"""How others are asked, where that can be told sooner than by the rule itself."""


def of_words(*names: str) -> Callable[[_R], _R]:
    """Of a rule that looks at its own field and these, and at nothing else: flags and words, of which there are few."""

    def noted(rule: _R) -> _R:
        _OF_WORDS[rule] = names
        return rule

    return noted


def asked_by(asks: Asks) -> Callable[[_R], _R]:
    """Of a rule that is asked so, which has to come to the same."""

    def noted(rule: _R) -> _R:
        _ASKED[rule] = asks
        return rule

    return noted


def meets(requires: Requires, problem: Problem) -> bool:
    """Whether `reasons_against` is empty, told by the first reason."""
    kind, target = type(problem), problem.target
    words_of, of_words, _ = _rules_apart(kind)  # type: ignore[arg-type]
    for_target, known = requires._let_through
    if for_target is not target and for_target != target:
        known = {}
        object.__setattr__(requires, "_let_through", (target, known))
    words = kind, words_of(problem)
    met = known.get(words)
    if met is None:
        if len(known) >= CLASSES:
            known.clear()
        met = known[words] = next(target_reasons(requires, problem), None) is None and not any(
            map(_any, (rule(requires, problem, name, how) for rule, name, how in of_words))
        )
    if not met:
        return False
    asking = requires._asking.get(kind)
    for passes in _asking(requires, kind) if asking is None else asking:  # noqa: SIM110 - sooner than a generator
        if not passes(problem):
            return False
    return True


def _any(reasons: Iterable[Any]) -> bool:
    return next(iter(reasons), None) is not None


def _asking(requires: Requires, kind: type[Problem]) -> list[_Passes]:
    """What is asked of problems of a type beyond their words."""
    _, _, others = _rules_apart(kind)  # type: ignore[arg-type]
    written = [_ASKED.get(rule, as_it_is)(requires, rule, name, how) for rule, name, how in others]
    found = requires._asking[kind] = [passes for passes in written if passes is not None]
    return found


@functools.cache
def _rules_apart(kind: type[Problem]) -> tuple[Callable[[Problem], Any], _Rules, _Rules]:
    """What tells kinds of problems apart, the rules that look at nothing else, and the others."""
    every = rules_of(kind)  # type: ignore[arg-type]
    alone = [one for one in every if one[0] in _OF_WORDS]
    names = dict.fromkeys(read for rule, name, _ in alone for read in (name, *_OF_WORDS[rule]))
    return operator.attrgetter(*names), alone, [one for one in every if one not in alone]


# --- rules as they are asked of many problems ----------------------------------------------------------------------


def as_it_is(requires: Requires, rule: Rule, name: str, how: Query) -> _Passes:
    return functools.partial(_has_none, requires, rule, name, how)


def _has_none(requires: Requires, rule: Rule, name: str, how: Query, problem: Problem) -> bool:
    return not _any(rule(requires, problem, name, how))


def as_multiple(requires: Requires, rule: Rule, name: str, how: Query) -> _Passes | None:
    of = requires.claim(how.claim) or 1
    return functools.partial(_is_multiple, name, of) if of != 1 else None


def _is_multiple(name: str, of: int, problem: Problem) -> bool:
    return not getattr(problem, name) % of


def as_range(requires: Requires, rule: Rule, name: str, how: Query) -> _Passes:
    claim, of = requires.claim(how.claim), requires.claim(f"{how.claim}_multiple") or 1
    return functools.partial(_lies_within, name, tuple(claim), of) if claim is not None else _never


def _lies_within(name: str, bounds: tuple[int, int], of: int, problem: Problem) -> bool:
    size: int = getattr(problem, name)
    return bounds[0] <= size <= bounds[1] and size % of == 0


def _never(problem: Problem) -> bool:
    return False


def as_operands(requires: Requires, rule: Rule, name: str, how: Query) -> _Passes:
    aligned = requires.unit_inner_stride, requires.base_alignment, requires.stride_alignment
    return functools.partial(_lie_well, *aligned, as_it_is(requires, rule, name, how))


def _lie_well(inner: bool, base: int, unit: int, asked: _Passes, problem: Problem) -> bool:
    """By what is known of each operand at a glance; where one does not lie well, the rule is asked."""
    for one in problem.operands:
        if one.base_alignment < base or one.stride_alignment % unit or (inner and not one.unit_inner_stride):
            return asked(problem)
    return True


_ASKED.update({RULES["multiple"]: as_multiple, RULES["range"]: as_range, RULES["operands"]: as_operands})
