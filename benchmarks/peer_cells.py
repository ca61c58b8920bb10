"""Cells of attention measured beside the peers' own kernels: what `peer_cells_*.jsonl` hold, as tables for plots.py.

The first line of a file says what ran ("kind": "run"), the others are cells: what was timed ("backward", "forward back
to back", "forward single", "training"), the shape, and the TFLOPS of each contestant in that run, "ours" among them.
measure_cells.py writes them; its lines of "kind": "failed" name who could not run, and cells that were not reached.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean as _mean
from typing import Any

Cell = Mapping[str, Any]
PEERS = {"FlashAttention-3": "fa3", "FlashAttention-4": "fa4"}
"""How a cell names those that have a version of their own."""
TIMED = ("forward back to back", "forward single", "backward")
"""What runs beside all peers; training is torch's own against ours."""


def read_cells(path: Path) -> tuple[Cell, list[Cell]]:
    """(what ran, the cells) of one file."""
    first, *others = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if first["kind"] != "run":
        raise ValueError(f"{path}: the first line is of kind {first['kind']!r}, not 'run'")
    return first, [line for line in others if line["kind"] == "cell"]


def of_best(cell: Cell) -> float:
    """Ours over the fastest peer of the same cell."""
    return float(cell["tflops"]["ours"] / max(speed for name, speed in cell["tflops"].items() if name != "ours"))


def peer_cells(folder: Path) -> str:
    """Markdown: for each run and what was timed, ours over the best peer and over each; in the order of their names."""
    paths = sorted(folder.rglob("peer_cells_*.jsonl"), key=lambda path: path.stem)
    return "\n\n".join("\n".join(table(*read_cells(path))) for path in paths)


def peers_at_a_glance(folder: Path) -> str:
    """Markdown: ours over the best of all peers, by the newest run of each card in which none was missing."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for path in sorted(folder.rglob("peer_cells_*.jsonl"), key=lambda path: path.stem):
        run, cells = read_cells(path)
        whole = [cell for cell in cells if cell["tflops"].keys() >= set(PEERS.values())]
        ratios: dict[tuple[str, str], list[float]] = {}
        for cell in whole:
            ratios.setdefault((cell["timed"], _heads(cell)), []).append(of_best(cell))
        found.setdefault(run["machine"].split()[1], {}).update(ratios)
    if not found:
        return ""
    cards = sorted(found, reverse=True)
    lines = [
        f"| timed | cells | {' | '.join(f'{card} | least' for card in cards)} |",
        "|---|---|" + "--:|--:|" * len(cards),
    ]
    for timed, heads in itertools.product(TIMED, ("alike", "grouped")):
        here = [found[card].get((timed, heads), []) for card in cards]
        if not any(here):
            continue
        figures = " | ".join(f"{_mean(ratios):.3f} | {min(ratios):.3f}" if ratios else " | " for ratios in here)
        lines.append(f"| {timed} | {max(map(len, here))}, {'heads ' * (heads == 'alike')}{heads} | {figures} |")
    return "\n".join(lines)


def table(run: Cell, cells: list[Cell]) -> Iterator[str]:
    """Markdown, line by line, of one run."""
    peers = list(dict.fromkeys(name for cell in cells for name in cell["tflops"] if name != "ours"))
    absent = {name for name, peer in PEERS.items() if peer not in peers}
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if name not in absent)
    yield f"{run['machine']}; {versions}; {run['of']}"
    yield ""
    yield f"| timed | heads | cells | over the best | least | {' | '.join(f'over {name}' for name in peers)} |"
    yield "|---|---|--:|--:|--:|" + "--:|" * len(peers)
    for timed in dict.fromkeys(cell["timed"] for cell in cells):
        for heads in ("alike", "grouped"):
            here = [cell for cell in cells if cell["timed"] == timed and _heads(cell) == heads]
            if here:
                ratios = [of_best(cell) for cell in here]
                figures = [f"{_mean(ratios):.3f}", f"{min(ratios):.3f}", *(_over(here, name) for name in peers)]
                yield f"| {timed} | {heads} | {len(here)} | {' | '.join(figures)} |"


def _heads(cell: Cell) -> str:
    return "alike" if cell["hq"] == cell["hkv"] else "grouped"


def _over(cells: list[Cell], peer: str) -> str:
    ratios = [cell["tflops"]["ours"] / cell["tflops"][peer] for cell in cells if peer in cell["tflops"]]
    return f"{_mean(ratios):.3f}" if ratios else ""
