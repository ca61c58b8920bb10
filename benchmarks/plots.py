"""Plots and README tables from raw results: `make plots`, or

    python benchmarks/plots.py --results benchmarks/results --images docs/images --page README.md docs/results.md

Every figure is computed from the sweeps' own journals (*.jsonl under --results). In a page a table stands between
`<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME being attention, attention_backward, matmul, matmul_ratios or
call_overhead;
`--check` says whether they are up to date and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.tuning import journal
from registry.tuning.grids import grid
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


def read_results(folder: Path) -> list[Results]:
    """Every sweep under a folder; files that are none are passed over."""
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            results = journal.read(path)
        except journal.ResultsError:
            continue
        if results.cases and results.mode == "events":
            found.append(results)
    return found


def speeds(case: CaseResults) -> dict[str, float]:
    """Each variant's best TFLOPS on a shape."""
    found: dict[str, float] = {}
    for entry in case.timed.values():
        if entry.variant not in HIDDEN:
            found[entry.variant] = max(found.get(entry.variant, 0.0), case.tflops(entry))
    return found


def gathered(all_results: Sequence[Results], op: str) -> dict[str, CaseResults]:
    """The shapes of an op over all files, by text; a later file wins."""
    return {case.text: case for results in all_results for case in results.of(op) if case.timed}


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


def device_line(all_results: Sequence[Results], op: str) -> str:
    results = next(r for r in reversed(all_results) if r.of(op))
    m = results.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "triton", "cudnn", "driver") if m.get(name))
    return f"{m['device']}, {versions}, {m['date']}"


# --- README tables ------------------------------------------------------------------------------------------------


def table(all_results: Sequence[Results], op: str) -> str:
    """Markdown: TFLOPS of each variant's best config, the fastest in bold."""
    cases = _table_cases(gathered(all_results, op), op)
    names = variants_in(cases)
    lines = [f"{device_line(all_results, op)}. TFLOPS, median over shuffled rounds, best config of each variant.", ""]
    lines.append("| shape | " + " | ".join(f"`{name}`" for name in names) + " |")
    lines.append("|---|" + "--:|" * len(names))
    for case in cases:
        found = speeds(case)
        best = max(found.values())
        cells = [_cell(found.get(name), best) for name in names]
        lines.append(f"| {case.text.replace(',', ', ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _table_cases(found: dict[str, CaseResults], op: str) -> list[CaseResults]:
    wanted = [c.text for c in (grid(op, "squares+llm") if op == "matmul" else grid(op, "paper18"))]
    return [found[text] for text in wanted if text in found] or list(found.values())


def _cell(speed: float | None, best: float) -> str:
    if speed is None:
        return ""
    text = f"{speed:.0f}" if speed >= 10 else f"{speed:.2f}"
    return f"**{text}**" if speed >= best * 0.995 else text


def fill(text: str, name: str, content: str) -> str:
    """A README with the table of that name replaced; unchanged where it has no place for it."""
    pattern = re.compile(rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def matmul_ratios(folder: Path) -> str:
    """Per set of benchmarks/matmul.py: the best of our variants over cuBLAS, and what registry.matmul picks over it."""
    sets: dict[tuple[str, str, str], dict[str, list[tuple[float, bool]]]] = {}
    line = ""
    for name in ("matmul_cells.json", "matmul_dispatched.json"):
        for path in sorted(folder.rglob(name)):
            found = json.loads(path.read_text())
            line = f"{found['device']}, torch {found['torch']}, triton {found['triton']}, {found['date']}."
            for row in found["rows"]:
                times = {label: statistics.median(values) for label, values in row["us"].items()}
                base = times.pop("torch_matmul")
                best = min(times, key=lambda label: times[label])
                key = (row["set"], row["dtype"], "at least 512" if row["m"] >= 512 else "fewer than 512")
                ratio = base / times[best], not best.startswith("torch")
                sets.setdefault(key, {}).setdefault(name, []).append(ratio)
    lines = [
        line,
        "",
        "| set | dtype | rows | best of ours | dispatched | where ours is picked |",
        "|---|---|---|--:|--:|--:|",
    ]
    every: dict[str, list[tuple[float, bool]]] = {}
    for key, files in sets.items():
        for name, values in files.items():
            every.setdefault(name, []).extend(values)
        lines.append(f"| {' | '.join(key)} | {_ratio_cells(files)} |")
    return "\n".join([*lines, f"| all | | | {_ratio_cells(every)} |"])


def _ratio_cells(files: Mapping[str, list[tuple[float, bool]]]) -> str:
    """ "mean / least (cells)" of what the best of ours does, of the picks, and of those picks that are ours."""
    picks = files.get("matmul_dispatched.json", [])
    cells = []
    for values in (files.get("matmul_cells.json", []), picks, [pick for pick in picks if pick[1]]):
        ratios = [ratio for ratio, _ in values]
        shown = f"{statistics.geometric_mean(ratios):.3f} / {min(ratios):.3f} ({len(ratios)})" if ratios else ""
        cells.append(shown)
    return " | ".join(cells)


def call_overhead(folder: Path) -> str:
    """Markdown: microseconds of CPU time per call, the medians of call_overhead.json."""
    lines = []
    for path in sorted(folder.glob("*/call_overhead.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        where = record["machine"]
        lines += [f"{where['device']} host, torch {where['torch']}, triton {where['triton']}, {where['date']}.", ""]
        lines += ["| call | us |", "|---|--:|"]
        lines += [f"| {name} | {statistics.median(values):.1f} |" for name, values in record["figures"].items()]
    return "\n".join(lines)


# --- plots --------------------------------------------------------------------------------------------------------


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--page", type=Path, nargs="*", default=[Path("README.md"), Path("docs/results.md")])
    parser.add_argument("--check", action="store_true", help="exit 1 where the README's tables are not the results'")
    options = parser.parse_args(arguments)
    all_results = read_results(options.results)
    if not all_results:
        print(f"no results under {options.results}", file=sys.stderr)
        return 1
    tables = {"call_overhead": call_overhead(options.results), "matmul_ratios": matmul_ratios(options.results)}
    for op in dict.fromkeys(op for results in all_results for op in results.ops):
        found = gathered(all_results, op)
        if not found:
            continue
        tables[op] = table(all_results, op)
        if not options.check:
            draw = plot_matmul if op == "matmul" else plot_attention
            image = options.images / f"{op}.png"
            draw(_table_cases(found, op), f"{op}: {device_line(all_results, op)}", image)
            print(image)
    old = [page for page in options.page if _write(page, tables, options.check)]
    return 1 if options.check and old else 0


def _write(page: Path, tables: Mapping[str, str], check: bool) -> bool:
    """Put the tables where the page has a place for them; True where that changed it (or would, with `check`)."""
    text = page.read_text(encoding="utf-8")
    filled = text
    for name, content in tables.items():
        filled = fill(filled, name, content)
    if filled != text and not check:
        page.write_text(filled, encoding="utf-8")
        print(page)
    return filled != text


if __name__ == "__main__":
    sys.exit(main())
