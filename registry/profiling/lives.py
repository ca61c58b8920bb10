"""From when to when each buffer in shared memory holds something: what a kernel's code does between its marks, put
beside the times at which a recorded launch came by those marks.

The code says at which barriers a ring's slots are announced and given back, and beside which marks (scopes) roles wait
there and arrive; the trace says when. A slot is *ahead* from when the role that fills it found it empty (it is on its
way, or there and nobody asked for it yet), *held* from when the first reader found it full until the last reader let
go of it, and free else. Traces hold the last spans of
each role, so uses are counted from the end, where all roles are through. Of a ring whose marks contradict each other
(a slot full again before it was let go of) nothing is told. Other buffers: when they are written and read.

Nothing here knows a kernel: rings of `registry.toolbox.hopper` and scopes around the waits are enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from registry.profiling.anatomy import Anatomy, Buffer, CodeStep
from registry.profiling.figures import Stretch, length, merged, window
from registry.profiling.trace import Trace, WarpSpan
from registry.toolbox.scopes import ASYNC
from registry.tuning.timing import quantile

Mark = tuple[str, str]
"""("enter" or "leave", name of the span)."""
SLACK = 150.0
"""Cycles by which two roles' clocks may contradict each other: recording takes some."""
CONTRADICTIONS = 0.05
"""Of a ring's uses, beyond which its marks are not believed."""
LEAST_KNOWN = 0.5
"""Of the uses that were waited for, of how many the end must be known."""


@dataclass(frozen=True)
class Life:
    """A stretch of time in which a buffer, or one slot of a ring, is in use."""

    buffer: str
    slot: int | None
    """Counted so that the last use recorded is of the last slot."""
    what: str
    """"ahead", "held"; of buffers that are no ring "written", "read"."""
    begin: float
    end: float


@dataclass(frozen=True)
class Place:
    """Where in a role's code something happens: in a span, or between two marks."""

    span: str
    """The innermost around it that is no product, or of a read the product that it is for; "" where there is none."""
    after: Mark
    before: Mark
    always: bool
    """Whether it happens each time that the role comes by the mark `after`."""


@dataclass
class Ring:
    """A buffer of slots that one role fills and others read."""

    buffer: str
    stages: int
    bytes: int
    filler: int
    full: str
    empty: str
    together: bool = True
    """Whether every reader uses every slot, or each has some to itself: as many as it takes let go of a slot."""
    found_empty: set[str] = field(default_factory=set)
    """Spans of the filler that end when a slot was found empty."""
    found_full: dict[int, set[str]] = field(default_factory=dict)
    """By reader, spans that end when a slot was found full."""
    let_go: dict[int, list[Place]] = field(default_factory=dict)


def rings(anatomy: Anatomy, steps: Sequence[CodeStep]) -> list[Ring]:
    """The rings that the code says enough of."""
    sizes = {buffer.name: buffer for buffer in anatomy.buffers}
    found: dict[str, Ring] = {}
    for role in sorted({step.role for step in steps}):
        own = [step for step in steps if step.role == role]
        for number, step in enumerate(own):
            stages = _stages(sizes.get(step.name), sizes.get(step.announced))
            waits = [other for other in own[:number] if other.what == "wait"]
            if step.what == "fill" and stages and waits and waits[-1].name != step.announced:
                ring = Ring(step.name, stages, sizes[step.name].bytes, role, step.announced, waits[-1].name)
                found.setdefault(step.name, ring)
    for ring in found.values():
        ring.found_empty = {place.span for role, place in _places(steps, "wait", ring.empty) if role == ring.filler}
        for role, place in _places(steps, "wait", ring.full):
            ring.found_full.setdefault(role, set()).add(place.span)
        for role, place in _places(steps, "arrive", ring.empty):
            ring.let_go.setdefault(role, []).append(place)
        ring.together = sizes[ring.empty].arrivals >= len(ring.let_go)
    return [ring for ring in found.values() if _told(ring, steps)]


def _told(ring: Ring, steps: Sequence[CodeStep]) -> bool:
    """Whether all waits are marked, and those of readers by spans in which they wait for this ring each time."""
    waits = [*ring.found_full.values(), ring.found_empty]
    if not ring.found_full or not ring.found_empty or any("" in spans for spans in waits):
        return False
    alone = all(
        ring.full in waited
        for role, names in ring.found_full.items()
        for name in names
        for waited in _waited(steps, role, name)
    )
    return alone and ring.let_go.keys() == ring.found_full.keys()


def _waited(steps: Sequence[CodeStep], role: int, span: str) -> list[set[str]]:
    """The barriers waited for in each of the places where a role enters a span."""
    found: list[set[str]] = []
    inside = False
    for step in steps:
        if step.role == role and step.name == span and step.what in ("enter", "leave"):
            inside = step.what == "enter"
            if inside:
                found.append(set())
        elif step.role == role and inside and step.what == "wait":
            found[-1].add(step.name)
    return found


def _stages(tiles: Buffer | None, barriers: Buffer | None) -> int:
    if tiles is None or barriers is None:
        return 0
    count, of_barriers = (int(buffer.shape.split(" ")[0] or 0) for buffer in (tiles, barriers))
    return of_barriers if of_barriers and count % of_barriers == 0 else 0  # a stage may hold several tiles


def _places(steps: Sequence[CodeStep], what: str, name: str) -> list[tuple[int, Place]]:
    """(role, place) of each step that does something to a buffer."""
    found = []
    for role in sorted({step.role for step in steps}):
        own = [step for step in steps if step.role == role]
        marks = [number for number, step in enumerate(own) if step.what in ("enter", "leave")]
        hits = [number for number, step in enumerate(own) if step.what == what and step.name == name]
        after = {hit: max((mark for mark in marks if mark < hit), default=None) for hit in hits}
        for hit, mark in after.items():
            following = next((own[other] for other in marks if other > hit), None)
            if mark is None or following is None:
                continue
            alike = [other for other in marks if _mark(own[other]) == _mark(own[mark])]
            always = all(other in after.values() for other in alike)
            span = _around(own[:hit], what)
            found.append((role, Place(span, _mark(own[mark]), _mark(following), always)))
    return found


def _mark(step: CodeStep) -> Mark:
    return step.what, step.name


def _around(before: Iterable[CodeStep], what: str) -> str:
    """The span that is open, the last to be entered; a product only for what is read."""
    opened: list[str] = []
    for step in before:
        if step.what == "enter":
            opened.append(step.name)
        elif step.what == "leave" and step.name in opened:
            opened.remove(step.name)
    own = [name for name in opened if not name.startswith(ASYNC)]
    products = opened if what == "read" and opened and opened[-1].startswith(ASYNC) else []
    return (products or own or [""])[-1]


# --- the times ------------------------------------------------------------------------------------------------------


def lives(
    anatomy: Anatomy, steps: Sequence[CodeStep], trace: Trace, block: int, roles: Mapping[int, str]
) -> list[Life]:
    """Of one block, while all its roles were recorded; from its beginning, as spans are."""
    spans = trace.of_block(block)
    by_role = {role.number: [s for s in spans if s.warp == role.first_warp] for role in anatomy.roles}
    ends = window(spans, roles)
    ringed = rings(anatomy, steps)
    found: list[Life] = []
    taken: dict[int, list[float]] = {}
    for ring in ringed:
        first = next(other for other in ringed if (other.full, other.empty) == (ring.full, ring.empty))
        if first is ring:
            found += _cut(_of_ring(ring, by_role, taken.setdefault(ring.filler, [])), ends)
        else:  # announced and let go of together with the first
            found += [dataclasses.replace(one, buffer=ring.buffer) for one in found if one.buffer == first.buffer]
    told = {one.buffer for one in found}
    for buffer in anatomy.buffers:
        if buffer.kind == "tiles" and buffer.name not in told:
            found += _cut(_of_buffer(buffer.name, steps, by_role), ends)
    return sorted(found, key=lambda one: (one.begin, one.end))


def _cut(found: Iterable[Life], ends: Stretch) -> list[Life]:
    inside = [
        dataclasses.replace(one, begin=max(one.begin, ends[0]), end=min(one.end, ends[1]))
        for one in found
        if one.end > ends[0] and one.begin < ends[1]
    ]
    return [one for one in inside if one.end > one.begin]


def _of_ring(ring: Ring, by_role: Mapping[int, list[WarpSpan]], taken: list[float]) -> list[Life]:
    """Its uses, counted from the last; none where what the roles say does not agree."""
    full = {role: _ends(by_role.get(role, []), names) for role, names in ring.found_full.items()}
    held: dict[int, Stretch] = {}
    for exactly in (True, False):
        free = {role: _times(by_role.get(role, []), places, exactly) for role, places in ring.let_go.items()}
        own = [(full[role], _after(full[role], free[role])) for role in full]
        held = _agreed(_together(own) if ring.together else _one_by_one(own), ring.stages)
        if held:
            break
    empty = [time for time in _ends(by_role.get(ring.filler, []), ring.found_empty) if time not in taken]
    found = []
    for i, (begin, end) in sorted(held.items()):
        found.append(Life(ring.buffer, i % ring.stages, "held", begin, end))
        before = held.get(i - ring.stages)
        began = next((time for time in empty if before and before[1] - SLACK <= time <= begin), None)
        if began is not None:
            empty.remove(began)
            taken.append(began)
            found.append(Life(ring.buffer, i % ring.stages, "ahead", began, begin))
    return found


def _after(full: list[float], free: list[float]) -> list[float | None]:
    """When a reader let go of each slot that it found full: as long after as it did at the last, where both are known.
    A trace misses single spans, so counting alone would pair the wrong ones before a gap."""
    if len(free) < LEAST_KNOWN * len(full) or _lag(full, free) <= 0:
        return [None] * len(full)
    return _nearest(full, free, _lag(full, free), _period(full))


def _together(own: Sequence[tuple[list[float], list[float | None]]]) -> dict[int, Stretch | None]:
    """By number, uses of which all readers have part."""
    first, _ = lead = max(own, key=lambda one: len(one[0]))
    found: dict[int, Stretch | None] = {}
    ends = {id(one): dict(zip(*one, strict=True)) for one in own}
    others = [one for one in own if one is not lead]
    same = [_nearest(first, full, _lag(first, full), _period(first)) for full, _ in others]
    for i, begin in enumerate(first):
        begins = [begin, *(times[i] for times in same)]
        parties = zip([lead, *others], begins, strict=True)
        last = [None if time is None else ends[id(one)].get(time) for one, time in parties]
        known = [time for time in begins if time is not None], [time for time in last if time is not None]
        found[i - len(first)] = (min(known[0]), max(known[1])) if all(len(k) == len(own) for k in known) else None
    return found


def _one_by_one(own: Sequence[tuple[list[float], list[float | None]]]) -> dict[int, Stretch | None]:
    """By number, uses that one reader or another has to itself."""
    each = [(begin, end) for full, ends in own for begin, end in zip(full, ends, strict=True)]
    each.sort(key=lambda use: use[0])
    return {i - len(each): None if end is None else (begin, end) for i, (begin, end) in enumerate(each)}


def _agreed(uses: Mapping[int, Stretch | None], stages: int) -> dict[int, Stretch]:
    """Uses whose ends are known; none where that holds of too few, or a slot is full again before it was let go of."""
    held = {i: use for i, use in uses.items() if use is not None}
    if not held or len(held) < LEAST_KNOWN * len(uses):
        return {}
    wrong = sum(i + stages in held and held[i + stages][0] < end - SLACK for i, (_, end) in held.items())
    return held if wrong <= CONTRADICTIONS * len(held) else {}


def _lag(one: Sequence[float], other: Sequence[float]) -> float:
    """How much later the other comes, by the last few, which belong together as all roles are through at the end."""
    pairs = list(zip(reversed(one), reversed(other), strict=False))[:5]
    return quantile(sorted(b - a for a, b in pairs), 0.5) if pairs else 0.0


def _period(times: Sequence[float]) -> float:
    steps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    return quantile(steps, 0.5) if steps else math.inf


def _nearest(times: Sequence[float], others: Sequence[float], lag: float, period: float) -> list[float | None]:
    """For each time the nearest of the others to so much later, if it is nearer than half a period."""
    found: list[float | None] = []
    for time in times:
        near = min(others, key=lambda other: abs(other - time - lag), default=math.inf)
        found.append(near if abs(near - time - lag) <= period / 2 else None)
    return found


def _of_buffer(name: str, steps: Sequence[CodeStep], by_role: Mapping[int, list[WarpSpan]]) -> list[Life]:
    found = []
    for what, said in (("fill", "written"), ("write", "written"), ("read", "read")):
        stretches: list[Stretch] = []
        for role, place in _places(steps, what, name):
            own = by_role.get(role, [])
            if place.span:
                stretches += [(span.begin, span.end) for span in own if span.name == place.span]
            else:
                stretches += _between(own, place)
        found += [Life(name, None, said, begin, end) for begin, end in merged(stretches)]
    return found


def _ends(spans: Iterable[WarpSpan], names: Iterable[str]) -> list[float]:
    return sorted(span.end for span in spans if span.name in names)


def _events(spans: Iterable[WarpSpan]) -> list[tuple[float, Mark]]:
    """When a role came by which mark."""
    held = list(spans)
    entered = [(span.begin, ("enter", span.name)) for span in held]
    return sorted([*entered, *((span.end, ("leave", span.name)) for span in held)])


def _between(spans: Iterable[WarpSpan], place: Place) -> list[Stretch]:
    events = _events(spans)
    pairs = zip(events, events[1:], strict=False)
    return [(one[0], two[0]) for one, two in pairs if (one[1], two[1]) == (place.after, place.before)]


def _times(spans: Sequence[WarpSpan], places: Iterable[Place], exactly: bool) -> list[float]:
    """When a role came by some places: at the end of the span they are in, else at the mark before them. Of a mark
    behind which they do not always lie, when the mark that follows in the code came next (the end of a loop is followed
    by its beginning, though), or, not exactly, every time."""
    found: set[float] = set()
    for place in places:
        if place.span:
            found |= set(_ends(spans, {place.span}))
        elif place.always or not exactly:
            found |= {time for time, mark in _events(spans) if mark == place.after}
        else:
            found |= {begin for begin, _ in _between(spans, place)}
    return sorted(found)


# --- what it adds up to ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferUse:
    """One buffer over all blocks. Shares of the time, means over its slots; medians in cycles."""

    buffer: str
    slots: int
    bytes: int
    ahead: float
    held: float
    times: int
    median_ahead: float | None
    median_held: float

    @property
    def in_use(self) -> float:
        """Bytes, on average over the time."""
        return self.bytes * (self.ahead + self.held)


def uses(anatomy: Anatomy, steps: Sequence[CodeStep], trace: Trace, roles: Mapping[int, str]) -> list[BufferUse]:
    """What buffers are in use how long; those of which the marks tell nothing are left out."""
    by_block = {block: lives(anatomy, steps, trace, block, roles) for block in trace.blocks}
    windows = {block: window(trace.of_block(block), roles) for block in trace.blocks}
    total = sum(end - begin for begin, end in windows.values())
    found = []
    for buffer in anatomy.buffers:
        own = [(block, one) for block, held in by_block.items() for one in held if one.buffer == buffer.name]
        if not own or total <= 0:
            continue
        slots = max((one.slot or 0) for _, one in own) + 1
        first = [(block, one) for block, one in own if one.what in ("ahead", "written")]
        later = [(block, one) for block, one in own if one.what in ("held", "read")]
        begins, lasts = (sorted(one.end - one.begin for _, one in some) for some in (first, later))
        found.append(
            BufferUse(
                buffer.name,
                slots,
                buffer.bytes,
                _share(first) / total / slots,
                _share(later) / total / slots,
                len(later) or len(first),
                quantile(begins, 0.5) if begins else None,
                quantile(lasts, 0.5) if lasts else 0.0,
            )
        )
    return found


def _share(some: Sequence[tuple[int, Life]]) -> float:
    """Time in all slots together."""
    by_slot: dict[tuple[int, int | None], list[Stretch]] = {}
    for block, one in some:
        by_slot.setdefault((block, one.slot), []).append((one.begin, one.end))
    return sum(length(merged(stretches)) for stretches in by_slot.values())
