"""What the conformance kit ran on GPUs, as a table for plots.py: `conformance*.json`, as `python -m registry.testing
--json` writes them, by variant and card."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from registry.contract.capability import arch_matches
from registry.contract.target import Target
from registry.dispatch.catalog import catalog

CARDS = {"h200": "H200", "h100": "H100"}
"""Folders of results, and the devices that they are of."""


@dataclass
class KitRuns:
    """All runs of one variant on one card."""

    cases: int = 0
    failed: int = 0
    newest: tuple[int, str] = (0, "")
    """The number and the file of that run."""

    def cells(self) -> str:
        if not self.cases:
            return "none | | "
        number, place = self.newest
        return f"{self.cases} | {self.failed or ''} | [{number}]({place})"


def conformance(folder: Path) -> str:
    """Each variant that such a GPU runs: how many checks it had in all runs, how many of them failed in their day, and
    the newest run that it was in."""
    ran: dict[tuple[str, str], KitRuns] = {}
    for path in sorted(folder.rglob("conformance*.json")):
        number = int(re.sub(r"\D", "", path.stem) or 1)
        for report in json.loads(path.read_text(encoding="utf-8")):
            one = ran.setdefault((report["subject"], path.parent.name), KitRuns())
            one.cases += len(report["cases"])
            one.failed += sum(not case["passed"] for case in report["cases"])
            one.newest = max(one.newest, (number, f"../../benchmarks/results/{path.relative_to(folder).as_posix()}"))
    if not ran:
        return ""
    heads = "".join(f" {card}: checks | failed | newest run |" for card in CARDS.values())
    rows = [f"| variant |{heads}", "|---|" + "--:|" * (3 * len(CARDS))]
    for name in sorted(_on_gpus()):
        cells = " | ".join(ran.get((name, place), KitRuns()).cells() for place in CARDS)
        rows.append(f"| `{name}` | {cells} |")
    return "\n".join(rows)


def _on_gpus() -> list[str]:
    """The variants that claim one of these cards."""
    arches = {Target.named(card).arch for card in CARDS.values()}
    variants = catalog.get().variants.items()
    return [name for name, one in variants if any(arch_matches(one.requires.arch, arch) for arch in arches)]
