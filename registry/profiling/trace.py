"""Reads what Proton recorded of one launch: spans of warps, in clock cycles. Damage is named; what is whole is read."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import RegistryError
from registry.toolbox.scopes import ASYNC

_PLACE = re.compile(r"Core\s*(\d+) CTA\s*(\d+)")
_WARP = re.compile(r"warp (\d+)")


class TraceError(RegistryError):
    """A file that is no trace of a kernel."""


@dataclass(frozen=True)
class WarpSpan:
    """One warp between entering and leaving a scope."""

    kernel: str
    block: int
    sm: int
    warp: int
    name: str
    begin: float
    end: float

    @property
    def cycles(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Trace:
    """The spans of one launch, each block's clock beginning near zero."""

    spans: tuple[WarpSpan, ...]
    damaged: int = 0
    """Events that were passed over."""

    @functools.cached_property
    def _by_block(self) -> dict[int, list[WarpSpan]]:
        """A launch may have thousands of blocks, with a thousand spans each."""
        found: dict[int, list[WarpSpan]] = {}
        for span in sorted(self.spans, key=lambda span: (span.block, span.begin, span.end)):
            found.setdefault(span.block, []).append(span)
        return found

    @property
    def blocks(self) -> list[int]:
        return list(self._by_block)

    def of_block(self, block: int) -> list[WarpSpan]:
        return list(self._by_block.get(block, ()))


def read(path: Path, kernel: str = "") -> Trace:
    """A Chrome trace as Proton writes it, plain or gzipped; of several kernels the one named, or that with the most."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(data)["traceEvents"]
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise TraceError(f"{path}: no trace: {type(error).__name__}: {error}; was it cut off?") from error
    if not isinstance(events, list):
        raise TraceError(f"{path}: no trace: traceEvents is {type(events).__name__}, not a list")
    return collect(events, kernel, str(path))


def collect(events: Iterable[Any], kernel: str = "", where: str = "trace") -> Trace:
    spans: list[WarpSpan] = []
    damaged = 0
    for event in events:
        try:
            if event["ph"] == "X":
                spans.append(_span(event))
        except (TypeError, LookupError, ValueError, AttributeError):
            damaged += 1
    kernels = {span.kernel for span in spans}
    wanted = kernel or max(kernels, key=lambda name: sum(s.kernel == name for s in spans), default="")
    mine = [span for span in spans if span.kernel == wanted]
    if not mine:
        known = f"; it holds {', '.join(sorted(kernels))}" if kernels else ""
        raise TraceError(f"{where}: no spans of {kernel or 'any kernel'} ({damaged} damaged events){known}")
    return Trace(tuple(mine), damaged)


def _span(event: dict[str, Any]) -> WarpSpan:
    place, warp = _PLACE.search(event["pid"]), _WARP.search(event["tid"])
    if place is None or warp is None or not isinstance(event["name"], str):
        raise ValueError("no place of a warp")
    mhz = float(event.get("args", {}).get("Frequency (MHz)", 1000.0))  # Proton writes microseconds at this clock
    begin, cycles = float(event["ts"]) * mhz, float(event["dur"]) * mhz
    if not (begin >= 0 and cycles >= 0 and mhz > 0):
        raise ValueError("no stretch of time")
    sm, block = int(place[1]), int(place[2])
    return WarpSpan(str(event.get("cat", "")), block, sm, int(warp[1]), event["name"], begin, begin + cycles)


def perfetto(trace: Trace, blocks: Iterable[int], roles: dict[int, str]) -> str:
    """Some blocks as a trace that ui.perfetto.dev opens: a process for each block, threads named by role and,
    for the products that it sets going, by their names. A microsecond stands for 1000 cycles."""
    events: list[dict[str, Any]] = []
    for block in blocks:
        spans = trace.of_block(block)
        start = min(span.begin for span in spans)
        events.append(_name("process_name", block, 0, f"block {block} on SM {spans[0].sm}"))
        for warp in sorted({span.warp for span in spans}):
            own = lanes([span for span in spans if span.warp == warp])
            for lane, (what, held) in enumerate(own.items()):
                thread = warp * 16 + lane
                what = roles.get(warp, f"warp {warp}") + (f": {what}" if what else "")
                events.append(_name("thread_name", block, thread, what))
                events += [
                    {
                        "ph": "X",
                        "pid": block,
                        "tid": thread,
                        "name": span.name,
                        "ts": (span.begin - start) / 1e3,
                        "dur": span.cycles / 1e3,
                        "args": {"cycles": span.cycles},
                    }
                    for span in held
                ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": text}}


def lanes(spans: list[WarpSpan]) -> dict[str, list[WarpSpan]]:
    """What the warp does itself under "", and each product that it set going under its name: those run beside it."""
    found: dict[str, list[WarpSpan]] = {"": []}
    for span in spans:
        lane = span.name.removeprefix(ASYNC) if span.name.startswith(ASYNC) else ""
        found.setdefault(lane, []).append(span)
    return dict(sorted(found.items()))
