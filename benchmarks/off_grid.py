"""What dispatch costs on shapes that no table was fitted to, as tables for plots.py: `judged_SEED_OP[.KIND].jsonl`,
which judge.py writes, and what `try_out` picked on the same shapes.

A shape counts where all that was timed on it is launched so today: others tell neither what is picked nor what the best
of all is. Nor does one count that the tables were fitted to: models have few different sizes, and draws of them meet.
Where little of a draw is left it is of one kind, such as sizes that a newer kernel does not take, and is shown by
itself alone.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from product_cells import dispatched

from registry.disk import write_atomic
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tuning import journal
from registry.tuning.fit import target_of
from registry.tuning.journal import CaseResults, Results

FAIR = 0.6
"""The share of a draw that has to count for it to be one of random shapes still."""

OPS = ("attention", "attention_backward", "matmul", "grouped_mm", "attention_varlen", "attention_varlen_backward")
"""In the order of the tables; others follow."""


@dataclass(frozen=True)
class Judged:
    """Of one shape of a draw."""

    text: str
    pick: str
    best: str
    lost: float
    """How much slower what is picked is than the best of all."""
    over_library: float | None
    """How much faster it is than the fastest library kernel, where there is one."""
    of_a_model: bool


@dataclass
class Draw:
    op: str
    kind: str
    """Empty for random shapes of 16 bits."""
    card: str
    seed: str
    path: Path
    date: str
    drawn: int = 0
    fitted: int = 0
    """Of those: the card's own journal of the op holds them, so that they judge nothing."""
    outcomes: list[Judged] = field(default_factory=list)

    @property
    def fair(self) -> bool:
        return len(self.outcomes) >= FAIR * (self.drawn - self.fitted)

    @property
    def name(self) -> str:
        return f"{self.op} ({self.kind})" if self.kind else self.op

    def key(self, folder: Path) -> str:
        """Among all results."""
        return self.path.relative_to(folder).with_suffix("").as_posix()


def card_of(results: Results) -> str:
    """ "H100" of "NVIDIA H100 80GB HBM3"."""
    return target_of(results.machine).name


def library_kernel(case: CaseResults) -> float | None:
    """Milliseconds of the fastest that torch brings, but for its own arithmetic with stored scores."""
    kernels = [e for e in case.timed.values() if e.variant.startswith("torch_") and "_math" not in e.variant]
    return min((e.ms for e in kernels), default=None)


def launched_so_today(results: Results, op: str) -> list[CaseResults]:
    """The shapes of which every launch that was timed is today's."""
    todays = {name: fingerprint_of(variant) for name, variant in catalog.get().of(op).items()}
    return [
        case
        for case in results.of(op)
        if all(entry.fingerprint == todays.get(entry.variant, entry.fingerprint) for entry in case.timed.values())
    ]


@functools.cache
def draws(folder: Path) -> list[Draw]:
    """All draws under a folder of results: random ones first, by op, card and day."""
    found = []
    for path in sorted(folder.rglob("judged_*.jsonl")):
        results = journal.read(path)
        _, seed, _ = path.stem.split("_", 2)
        for op in results.ops:
            draw = Draw(op, path.stem.partition(".")[2], card_of(results), seed, path, results.machine["date"])
            draw.drawn = sum(bool(case.timed) for case in results.of(op))
            known = _fitted(path.parent / f"{op}.jsonl")
            draw.fitted = sum(bool(case.timed) and case.text in known for case in results.of(op))
            for case in launched_so_today(results, op):
                if case.text not in known:
                    _judge(draw, results, case)
            if draw.outcomes:
                found.append(draw)
    return sorted(found, key=lambda d: (bool(d.kind), _place(d.op), d.op, d.kind, d.card != "H200", d.date, d.seed))


@functools.cache
def _fitted(path: Path) -> frozenset[str]:
    """The shapes of a journal that tables are fitted to: its lines that say so; all else in it is many times more."""
    if not path.is_file():
        return frozenset()
    with path.open(encoding="utf-8") as lines:
        return frozenset(json.loads(line)["text"] for line in lines if line.startswith('{"kind":"case"'))


def _place(op: str) -> int:
    return OPS.index(op) if op in OPS else len(OPS)


def _judge(draw: Draw, results: Results, case: CaseResults) -> None:
    pick, library = dispatched(results, case), library_kernel(case)
    best = min(case.timed.values(), key=lambda one: one.ms, default=None)
    if best is None or pick is None:
        return
    over = library / pick.ms if library is not None else None
    of_a_model = op_named(case.op).tuning.of_a_model(Case.from_data(case.shape))
    draw.outcomes.append(Judged(case.text, pick.variant, best.variant, pick.ms / best.ms - 1, over, of_a_model))


def spread(shares: Iterable[float]) -> tuple[float, float, float]:
    """Mean, 95th percentile and worst."""
    ordered = sorted(shares, reverse=True)
    return statistics.mean(ordered), ordered[len(ordered) // 20], ordered[0]


def spread_text(shares: Iterable[float]) -> str:
    return _percent(spread(shares))


def _percent(shares: Iterable[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares) + "%"


def _ratios(outcomes: Iterable[Judged]) -> list[float]:
    return [one.over_library for one in outcomes if one.over_library is not None]


# --- tables -------------------------------------------------------------------------------------------------------


def _together(folder: Path) -> dict[tuple[str, str], list[Judged]]:
    """By op and card, all random draws of which most counts."""
    found: dict[tuple[str, str], list[Judged]] = {}
    for draw in draws(folder):
        if not draw.kind and draw.fair:
            found.setdefault((draw.op, draw.card), []).extend(draw.outcomes)
    return found


def _apart(folder: Path) -> Iterator[tuple[str, str, str, list[Judged]]]:
    """The same, published models and other sizes apart."""
    for (op, card), outcomes in _together(folder).items():
        for of_a_model, whose in ((True, "models"), (False, "any sizes")):
            if drawn := [one for one in outcomes if one.of_a_model == of_a_model]:
                yield op, card, whose, drawn


def at_a_glance(folder: Path) -> str:
    """Per op, card and what was drawn: what is dispatched over a library's kernel, and what it loses to the best."""
    rows = [
        "| op | card | drawn of | shapes | over the fastest library kernel "
        "| slower than the best of all: mean | 95th percentile | worst |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for op, card, whose, drawn in _apart(folder):
        ratios = _ratios(drawn)
        over = f"{statistics.geometric_mean(ratios):.2f} times"
        over += f" (of {len(ratios)})" if len(ratios) < len(drawn) else ""
        lost = " | ".join(f"{100 * share:.1f}%" for share in spread(one.lost for one in drawn))
        rows.append(f"| {op} | {card} | {whose} | {len(drawn)} | {over} | {lost} |")
    return "\n".join(rows) if len(rows) > 2 else ""


TOLD = 4
"""Parts of a loss that are told, and what they are at least, in points."""
TOLD_POINTS = 0.03


def lost_between(folder: Path) -> str:
    """Per op, card and what was drawn: between which variants the mean loss is lost, and by whose configs."""
    rows = ["| op | card | drawn of | lost | of it |", "|---|---|---|--:|---|"]
    for op, card, whose, drawn in _apart(folder):
        parts: dict[tuple[str, str], list[float]] = {}
        for one in drawn:
            if one.lost > 0:
                parts.setdefault((one.pick, one.best), []).append(100 * one.lost / len(drawn))
        most = sorted(parts.items(), key=lambda part: -sum(part[1]))[:TOLD]
        told = [
            f"{sum(lost):.2f} {f'configs of `{pick}`' if pick == best else f'`{pick}` for `{best}`'} ({len(lost)})"
            for (pick, best), lost in most
            if sum(lost) >= TOLD_POINTS
        ]
        rows.append(
            f"| {op} | {card} | {whose} | {100 * statistics.mean(o.lost for o in drawn):.2f}% | {'; '.join(told)} |"
        )
    return "\n".join(rows) if len(rows) > 2 else ""


def losing(folder: Path) -> str:
    """Per op and card: the shape that loses most to the best of all, and how many run slower than a library's kernel;
    draws of rarer kinds last, together."""
    rows = [
        "| op | card | loses most to the best of all | under 0.95 of a library's kernel | least |",
        "|---|---|---|--:|---|",
    ]
    together = _together(folder)
    for draw in draws(folder):
        if draw.kind:
            together.setdefault(("rarer kinds", draw.card), []).extend(draw.outcomes)
    for (op, card), outcomes in together.items():
        worst = max(outcomes, key=lambda one: one.lost)
        columns = [op, card, f"{100 * worst.lost:.0f}%: `{worst.text}`", "none runs", ""]
        if beside := [(one.over_library, one.text) for one in outcomes if one.over_library is not None]:
            least, text = min(beside)
            columns[3:] = [f"{sum(over < 0.95 for over, _ in beside)} of {len(beside)}", f"{least:.2f}: `{text}`"]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def every_draw(folder: Path) -> str:
    """Per draw: how many of its shapes count, what is dispatched over the fastest library kernel, what it loses to the
    best of all, what it lost by the tables that met it, and what `try_out` leaves, by the run that tried most."""
    rows = [
        "| op | card | draw | shapes that count | over the fastest library kernel | least | under 0.95 "
        "| lost: mean, 95th percentile, worst | lost when new | tried out | first call, tried out |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    met = first_judged(folder)
    for draw in draws(folder):
        ratios = _ratios(draw.outcomes)
        over = f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else "none runs"
        count = f"{len(draw.outcomes)} of {draw.drawn - draw.fitted}"
        columns = [draw.name, draw.card, draw.seed, count, over]
        columns += [f"{min(ratios):.2f}" if ratios else "", str(sum(ratio < 0.95 for ratio in ratios))]
        columns += [spread_text(one.lost for one in draw.outcomes)]
        first = met.get(draw.key(folder))
        columns += [_percent(first["lost"]) if first else ""]
        records = [
            json.loads(p.read_text(encoding="utf-8")) for p in draw.path.parent.glob(f"try_out_{draw.seed}_*.json")
        ]
        most = max((r for r in records if r["op"] == draw.op), key=lambda record: record["most"], default=None)
        tried = _outcome_of_trying(most, draw.path)["tried"] if most is not None else []
        columns += [spread_text(tried), f"{1e3 * _first_call(most):.0f} ms"] if most is not None and tried else ["", ""]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


WORST = 4
"""Shapes of an op and card that are named; of each rarer kind one."""


def worst_shapes(folder: Path) -> str:
    """Per op and card, the shapes that lose most of all draws, by what runs and what would be faster."""
    rows = ["| op | card | shape | runs | fastest | slower |", "|---|---|---|---|---|--:|"]
    found: dict[tuple[str, str], list[Judged]] = {}
    for draw in draws(folder):
        found.setdefault((draw.name, draw.card), []).extend(draw.outcomes)
    for (name, card), outcomes in found.items():
        for one in sorted(outcomes, key=lambda one: (-one.lost, one.text))[: 1 if "(" in name else WORST]:
            best = "another config" if one.best == one.pick else f"`{one.best}`"
            rows.append(f"| {name} | {card} | `{one.text}` | `{one.pick}` | {best} | {100 * one.lost:.0f}% |")
    return "\n".join(rows) if len(rows) > 2 else ""


FIRST = "first_judged.json"
"""Beside all results: what each draw lost by the tables that it met, before any choice was made by it. By draw; none
for draws that are older than this file."""


def first_judged(folder: Path) -> dict[str, Any]:
    path = folder / FIRST
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def note_new_draws(folder: Path) -> None:
    """Judge draws that were not met before by the tables of now, and keep it. Do so before tables are fitted anew."""
    known = first_judged(folder)
    for draw in draws(folder):
        lost = [round(share, 4) for share in spread(one.lost for one in draw.outcomes)]
        known.setdefault(draw.key(folder), {"date": draw.date, "counted": len(draw.outcomes), "lost": lost})
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
    write_atomic(folder / FIRST, f"{{\n{lines}\n}}\n")


def tried_out(folder: Path) -> str:
    """What tables and `try_out` picked on drawn shapes, by the times of a full sweep of the same (judged_*.jsonl)."""
    rows = [
        "| op | shapes | tables: mean, 95th percentile, worst | tried out | of at most | first call |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for path in sorted(folder.rglob("try_out_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        sweep = next(path.parent.glob(f"*_{record['seed']}_{record['op']}.jsonl"))  # judged_, or swept_ if no judge now
        lost = _outcome_of_trying(record, sweep)
        columns = [spread_text(lost["tables"]), spread_text(lost["tried"]), str(record["most"])]
        columns.append(f"{1e3 * _first_call(record):.0f} ms")
        rows.append(f"| {record['op']} | {len(lost['tried'])} | {' | '.join(columns)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _outcome_of_trying(record: Mapping[str, Any] | None, sweep: Path) -> dict[str, list[float]]:
    """What the picks of the tables of that run, and those of `try_out`, lose by the times of the sweep of the same
    shapes."""
    lost: dict[str, list[float]] = {"tables": [], "tried": []}
    if record is None:
        return lost
    times = {case.text: case.timed for case in journal.read(sweep).cases.values()}
    for shape in record["shapes"]:
        timed = times.get(shape["text"], {})
        for how, found in lost.items():
            pick = timed.get(journal.contestant_key(*shape[how]))
            found += [pick.ms / min(one.ms for one in timed.values()) - 1] if pick is not None else []
    return lost


def _first_call(record: Mapping[str, Any]) -> float:
    """Seconds, in the median of those that were tried out."""
    return float(statistics.median(shape["seconds"] for shape in record["shapes"] if shape["timed"]))
