"""What a trace adds up to: time stalled per barrier, products in flight, and how much of the rest they cover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from registry.profiling.anatomy import Role
from registry.profiling.trace import Trace, WarpSpan
from registry.toolbox.scopes import ASYNC, WAIT
from registry.tuning.timing import quantile

Stretch = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One span's name in one role, over all blocks."""

    name: str
    share: float
    """Of the time looked at."""
    count: int
    median: float
    most: float
    """Cycles."""


@dataclass
class RoleFigures:
    """One role, over all blocks."""

    role: str
    lines: list[Line] = field(default_factory=list)
    stalled: float = 0.0
    """Share of its time in spans that wait."""
    in_flight: float | None = None
    """Share of the time in which a product of its own is in flight, as the next two over blocks of which a product was
    recorded whole; None where none was."""
    covered: float | None = None
    """Share of its own work (spans that neither wait nor fly) beside which some role's product is in flight."""
    covered_by_own: float | None = None


@dataclass
class Figures:
    """A whole trace. Shares are means over its blocks."""

    blocks: int
    cycles: float
    """The stretch that all roles of a block were recorded in, mean over blocks."""
    any_in_flight: float | None
    """Share of the time in which a product of some role is in flight; None where no product was recorded whole."""
    roles: list[RoleFigures] = field(default_factory=list)


def figures(trace: Trace, roles: Mapping[int, str]) -> Figures:
    """Figures of the warps named, which stand for their roles."""
    windows = {block: window(trace.of_block(block), roles) for block in trace.blocks}
    windows = {block: found for block, found in windows.items() if found[1] > found[0]}
    spans = {block: [s for s in trace.of_block(block) if s.warp in roles] for block in windows}
    total = sum(end - begin for begin, end in windows.values())
    if not total:
        return Figures(0, 0.0, None)
    flying = {block: merged(_cut(spans[block], windows[block], _is_async)) for block in windows}
    flying = {block: found for block, found in flying.items() if found}
    seen = sum(end - begin for block, (begin, end) in windows.items() if block in flying)
    in_flight = sum(map(length, flying.values())) / seen if seen else None
    found = Figures(len(windows), total / len(windows), in_flight)
    for warp, role in sorted(roles.items()):
        found.roles.append(_role(role, warp, spans, windows, flying, total))
    return found


def window(spans: Iterable[WarpSpan], roles: Mapping[int, str]) -> Stretch:
    """The stretch in which every role was recorded: the last spans of each warp are kept, which reach back unevenly.
    Of a product the one that was begun before is lost, so it begins with the first that is whole."""
    by_warp: dict[int, list[WarpSpan]] = {}
    for span in spans:
        if span.warp in roles:
            by_warp.setdefault(span.warp, []).append(span)
    if not by_warp:
        return 0.0, 0.0
    begins = [min(s.begin for s in own) for own in by_warp.values()]
    for own in by_warp.values():
        products = [span for span in own if _is_async(span)]
        begins += [min(s.begin for s in products if s.name == name) for name in {s.name for s in products}]
    return max(begins), min(max(s.end for s in own) for own in by_warp.values())


def _role(
    role: str,
    warp: int,
    spans: Mapping[int, list[WarpSpan]],
    windows: Mapping[int, Stretch],
    flying: Mapping[int, list[Stretch]],
    total: float,
) -> RoleFigures:
    found = RoleFigures(role)
    own = {block: [span for span in held if span.warp == warp] for block, held in spans.items()}
    for name in sorted({span.name for held in own.values() for span in held}):
        cut = [s for b in windows for s in _cut(own[b], windows[b], lambda span, name=name: span.name == name)]
        lengths = sorted(end - begin for begin, end in cut)
        if lengths:
            found.lines.append(Line(name, sum(lengths) / total, len(lengths), quantile(lengths, 0.5), lengths[-1]))
    found.lines.sort(key=lambda line: -line.share)
    found.stalled = sum(line.share for line in found.lines if line.name.startswith(WAIT))
    mine = {block: merged(_cut(own[block], windows[block], _is_async)) for block in flying}
    seen = sum(windows[block][1] - windows[block][0] for block in flying)
    found.in_flight = sum(map(length, mine.values())) / seen or None if seen else None
    work = {block: merged(_cut(own[block], windows[block], _is_work)) for block in flying}
    worked = sum(map(length, work.values()))
    if worked:
        found.covered = sum(length(common(work[b], flying[b])) for b in flying) / worked
        if found.in_flight is not None:
            found.covered_by_own = sum(length(common(work[b], mine[b])) for b in flying) / worked
    return found


def _is_async(span: WarpSpan) -> bool:
    return span.name.startswith(ASYNC)


def _is_work(span: WarpSpan) -> bool:
    return not span.name.startswith((ASYNC, WAIT))


def _cut(spans: Iterable[WarpSpan], within: Stretch, wanted: Any) -> list[Stretch]:
    """The stretches of some spans inside of a window."""
    low, high = within
    cut = [(max(s.begin, low), min(s.end, high)) for s in spans if wanted(s)]
    return [(begin, end) for begin, end in cut if end > begin]


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same time without overlaps, in order."""
    found: list[Stretch] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(one: list[Stretch], other: list[Stretch]) -> list[Stretch]:
    """The time that both cover; both merged."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low < high:
            found.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(stretches: Iterable[Stretch]) -> float:
    return sum(end - begin for begin, end in stretches)


def role_names(roles: Iterable[Role]) -> dict[int, str]:
    """First warp of each role -> what to call it: those that issue matrix products are consumers, those that only bring
    results to memory senders, others producers."""
    kinds = {r.first_warp: "consumer" if r.multiplies else "sender" if r.sends else "producer" for r in roles}
    names: dict[int, str] = {}
    for kind in set(kinds.values()):
        alike = [warp for warp, its in sorted(kinds.items()) if its == kind]
        names |= {warp: f"{kind} {number}" if len(alike) > 1 else kind for number, warp in enumerate(alike)}
    return dict(sorted(names.items()))
