"""A fit as a dispatch table: readable YAML with evidence, the shapes beside it, and the regret of what it picks.

Regret is the time of what the table picks over the time of the best variant and config measured on that shape. Each
shape is asked about as if it had not been measured: its neighbours answer.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from registry.notices import both_ends
from registry.ops.known import op_named
from registry.tables import measured
from registry.tuning.config_trees import LEAST
from registry.tuning.evidence import Pick, Regret, evidence, load_text, picks_left_out, regret_of
from registry.tuning.fit import Fit
from registry.tuning.journal import CaseResults, Results
from registry.tuning.kinds import beside_of
from registry.tuning.taking_part import Settings, candidates, excluded, is_wrong

HALVES = ["bfloat16", "float16"]
WORTH_SAYING = 1.02
"""Times as long as its fastest that a variant takes by the config that runs, in the mean."""
HEADER = "# yaml-language-server: $schema=./table.schema.json\n"


@dataclass
class Fitted:
    """A table made from results."""

    op: str
    text: str
    measured: str
    """Where it was measured: the text of the file beside the table."""
    rules: list[dict[str, Any]]
    regret: Regret
    """Of each shape by the others."""
    single: Regret
    """Of the best single variant for all shapes, with its best config: what the rules buy."""
    kinds: list[tuple[Mapping[str, Any], Regret]] = field(default_factory=list)
    """Of each kind that has a fit of its own, with its conditions; the one that is left has none."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    unheard: list[str] = field(default_factory=list)
    """Variants whose first config runs beside the measured shapes, although others were faster on those."""


def make_table(
    results: Results,
    found: Sequence[Fit],
    run: str,
    settings: Settings | None = None,
    *,
    device: bool = False,
    also: Sequence[str] = (),
) -> Fitted:
    """The table of the fits of an op, a rule for each. `run` names the raw results in evidence, `also` those of other
    devices; `device` narrows the table to the first."""
    settings, op = settings or Settings(), found[0].op
    picks: list[Pick] = []
    alone: list[Pick] = []
    rules: list[dict[str, Any]] = []
    kinds: list[tuple[Mapping[str, Any], Regret]] = []
    for one in found:
        own = picks_left_out(one, settings)
        rule: dict[str, Any] = {"when": _base(one), "nearest": one.weights, "use": _uses(one, settings)}
        rules.append({**rule, "evidence": evidence(results, own, run, settings, also)})
        best = min((use["variant"] for use in rule["use"]), key=functools.partial(_mean_lost, one))
        picks += own
        kinds += [(one.apart, regret_of(own, settings))]
        alone += [(case, min(_of(case, best, settings), key=lambda e: e.ms, default=None)) for case in one.cases]
    head: dict[str, Any] = {"op": op, "arch": results.machine["arch"]}
    if device:
        head["device"] = results.machine["device"]
    text = HEADER + _summary(found, results) + dump({**head, "rules": rules})
    load_text(text, op)  # what is written must load
    fitted = Fitted(
        op,
        text,
        measured.text(beside_of(found)),
        rules,
        regret_of(picks, settings),
        regret_of(alone, settings),
        kinds,
        {text: why for one in found for text, why in one.skipped.items()},
    )
    fitted.warnings = [w for one in found for case in one.cases for w in _failures(case, settings)]
    fitted.unheard = _unheard(found)
    return fitted


def _unheard(found: Sequence[Fit]) -> list[str]:
    """What is lost where neither trees nor a guess tell configs (`Advice.configs`), so that the first one runs."""
    lost: dict[str, list[float]] = {}
    for one in found:
        for declared, timed in zip(one.declared, one.timed, strict=True):
            for name, own in timed.items():
                first = own.ms.get(next((at for at in own.ms if own.configs[at] == declared[name]), -1), math.inf)
                if own.cost is None and name not in one.config_trees and first < math.inf:
                    lost.setdefault(name, []).append(first / min(own.ms.values()))
    mean = {name: statistics.geometric_mean(each) for name, each in lost.items()}
    return [
        f"{name} runs its first config where it was not measured, {times:.2f} times as long as its fastest on these: "
        f"declare a cost (registry.toolbox.costs.unknown_cost, if it has no guess), or measure {LEAST} shapes or more"
        for name, times in mean.items()
        if times > WORTH_SAYING
    ]


def _of(case: CaseResults, variant: str, settings: Settings) -> list[Any]:
    return [entry for entry in candidates(case, settings) if entry.variant == variant]


def _uses(found: Fit, settings: Settings) -> list[dict[str, Any]]:
    """The order where nothing near was measured: kernels of libraries first, each kind by what it loses on average. A
    variant that was the fastest nowhere has no place here: the table for all hardware says where it comes in. All have
    one where none was by the config that it puts first."""
    first = {found.contestants[r.contestant][0] for shape in found.shapes for r in shape.results if not r.lost}
    failing = {entry.variant for case in found.cases for entry in case.entries.values() if is_wrong(entry)}
    names = {name for name, _ in found.contestants if not excluded(name, settings)}
    timed = {entry.variant for case in found.cases for entry in candidates(case, settings)}
    known = sorted(
        names & timed & (first | failing) or names & timed,
        key=lambda n: (n in failing, n not in found.libraries, _mean_lost(found, n), n),
    )
    return [{"variant": name} for name in known]


def _mean_lost(found: Fit, variant: str) -> float:
    """What the best config of a variant loses on a shape; much where it was not measured."""
    sums = 0.0
    for shape in found.shapes:
        own = [r.lost for r in shape.results if found.contestants[r.contestant][0] == variant and not r.here]
        sums += min(own, default=1.0)
    return sums / len(found.shapes)


def _base(found: Fit) -> dict[str, Any]:
    """What the rule is about: the dtypes measured, what was the same in all measurements, and of what kind they are."""
    dtypes = _with_its_half(sorted({str(case.facts["dtype"]) for case in found.cases}))
    same = {name: {case.facts[name] for case in found.cases} for name in op_named(found.op).tuning.as_measured}
    always = {name: values.pop() for name, values in same.items() if len(values) == 1}
    return {"dtype": dtypes if len(dtypes) > 1 else dtypes[0], **always, **found.apart}


def _with_its_half(dtypes: list[str]) -> list[str]:
    """Where one half precision was measured alone, what holds for it holds for the other: the same instructions."""
    if len(set(dtypes) & set(HALVES)) != 1:
        return dtypes
    return [*HALVES, *(dtype for dtype in dtypes if dtype not in HALVES)]


# --- text ---------------------------------------------------------------------------------------------------------


def _failures(case: CaseResults, settings: Settings) -> list[str]:
    return [
        f"{entry.variant} {entry.config} on {case.text}: {entry.failure['why']}: "
        f"{both_ends(entry.failure.get('detail', ''), 200)}"
        for entry in case.entries.values()
        if entry.failure is not None and is_wrong(entry) and not excluded(entry.variant, settings)
    ]


def _summary(found: Sequence[Fit], results: Results) -> str:
    devices = dict.fromkeys(str((case.machine or results.machine)["device"]) for one in found for case in one.cases)
    count = sum(len(one.shapes) for one in found)
    return (
        f"# Made by `kreg tune {found[0].op}` from {Path(results.path).name}: {count} shapes on "
        f"{' and '.join(devices)}, which lie\n# beside it. Edit the measurements, not this file.\n"
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
        keys = [f"{name}: {_flow(rule[name])}" for name in ("when", "nearest") if rule.get(name)]
        lines += [f"{'  ' if place else '- '}{key}" for place, key in enumerate(keys)]
        lines.append("  use:" if keys else "- use:")
        lines += [f"  - {_flow(use)}" for use in rule["use"]]
        if "evidence" in rule:
            lines.append(f"  evidence: {_flow(rule['evidence'])}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").strip()
