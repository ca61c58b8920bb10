"""How plots.py draws: bars of TFLOPS over shapes, one colour a variant, and lines over the length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.tuning.journal import CaseResults, Results

COLOURS = {
    "gluon": ("#d1495b", "#8f2d3b", "#e8a0a9"),
    "triton": ("#edae49", "#b97f1f", "#f6d7a4"),
    "torch_cudnn": ("#30638e",),
    "torch_flash": ("#8fb8de",),
    "torch_efficient": ("#c6d8e8",),
    "torch_matmul": ("#30638e",),
    "peer.fa3": ("#3d3d3d",),
    "peer.flex": ("#9a9a9a",),
}
OTHERS = ("#66a182", "#8d6a9f", "#5fa8a3")
HIDDEN = ("torch_math", "torch_math_backward")
MATMUL_SHOWN = 24


def speeds(case: CaseResults) -> dict[str, float]:
    """Each variant's best TFLOPS on a shape."""
    found: dict[str, float] = {}
    for entry in case.timed.values():
        if entry.variant not in HIDDEN:
            found[entry.variant] = max(found.get(entry.variant, 0.0), case.tflops(entry))
    return found


def variants_in(cases: Sequence[CaseResults]) -> list[str]:
    """Names in a fixed order: ours, torch's, then peers."""
    names = {name for case in cases for name in speeds(case)}
    return sorted(names, key=lambda name: (name.startswith("peer."), name.startswith("torch_"), name))


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour a name: a family of shades for each kind of kernel."""
    found: dict[str, str] = {}
    for name in names:
        shades = next((shades for start, shades in COLOURS.items() if name.startswith(start)), OTHERS)
        free = [shade for shade in shades if shade not in found.values()]
        found[name] = free[0] if free else shades[-1]
    return found


def plot_attention(cases: Sequence[CaseResults], title: str, path: Path) -> None:
    """Bars over the length; a panel for each head dim and mask."""
    plt = _pyplot()
    dims = sorted({case.facts["head_dim"] for case in cases})
    masks = sorted({case.facts["causal"] for case in cases})
    names = variants_in(cases)
    figure, panels = plt.subplots(len(masks), len(dims), figsize=(4.6 * len(dims), 3.1 * len(masks)), squeeze=False)
    for row, causal in zip(panels, masks, strict=True):
        for panel, dim in zip(row, dims, strict=True):
            shown = [c for c in cases if c.facts["head_dim"] == dim and c.facts["causal"] == causal]
            shown.sort(key=lambda case: case.facts["seqlen_q"])
            _bars(panel, shown, names, [f"{c.facts['seqlen_q'] / 1024:g}k" for c in shown])
            panel.set_title("" if not shown else f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=10)
    panels[0][0].set_ylabel("TFLOPS")
    _finish(figure, names, title, path)


def plot_matmul(cases: Sequence[CaseResults], title: str, path: Path) -> None:
    """Bars over shapes, the products with the most work."""
    plt = _pyplot()
    shown = sorted(sorted(cases, key=lambda case: -case.flops)[:MATMUL_SHOWN], key=lambda case: case.flops)
    names = variants_in(shown)
    figure, panels = plt.subplots(1, 1, figsize=(max(9.0, 0.75 * len(shown)), 4.2), squeeze=False)
    labels = [f"{c.facts['m']}x{c.facts['n']}x{c.facts['k']}\n{c.facts['layout']}" for c in shown]
    _bars(panels[0][0], shown, names, labels)
    panels[0][0].tick_params(axis="x", labelrotation=90, labelsize=7)
    panels[0][0].set_ylabel("TFLOPS")
    _finish(figure, names, title, path)


def plot_warp_groups(results: Results, path: Path) -> None:
    """TFLOPS over the length, by consumer warp groups: the median of the rounds, and their range."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for panel, causal in zip(panels, (False, True), strict=True):
        cases = [case for case in results.of("attention") if case.facts["causal"] is causal]
        lengths = [case.facts["seqlen_q"] for case in cases]
        for groups, colour in ((2, "#7a8794"), (3, "#c2410c")):
            found = [next(e for e in c.timed.values() if e.config["consumers"] == groups) for c in cases]
            rounds = [[c.flops / s["ms"] / 1e9 for s in e.samples.values()] for c, e in zip(cases, found, strict=True)]
            label = f"{groups} consumer warp groups ({64 * groups} rows)"
            panel.plot(lengths, [statistics.median(r) for r in rounds], "o-", color=colour, markersize=4, label=label)
            panel.fill_between(lengths, list(map(min, rounds)), list(map(max, rounds)), color=colour, alpha=0.15, lw=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1024, 2048, 4096, 8192, 16384], ["1k", "2k", "4k", "8k", "16k"])
        panel.set(title="causal" if causal else "full attention", xlabel="sequence length")
        panel.grid(alpha=0.25)
    panels[0].set(ylabel="TFLOPS", ylim=(0, None))
    panels[0].legend(frameon=False, loc="lower right", fontsize=8)
    where = f"{results.machine['device']}, triton {results.machine['triton']}"
    figure.suptitle(f"gluon_fa3 forward, head dim 64, bf16, 16k tokens: {where}", fontsize=10)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)
    print(path)


def _bars(panel: Any, cases: Sequence[CaseResults], names: Sequence[str], labels: Sequence[str]) -> None:
    if not cases:
        panel.set_axis_off()
        return
    width, shades = 0.84 / max(1, len(names)), colours(names)
    for number, name in enumerate(names):
        places = [i - 0.42 + width * (number + 0.5) for i in range(len(cases))]
        panel.bar(places, [speeds(case).get(name, 0.0) for case in cases], width, color=shades[name])
    panel.set_xticks(range(len(cases)), labels)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def _finish(figure: Any, names: Sequence[str], title: str, path: Path) -> None:
    handles = [_pyplot().Rectangle((0, 0), 1, 1, color=shade) for shade in colours(names).values()]
    figure.legend(handles, names, loc="lower center", ncols=min(len(names), 6), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    _pyplot().close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
