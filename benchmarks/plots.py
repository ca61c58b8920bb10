"""Plots and tables of README.md and docs/ from raw results: `make plots`, or

    python benchmarks/plots.py --results benchmarks/results --images docs/images --page README.md docs

Every figure is computed from the sweeps' own journals (*.jsonl under --results). In a page a table stands between
`<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME being an op of SHOWN or one of WRITERS. Whatever page of a
folder holds the marker gets the table: a section moves with its marker.
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

from call_tables import call_overhead, first_calls, new_calls, new_shapes, warm_calls
from conformance_table import conformance
from drawing import plot_attention, plot_matmul, plot_warp_groups, speeds, variants_in
from off_grid import at_a_glance, every_draw, losing, lost_between, note_new_draws, tried_out, worst_shapes
from peer_cells import peer_cells, peers_at_a_glance
from product_cells import dispatched, fastest, product_cells, ratios_text, tf32_ratios
from prompt_cells import prompt_cells

from registry.ops.parts.cases import Case
from registry.tuning import journal
from registry.tuning.grids import grid
from registry.tuning.journal import CaseResults, Results

SHAPES = Path(__file__).parent / "shapes"

APART = ("random_", "judged_", "older_", "live_")
"""How names begin of sweeps that are no part of the tables of shapes: draws, what was replaced, single comparisons."""


def read_results(folder: Path) -> list[Results]:
    """Every sweep of single launches under a folder, and those whose cases say for themselves how they were timed (mode
    "mixed"); files that are none are passed over."""
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            results = journal.read(path)
        except journal.ResultsError:
            continue
        if results.cases and results.mode in ("events", journal.MIXED) and not path.stem.startswith(APART):
            found.append(results)
    return found


def gathered(all_results: Sequence[Results], op: str) -> dict[str, CaseResults]:
    """The shapes of an op over all files, by text; a later file wins."""
    return {case.text: case for results in all_results for case in results.of(op) if case.timed}


def device_line(all_results: Sequence[Results], op: str) -> str:
    results = next(r for r in reversed(all_results) if r.of(op))
    m = results.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "triton", "cudnn", "driver") if m.get(name))
    return f"{m['device']}, {versions}, {m['date']}"


# --- tables -------------------------------------------------------------------------------------------------------


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


SHOWN = {"matmul": "squares+llm", "attention": "paper18", "attention_backward": "paper18"}
"""Which grid of an op the table and the plot show."""


ROWS = {"matmul": ("layout", "m", "n", "k"), "attention": ("head_dim", "causal", "seqlen_k")}
"""What rows of a table are in the order of."""


def _table_cases(found: dict[str, CaseResults], op: str) -> list[CaseResults]:
    wanted = [case.text for case in grid(op, SHOWN[op])]
    order = ROWS[op.removesuffix("_backward")]
    shown = [found[text] for text in wanted if text in found] or list(found.values())
    return sorted(shown, key=lambda case: [case.facts[name] for name in order])


def _cell(speed: float | None, best: float) -> str:
    if speed is None:
        return ""
    text = f"{speed:.0f}" if speed >= 10 else f"{speed:.2f}"
    return f"**{text}**" if speed >= best * 0.995 else text


def fill(text: str, name: str, content: str) -> str:
    """A page with the table of that name replaced; unchanged where it has no place for it."""
    pattern = re.compile(rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def shape_sets(op: str, name: str) -> dict[str, list[str]]:
    """The texts of benchmarks/shapes/NAME.txt under each of its `# set: ...` lines."""
    sets: dict[str, list[str]] = {}
    for line in (SHAPES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# set: "):
            shapes = sets[line.removeprefix("# set: ")] = []
        elif line and not line.startswith("#"):
            shapes.append(Case.parse(op, line).text)
    return sets


def of_sets(results: Results, sets: Mapping[str, list[str]]) -> dict[str, list[CaseResults]]:
    """The measured shapes of each set."""
    found = {case.text: case for case in results.cases.values() if case.timed}
    return {name: [found[text] for text in texts if text in found] for name, texts in sets.items()}


def matmul_ratios(folder: Path) -> str:
    """Per set of shapes/matmul.txt: the best of our variants over cuBLAS, and what `registry.matmul` picks over it."""
    lines: list[str] = []
    for path in sorted(folder.rglob("matmul_sets.jsonl")):
        results = journal.read(path)
        groups: dict[tuple[str, ...], list[tuple[float, float, bool]]] = {}
        for name, cases in of_sets(results, shape_sets("matmul", "matmul")).items():
            for case in cases:
                rows = "at least 512" if case.facts["m"] >= 512 else "fewer than 512"
                pick, base = dispatched(results, case), fastest(case, "torch_matmul")
                best = fastest(case, "gluon_*", "triton_*", "peer.more_*")
                if pick is not None and base is not None and best is not None:
                    found = base / best, base / pick.ms, not pick.variant.startswith("torch")
                    groups.setdefault((name, case.facts["dtype"], rows), []).append(found)
        groups["all", "", ""] = [cell for cells in groups.values() for cell in cells]
        lines += [device_line([results], "matmul") + ".", ""]
        lines += ["| set | dtype | rows | best of ours | dispatched | where ours is picked |"]
        lines += ["|---|---|---|--:|--:|--:|"]
        for key, cells in groups.items():
            columns = [b for b, _, _ in cells], [p for _, p, _ in cells], [p for _, p, ours in cells if ours]
            lines.append(f"| {' | '.join([*key, *map(ratios_text, columns)])} |")
    return "\n".join(lines)


def guided(folder: Path) -> str:
    """What a guided sweep measured and picked, held against a full one of the same shapes, by the full one's times."""
    rows = ["| op | shapes | measured | picks slower, mean | worst | within 1% |", "|---|--:|--:|--:|--:|--:|"]
    every: list[tuple[float, str, int, int]] = []

    def row(name: str, lost: Sequence[tuple[float, str, int, int]]) -> str:
        shares = [share for share, *_ in lost]
        tried, of = sum(one for *_, one, _ in lost), sum(one for *_, one in lost)
        near = f"{sum(share <= 0.01 for share in shares)} of {len(shares)}"
        measured = f"{tried} of {of} ({tried / of:.1%})"
        return f"| {name} | {len(lost)} | {measured} | {statistics.mean(shares):.2%} | {max(shares):.1%} | {near} |"

    for path in sorted(folder.rglob("live_guided_*.jsonl")):
        chosen, full = journal.read(path), journal.read(path.with_name(path.name.replace("guided", "full", 1)))
        lost = []
        for key, case in full.cases.items():
            tried = chosen.cases[key].timed
            pick, best = case.timed[min(tried, key=lambda k: tried[k].ms)], min(case.timed.values(), key=lambda e: e.ms)
            text = f"{case.op} `{case.text}`: {pick.variant} {1e3 * pick.ms:.1f}, {best.variant} {1e3 * best.ms:.1f} us"
            lost.append((pick.ms / best.ms - 1, text, len(tried), len(case.timed)))
        rows.append(row(full.ops[0], lost))
        every += lost
    if not every:
        return ""
    far = [f"- {text} ({tried} of {of} measured)" for share, text, tried, of in sorted(every)[::-1] if share > 0.01]
    return "\n".join([*rows, row("all", every), "", "Farther off, the pick and the best:", "", *far])


def transformers_door(folder: Path) -> str:
    """Markdown: milliseconds of a model's step by torch's attention, by ours, with fused MLPs; a later file wins."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/transformers_*.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found.setdefault((line["model"], line["phase"]), {})[line["attention"]] = line
    lines: list[str] = []
    for (model, phase), of in found.items():
        theirs, ours, fused = of["sdpa"], of["kernel_registry"], of.get("kernel_registry+mlp")
        if not lines:
            where = f"{ours['device']}, torch {ours['torch']}, transformers {ours['transformers']}."
            lines = [
                where,
                "",
                "| model | step | sdpa, ms | ours, ms | ratio | with `fuse`, ms | ratio | what ran |",
                "|---|---|--:|--:|--:|--:|--:|---|",
            ]
        variants = [names for op, names in (fused or ours)["ran"].items() if op != "elsewhere"]
        ran = ", ".join(f"`{name}`" for names in variants for name in names)
        faster = lambda one: one.get("faster", theirs["ms"] / one["ms"])  # noqa: B023, E731
        cells = [f"{one['ms']:.1f} | {faster(one):.2f}" if one else " | " for one in (ours, fused)]
        lines.append(f"| {model} | {phase} | {theirs['ms']:.1f} | {' | '.join(cells)} | {ran} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--page", type=Path, nargs="*", default=[Path("README.md"), Path("docs")])
    parser.add_argument("--check", action="store_true", help="exit 1 where a page's tables are not the results'")
    options = parser.parse_args(arguments)
    all_results = read_results(options.results)
    if not all_results:
        print(f"no results under {options.results}", file=sys.stderr)
        return 1
    if not options.check:
        note_new_draws(options.results)
    tables = {writer.__name__: writer(options.results) for writer in WRITERS}
    for path in [] if options.check else sorted(options.results.rglob("warp_groups.jsonl")):
        plot_warp_groups(journal.read(path), options.images / "warp_groups.png")
    for op in dict.fromkeys(op for results in all_results for op in results.ops if op in SHOWN):
        found = gathered(all_results, op)
        if not found:
            continue
        tables[op] = table(all_results, op)
        if not options.check:
            draw = plot_matmul if op == "matmul" else plot_attention
            image = options.images / f"{op}.png"
            draw(_table_cases(found, op), f"{op}: {device_line(all_results, op)}", image)
            print(image)
    old = [page for page in pages_with_tables(options.page) if _write(page, tables, options.check)]
    return 1 if options.check and old else 0


WRITERS = (
    call_overhead,
    warm_calls,
    first_calls,
    new_calls,
    new_shapes,
    matmul_ratios,
    peer_cells,
    peers_at_a_glance,
    product_cells,
    prompt_cells,
    tf32_ratios,
    at_a_glance,
    losing,
    lost_between,
    every_draw,
    worst_shapes,
    tried_out,
    conformance,
    guided,
    transformers_door,
)
"""What writes the tables besides those of SHOWN, each by the name of its marker."""

MARKER = re.compile(r"<!-- results:(\w+) -->")


def pages_with_tables(places: Sequence[Path]) -> list[Path]:
    """The pages among files and folders that have a place for a table."""
    pages = [page for place in places for page in (sorted(place.rglob("*.md")) if place.is_dir() else [place])]
    return [page for page in pages if MARKER.search(page.read_text(encoding="utf-8"))]


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
