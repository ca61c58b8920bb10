"""Cells of products: which ones measure_products.py measures beside the peers, and what their sweeps say, for plots.py.

    rows    1 to 256 rows, off any grid, by ten projections of models of 8 to 70 billion parameters
    drawn   the same projections by rows that were drawn, and that no table is fitted to
    large   512 rows and more: cubes, and projections of the same models
    ragged  rows of operands that are no multiples of 128 bytes
    skinny  few tiles and a long K
    fp8     512 rows and more, scaled by row and column

Contestants are variants, the peers' own kernels and the dispatcher among them; see measure_products.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from registry.contract.target import Target
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tuning import journal
from registry.tuning.journal import CaseResults, Entry, Results

ROWS = (129, 256, 37, 177, 72, 233, 7, 150, 3, 110, 200, 22, 1, 52, 90, 13)
"""In an order of which every beginning is a fair sample."""
DRAWN = (92, 18, 159, 57, 35, 77, 28, 232, 127, 126)
"""Drawn by seed, log-uniform, among those of which no sweep had more than two of the projections below."""
PROJECTIONS = (
    # 8B: fused QKV, output, gate and up, down
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    # 27B
    (8192, 5376),
    (43008, 5376),
    (5376, 21504),
    # 70B
    (10240, 8192),
    (8192, 8192),
    (8192, 28672),
)
SETS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "rows": tuple((m, n, k) for m in ROWS for n, k in PROJECTIONS),
    "drawn": tuple((m, n, k) for m in DRAWN for n, k in PROJECTIONS),
    "large": (
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (8192, 28672, 4096),
        (2048, 28672, 4096),
        (4096, 4096, 14336),
        (512, 28672, 4096),
        (1024, 10240, 8192),
        (2048, 8192, 28672),
        (512, 6144, 4096),
        (2048, 8192, 5376),
    ),
    "ragged": ((3000, 3000, 3000), (5000, 5000, 5000), (2048, 6152, 4104), (4096, 4104, 8200)),
    "skinny": ((512, 512, 16384), (256, 256, 32768), (128, 256, 65536), (384, 640, 20000), (1024, 512, 32768)),
    "fp8": ((4096, 4096, 4096), (512, 28672, 4096), (2048, 2048, 2048), (2048, 28672, 4096), (8192, 8192, 8192)),
}
FP8 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scaling": "rowwise"}
DISPATCHED, PEERS = "peer.dispatched", ("torch_matmul", "peer.deepgemm", "peer.quack*")
OURS = ("gluon_*", "triton_*")

Found = Mapping[str, Sequence[Case]]


def cells(sets: Iterable[str] = SETS, rows: Iterable[int] = ROWS) -> dict[str, list[Case]]:
    """Those of each set; of few rows, these numbers of them."""
    found = {name: [Case.of("matmul", m=m, n=n, k=k, layout="nt") for m, n, k in SETS[name]] for name in sets}
    for name, cases in found.items():
        if name == "rows":
            found[name] = [case for case in cases if case.sizes["m"] in set(rows)]
        elif name == "fp8":
            found[name] = [Case.of("matmul", **case.sizes, **FP8) for case in cases]
    return found


# --- what was measured ------------------------------------------------------------------------------------------------


def fastest(case: CaseResults, *patterns: str) -> float | None:
    """The least milliseconds among the variants of these names."""
    return min((e.ms for e in case.timed.values() if any(fnmatch(e.variant, p) for p in patterns)), default=None)


def ratios_text(ratios: Sequence[float]) -> str:
    """ "geometric mean / least (cells)"; empty where there are none."""
    return f"{statistics.geometric_mean(ratios):.3f} / {min(ratios):.3f} ({len(ratios)})" if ratios else ""


Sweeps = Sequence[tuple[Results, CaseResults]]
"""All in which a cell was measured, the oldest first."""
Measured = Mapping[str, Sweeps]
"""By the text of a cell."""


def picked(sweeps: Sweeps) -> set[str]:
    """What the tables in force dispatch; where no sweep had that, what was dispatched in the newest."""
    picks = [entry for one in sweeps if (entry := dispatched(*one)) is not None]
    return {journal.contestant_key(one.variant, one.config) for one in picks} or _named(sweeps[-1:], DISPATCHED)


def ours(sweeps: Sweeps) -> set[str]:
    return _named(sweeps, *OURS)


def _named(sweeps: Sweeps, *patterns: str) -> set[str]:
    """Those of these names that stayed in longest in one of the sweeps: the others were slower."""
    kept = set()
    for _, case in sweeps:
        rounds = {
            key: len(entry.samples)
            for key, entry in case.timed.items()
            if any(fnmatch(entry.variant, pattern) for pattern in patterns)
        }
        kept |= {key for key, count in rounds.items() if count == max(rounds.values())}
    return kept


def in_shared_rounds(sweeps: Sweeps, mine: str, theirs: str) -> float | None:
    """How many times as fast mine is, in the median of all rounds that both had. Within a cell the card may come to its
    limit of power: rounds become slower by up to 20%, and who is behind has only the first of them. The very first, on
    a cool card, counts where there are no two others."""
    ratios: list[float] = []
    for _, case in sweeps:
        if mine in case.timed and theirs in case.timed:
            one, other = case.timed[mine].samples, case.timed[theirs].samples
            shared = sorted(one.keys() & other.keys())
            ratios += [other[at]["ms"] / one[at]["ms"] for at in shared[len(shared) > 2 :]]
    return statistics.median(ratios) if ratios else None


def over(cells: Iterable[Sweeps], mine: Mine, peers: Iterable[str]) -> list[float]:
    """How many times as fast the best of mine is as the fastest of theirs, where both were timed."""
    found = []
    for sweeps in cells:
        others = _named(sweeps, *peers)
        each = [[in_shared_rounds(sweeps, key, other) for other in others] for key in mine(sweeps)]
        least = [min(ratios) for each_of in each if (ratios := [r for r in each_of if r is not None])]
        found += [max(least)] if least else []
    return found


Mine = Callable[[Sweeps], set[str]]
COLUMNS: dict[str, tuple[Mine, tuple[str, ...]]] = {
    "dispatched over the best peer": (picked, PEERS),
    "over the best of cuBLAS and quack": (picked, (PEERS[0], PEERS[2])),
    "over the best of cuBLAS and DeepGEMM": (picked, PEERS[:2]),
    "over cuBLAS": (picked, PEERS[:1]),
    "best of our configs over the best peer": (ours, PEERS),
    "over the best of cuBLAS and quack, too": (ours, (PEERS[0], PEERS[2])),
}
"""Whose time over whose."""


def lines_of(found: Found, measured: Measured) -> Iterator[list[str]]:
    """Of each set, and of each number of few rows: its name and the columns."""
    groups = [(name, cases) for name, cases in found.items()]
    by_rows = sorted({case.sizes["m"] for case in found.get("rows", ())})
    groups += [(f"... {m} rows", [c for c in found["rows"] if c.sizes["m"] == m]) for m in by_rows]
    for name, cases in groups:
        here = [measured[case.text] for case in cases if case.text in measured]
        if here:
            yield [name, *(ratios_text(over(here, *sides)) for sides in COLUMNS.values())]


def measured_in(all_results: Iterable[Results]) -> dict[str, list[tuple[Results, CaseResults]]]:
    """The cells of these sweeps."""
    found: dict[str, list[tuple[Results, CaseResults]]] = {}
    for results in all_results:
        for case in results.of("matmul"):
            if case.timed:
                found.setdefault(case.text, []).append((results, case))
    return found


def product_cells(folder: Path) -> str:
    """Markdown: dispatched and best over the peers, by all sweeps of each cell on the device of the newest."""
    files = sorted(folder.rglob("product_cells_*.jsonl"), key=lambda path: (len(path.stem), path.stem))  # 2 before 10
    every = [journal.read(path) for path in files]
    every = [results for results in every if results.cases]  # others are of an earlier form
    if not every:
        return ""
    every = [results for results in every if results.machine["device"] == every[-1].machine["device"]]
    rows = [f"| {' | '.join(line)} |" for line in lines_of(cells(), measured_in(every))]
    head = [f"| cells | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    return "\n".join([machine_of(every[-1]), "", *head, *rows])


def machine_of(results: Results) -> str:
    m = results.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "triton", "driver") if m.get(name))
    return f"{m['device']}, {versions}, {m['date']}: geometric mean / least (cells)."


def dispatched(results: Results, case: CaseResults) -> Entry | None:
    """What was measured of the contestant that the dispatcher picks for a shape."""
    problem = Case.parse(case.op, case.text).problem(Target.named(results.machine["device"]))
    decision = op_named(case.op).explain(problem)
    return case.timed.get(journal.contestant_key(decision.variant, decision.config))


def tf32_ratios(folder: Path) -> str:
    """Markdown: float32 by tf32 over cuBLAS by layout, of the best of our configs and of what is picked."""
    tables = []
    for path in sorted(folder.rglob("tf32_matmul.jsonl")):
        results = journal.read(path)
        groups: dict[str, list[tuple[float, float, float]]] = {}
        for case in results.of("matmul"):
            base, best, mine = fastest(case, "torch_matmul"), fastest(case, "*"), fastest(case, *OURS)
            pick = dispatched(results, case)
            if base is not None and best is not None and mine is not None and pick is not None:
                for group in (case.facts["layout"], "all"):
                    groups.setdefault(group, []).append((base / mine, base / best, base / pick.ms))
        lines = ["| layout | best of our configs | the fastest of all | dispatched |", "|---|--:|--:|--:|"]
        for name in sorted(groups, key=lambda name: (name == "all", name)):
            lines.append(f"| {name} | {' | '.join(ratios_text(found) for found in zip(*groups[name], strict=True))} |")
        tables.append("\n".join([machine_of(results), "", *lines]))
    return "\n\n".join(tables)
