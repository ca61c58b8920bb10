"""A fitted tree as a dispatch table: readable YAML with evidence, and the regret of what it picks.

Regret is the time of what the table picks over the time of the best variant and config measured on that shape. It is
evaluated by loading the table as the dispatcher does and walking its rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from registry.ops.known import op_named
from registry.tables import measured
from registry.tables.model import TableSet
from registry.tuning.evidence import Regret, cases_by_rule, evidence, load_text, regret, sizes
from registry.tuning.fit import WRONG, Fit, Settings, excluded, library_choice
from registry.tuning.journal import CaseResults, Results
from registry.tuning.tree import NEVER, Choice, Point, leaves

HALVES = ["bfloat16", "float16"]
SMALL = 64
"""Up to this size a smallest one is none: the table speaks about all below it as well."""
HEADER = "# yaml-language-server: $schema=./table.schema.json\n"


@dataclass
class Fitted:
    """A table made from results."""

    op: str
    text: str
    measured: str
    """Where it was measured: the text of the file beside the table."""
    rules: list[dict[str, Any]]
    tuning: Regret
    held: Regret
    single: Regret
    """Of the best single choice for all shapes: what the rules buy."""
    rule_cost: float
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_table(
    results: Results, found: Fit, run: str, settings: Settings | None = None, *, device: bool = False
) -> Fitted:
    """The table of a fit. `run` names the raw results in evidence; `device` narrows the table to that device."""
    settings = settings or Settings()
    rules = _rules(found, settings)
    base = _base(found)
    for rule in rules:
        rule["when"] = {**{name: value for name, value in base.items() if name not in rule["when"]}, **rule["when"]}
        for name, low in _floors(found).items():
            rule["when"][name] = _at_least(rule["when"].get(name), low)
        if not rule["when"]:
            del rule["when"]
    head: dict[str, Any] = {"op": found.op, "arch": results.machine["arch"]}
    if device:
        head["device"] = results.machine["device"]
    table = loaded({**head, "rules": rules}, found.op)
    reached = cases_by_rule(table, [point.case for point in found.points])
    rules = [rule for index, rule in enumerate(rules) if reached.get(index) or index == len(rules) - 1]
    table = loaded({**head, "rules": rules}, found.op)
    reached = cases_by_rule(table, [point.case for point in found.points])
    for index, rule in enumerate(rules):
        if not reached.get(index):
            continue  # the last one: what runs where nobody has measured has no evidence
        rule["evidence"] = evidence(results, table.tables[0].rules[index], reached[index], run, settings)
    text = HEADER + _summary(found, results, settings) + dump({**head, "rules": rules})
    parts = {held: [p.case for p in found.points if p.held is held] for held in (False, True)}
    whole = loaded({**head, "rules": [{"use": rule_use(found.tree.choice, found.tree.points, settings)}]}, found.op)
    fitted = Fitted(
        found.op,
        text,
        measured_text(found.op, reached),
        rules,
        regret(table, parts[False], settings),
        regret(table, parts[True], settings),
        regret(whole, parts[False] + parts[True], settings),
        found.rule_cost,
        found.skipped,
    )
    load_text(text, found.op)  # what is written must load
    fitted.warnings = [w for point in found.points for w in _failures(point.case, settings)]
    return fitted


def measured_text(op: str, reached: Mapping[int, Sequence[CaseResults]]) -> str:
    """The sizes of the shapes that each rule decides, as the file beside its table holds them."""
    return measured.text(op_named(op).tuning.leading, {i: sizes(op, cases) for i, cases in reached.items()})


def loaded(table: Mapping[str, Any], op: str) -> TableSet:
    """A table as the dispatcher would load it."""
    return load_text(dump(table), op)


def _rules(found: Fit, settings: Settings) -> list[dict[str, Any]]:
    """A rule for each part of the space that wants something else than most of it does, then one for the rest.

    Where a library's kernel was measured, the rest is its: a rule for one of ours reaches no further than its shapes.
    """
    parts = list(leaves(found.tree))
    sizes: Counter[Choice] = Counter()
    for leaf, _ in parts:
        sizes[leaf.choice] += len(leaf.points)
    theirs = library_choice(found.tree.points, found.libraries)
    usual = theirs or max(sizes, key=lambda choice: sizes[choice])
    rules = []
    for leaf, path in parts:
        if leaf.choice == usual:
            continue
        when = _when(path, found.kinds, found.tree.points)
        if theirs is not None and leaf.choice.variant not in found.libraries:
            when |= _measured_bounds(leaf.points, op_named(found.op).tuning.leading)
        rules.append({"when": when, "use": rule_use(leaf.choice, leaf.points, settings, found.libraries)})
    rest = [point for leaf, _ in parts if leaf.choice == usual for point in leaf.points]
    return [*rules, {"when": {}, "use": rule_use(usual, rest or found.tree.points, settings)}]


def _measured_bounds(points: Sequence[Point], names: Sequence[str]) -> dict[str, str]:
    values = {name: [point.facts[name] for point in points] for name in names}
    return {name: _range(min(found), max(found)) for name, found in values.items()}


def _when(path: Sequence[tuple[str, Any, bool]], kinds: Mapping[str, str], points: Sequence[Point]) -> dict[str, Any]:
    """The conditions that lead to a leaf. "Not this name" is spelled as the other names that were measured."""
    found: dict[str, Any] = {}
    for fact, test, passed in path:
        if kinds[fact] in ("int", "float"):
            found[fact] = _within(found.get(fact), (test, None) if passed else (None, test - 1))
        elif kinds[fact] == "bool":
            found[fact] = test if passed else not test
        else:
            known = found.get(fact, sorted({point.facts[fact] for point in points}))
            names = [name for name in ([known] if isinstance(known, str) else known) if (name == test) is passed]
            found[fact] = _with_its_half(names, points) if fact == "dtype" else names
    return {fact: value[0] if isinstance(value, list) and len(value) == 1 else value for fact, value in found.items()}


def _within(outer: str | None, inner: tuple[Any, Any]) -> str:
    low, high = _bounds(outer)
    lows, highs = [v for v in (low, inner[0]) if v is not None], [v for v in (high, inner[1]) if v is not None]
    return _range(max(lows, default=None), min(highs, default=None))


def _bounds(text: Any) -> tuple[int | None, int | None]:
    low, _, high = str(text or "..").partition("..")
    return (int(low) if low else None), (int(high) if high else None)


def _range(low: int | None, high: int | None) -> str:
    return f"{'' if low is None else low}..{'' if high is None else high}"


def _at_least(condition: Any, low: int) -> str:
    known, high = _bounds(condition)
    return _range(max(low, known or 0), high)


def rule_use(
    choice: Choice, points: Sequence[Point], settings: Settings, libraries: frozenset[str] = frozenset()
) -> list[Any]:
    """The choice, then every other variant by how it did on these shapes, those of libraries first."""
    others: dict[str, list[float]] = {}
    for point in points:
        for other, cost in point.cost.items():
            if not other.config and other.variant != choice.variant:
                others.setdefault(other.variant, []).append(cost)
    ranked = sorted(
        (n for n, costs in others.items() if max(costs) < NEVER),
        key=lambda n: (n not in libraries, sum(others[n]) / len(others[n]), n),
    )
    first = {"variant": choice.variant, **({"config": choice.settings} if choice.config else {})}
    return [first, *({"variant": name} for name in ranked)]


def _base(found: Fit) -> dict[str, Any]:
    """Conditions of every rule: the dtypes measured, and what was the same in all measurements."""
    dtypes = _with_its_half(sorted({point.facts["dtype"] for point in found.points}), found.points)
    same = {name: {point.facts[name] for point in found.points} for name in op_named(found.op).tuning.as_measured}
    always = {name: values.pop() for name, values in same.items() if len(values) == 1}
    return {"dtype": dtypes if len(dtypes) > 1 else dtypes[0], **always}


def _with_its_half(dtypes: list[str], points: Sequence[Point]) -> list[str]:
    """Where one half precision was measured alone, what holds for it holds for the other: the same instructions."""
    measured = {point.facts["dtype"] for point in points} & set(HALVES)
    if len(measured) != 1 or not measured & set(dtypes):
        return dtypes
    return [*HALVES, *(d for d in dtypes if d not in HALVES)]


def _floors(found: Fit) -> dict[str, int]:
    if library_choice(found.tree.points, found.libraries) is not None:
        return {}  # the rules for kernels of ours have bounds of their own
    smallest = {name: min(point.facts[name] for point in found.points) for name in op_named(found.op).tuning.leading}
    return {name: -(-low // 2) for name, low in smallest.items() if low > SMALL}


# --- text ---------------------------------------------------------------------------------------------------------


def _failures(case: CaseResults, settings: Settings) -> list[str]:
    return [
        f"{entry.variant} {entry.config} on {case.text}: {entry.failure['why']}: "
        f"{entry.failure.get('detail', '')[:200]}"
        for entry in case.entries.values()
        if entry.failure is not None and entry.failure["why"] in WRONG and not excluded(entry.variant, settings)
    ]


def _summary(found: Fit, results: Results, settings: Settings) -> str:
    held = sum(point.held for point in found.points)
    return (
        f"# Made by `kreg tune {found.op}` from {Path(results.path).name}: {len(found.points)} shapes on "
        f"{results.machine['device']},\n# {held} of them held out of the fit. Edit the measurements, not this file.\n"
    )


class _Dumper(yaml.SafeDumper):
    """Quotes text that some reader of YAML takes for a number, such as the hash 50921e858851."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    try:
        float(value.replace("_", ""))
    except ValueError:
        return dumper.represent_str(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'")


_Dumper.add_representer(str, _text)


def dump(table: Mapping[str, Any]) -> str:
    """YAML as people write it: one line for conditions and for each candidate."""
    lines = [f"{name}: {_flow(value)}" for name, value in table.items() if name != "rules"]
    lines.append("rules:")
    for rule in table["rules"]:
        when = f"when: {_flow(rule['when'])}\n  " if rule.get("when") else ""
        lines.append(f"- {when}use:")
        lines += [f"  - {_flow(use)}" for use in rule["use"]]
        if "evidence" in rule:
            lines.append(f"  evidence: {_flow(rule['evidence'])}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").strip()
