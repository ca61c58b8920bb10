"""Products beside the peers' own kernels, cell by cell: writes OUT/product_cells_NAME.jsonl, a line of JSON a cell.

    PEERS_SITE=... python benchmarks/measure_products.py OUT --seconds 150

PEERS_SITE (or FA4_SITE) names the folder in which quack and DeepGEMM were unpacked; without it cuBLAS is the only peer.
The sets of cells:

    rows    1 to 256 rows, off any grid, by ten projections of models of 8 to 70 billion parameters
    large   512 rows and more: cubes, and projections of the same models
    ragged  rows of operands that are no multiples of 128 bytes
    skinny  few tiles and a long K
    fp8     512 rows and more, scaled by row and column; cuBLAS is torch._scaled_mm here, without fast accumulation

Contestants: `ours`, registry.matmul as the tables in force dispatch it; the first configs of our variants (tagged with
their places among the declared ones); cuBLAS as torch.matmul calls it; DeepGEMM, by kernels that take sizes at run time
(one for all shapes), and for some cells also by those that have N and K compiled in ("DeepGEMM nk"); quack in several
of the configurations that its tuner tries for this GPU. All are compiled before anything is timed.

One process; launches in CUDA graphs over inputs that rotate through more than the L2 cache holds; rounds in an order
shuffled anew; each result is held against the oracle before it is timed. Clocks and power are those while it ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import registry
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.toolbox.builds import compile_build
from registry.tuning.machine import Monitor, describe
from registry.tuning.timing import GraphTimer, turn_order

SITE = os.environ.get("PEERS_SITE") or os.environ.get("FA4_SITE", "")
ROWS = (129, 256, 37, 177, 72, 233, 7, 150, 3, 110, 200, 22, 1, 52, 90, 13)
"""In an order of which every beginning is a fair sample."""
PROJECTIONS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),  # 8B: fused QKV, output, gate and up, down
    (8192, 5376), (43008, 5376), (5376, 21504),  # 27B
    (10240, 8192), (8192, 8192), (8192, 28672),  # 70B
)  # fmt: skip
LARGE = (
    (8192, 8192, 8192), (4096, 4096, 4096), (8192, 28672, 4096), (2048, 28672, 4096), (4096, 4096, 14336),
    (512, 28672, 4096), (1024, 10240, 8192), (2048, 8192, 28672), (512, 6144, 4096), (2048, 8192, 5376),
)  # fmt: skip
RAGGED = ((3000, 3000, 3000), (5000, 5000, 5000), (2048, 6152, 4104), (4096, 4104, 8200))
SKINNY = ((512, 512, 16384), (256, 256, 32768), (128, 256, 65536), (384, 640, 20000), (1024, 512, 32768))
FP8 = ((4096, 4096, 4096), (512, 28672, 4096), (2048, 2048, 2048), (2048, 28672, 4096), (8192, 8192, 8192))
QUACK = (
    (256, 128, False, 2, 1), (256, 192, False, 2, 1), (256, 208, False, 2, 1), (128, 256, False, 2, 1),
    (128, 256, False, 1, 2), (128, 192, True, 2, 1), (128, 208, True, 1, 2), (192, 128, True, 2, 1),
)  # fmt: skip
"""Rows, columns, ping-pong, cluster: of its tuner's 44."""
QUACK_FEW = ((128, 128, True, 1, 2, True), (128, 192, True, 2, 1, False))
"""The same, and whether b's columns are the rows."""


def cells() -> list[tuple[str, Case]]:
    """(set, case), partly in an order of which every beginning is a fair sample."""
    rows = [("rows", m, n, k) for m in ROWS for n, k in PROJECTIONS]
    half = len(rows) // 2
    others = [("large", *s) for s in LARGE] + [("ragged", *s) for s in RAGGED] + [("skinny", *s) for s in SKINNY]
    found = [(name, Case.of("matmul", m=m, n=n, k=k, layout="nt")) for name, m, n, k in [*rows[:half], *others]]
    kind = {"layout": "nt", "dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scaling": "rowwise"}
    found += [("fp8", Case.of("matmul", m=m, n=n, k=k, **kind)) for m, n, k in FP8]
    return found + [(name, Case.of("matmul", m=m, n=n, k=k, layout="nt")) for name, m, n, k in rows[half:]]


def sizes(case: Case) -> tuple[int, int, int]:
    return case.sizes["m"], case.sizes["n"], case.sizes["k"]


# --- ours ---------------------------------------------------------------------------------------------------------

OURS = {
    "rows": {"gluon_matmul_rows": 3, "gluon_matmul_row_pairs": 2, "gluon_matmul_ws": 1, "triton_gemv": 1},
    "large": {"gluon_matmul_ws": 4, "gluon_matmul_pairs": 3, "triton_matmul_tma": 1},
    "ragged": {"gluon_matmul_ws": 4, "gluon_matmul_pairs": 2, "triton_matmul": 1},
    "skinny": {"gluon_matmul_ws": 3, "gluon_matmul_rows": 2, "triton_matmul": 1},
    "fp8": {"gluon_matmul_ws": 3},
}
"""How many configs of each variant."""


def ours(kind: str, problem: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(tag, variant, config)."""
    for name, count in OURS[kind].items():
        variant = registry.matmul.variants[name]
        for place, config in enumerate(variant.legal_configs(problem)[:count]):
            yield f"{name}/{place}", name, config


def compiled(task: tuple[Any, str, dict[str, Any]]) -> str:
    """In a child without the GPU: the kernels of a config into Triton's cache. What went wrong, if anything did."""
    problem, name, config = task
    try:
        for build in registry.matmul.variants[name].builds(problem, config):
            compile_build(build, "sm90")
    except Exception as error:
        return f"{name} {config}: {type(error).__name__}: {error}"[:300]
    return ""


# --- peers --------------------------------------------------------------------------------------------------------


def use_site() -> None:
    paths = [SITE, str(Path(SITE, "nvidia_cutlass_dsl", "dsl_packages"))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("QUACK_CACHE_DIR", str(Path(os.environ.get("TMPDIR", "/tmp"), "quack_cache")))
    if not os.environ.get("CUDA_HOME") and Path("/usr/local/cuda/bin/nvcc").exists():
        os.environ["CUDA_HOME"] = "/usr/local/cuda"


def deepgemm(a: torch.Tensor, b: torch.Tensor, compiled_dims: str) -> torch.Tensor:
    import deep_gemm

    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    deep_gemm.bf16_gemm_nt(a, b.t(), out, compiled_dims=compiled_dims)
    return out


def quack(a: torch.Tensor, b: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    rows, columns, pingpong, cluster_m, cluster_n, *swap = shape
    config = GemmConfig(
        tile_m=rows, tile_n=columns, pingpong=pingpong, cluster_m=cluster_m, cluster_n=cluster_n,
        swap_ab=bool(swap and swap[0]), device_capacity=9, is_dynamic_persistent=False, use_tma_gather=False,
    )  # fmt: skip
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    gemm_tuned.fn(a, b, out=out, config=config)
    return out


def tag_of(shape: tuple[Any, ...]) -> str:
    rows, columns, pingpong, cluster_m, cluster_n, *swap = shape
    return f"quack {'p' if pingpong else 'c'}{rows}x{columns}/{cluster_m}{cluster_n}{'w' if swap and swap[0] else ''}"


def peers(kind: str, m: int, n: int, k: int) -> list[tuple[str, Callable[..., Any]]]:
    if kind == "fp8":
        return [("cuBLAS", scaled_mm)]
    found: list[tuple[str, Callable[..., Any]]] = [("cuBLAS", torch.matmul)]
    if SITE:
        found.append(("DeepGEMM", lambda a, b: deepgemm(a, b, "")))
        if with_sizes(kind, m, n, k):
            found.append(("DeepGEMM nk", lambda a, b: deepgemm(a, b, "nk")))
        shapes = QUACK_FEW if kind in ("rows", "skinny") else QUACK
        found += [(tag_of(shape), lambda a, b, shape=shape: quack(a, b, shape)) for shape in shapes]
    return found


def with_sizes(kind: str, m: int, n: int, k: int) -> bool:
    """Whether DeepGEMM's kernel with N and K compiled in is measured too: compiling takes long."""
    return kind == "large" or (kind == "rows" and m in (129, 37, 256) and (n, k) in PROJECTIONS[::3])


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: Any = None, scale_b: Any = None) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a=scale_a[:, None], scale_b=scale_b[None, :], out_dtype=torch.bfloat16)


def compile_peers(work: list[tuple[str, tuple[int, int, int]]], done: Any) -> None:
    """A child: each peer kernel once, on the GPU, for its own cache."""
    use_site()
    for what, shape in work:
        try:
            if what == "quack":
                a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
                quack(a, b.t(), shape)
            else:
                m, n, k = shape
                a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="cuda") for rows in (m, n))
                deepgemm(a, b.t(), what)
            torch.cuda.synchronize()
            done.put((what, shape, ""))
        except Exception as error:
            done.put((what, shape, f"{type(error).__name__}: {error}"[:300]))


def peer_kernels(found: list[tuple[str, Case]], children: int) -> list[list[tuple[str, tuple[Any, ...]]]]:
    """For each child: DeepGEMM's of one number of rows together, for they are alike."""
    work: dict[Any, list[tuple[str, tuple[Any, ...]]]] = {}
    for kind, case in found:
        m, n, k = sizes(case)
        if kind != "fp8":
            work.setdefault(m if kind == "rows" else kind, []).append(("", (m, n, k)))
            if with_sizes(kind, m, n, k):
                work.setdefault((m, "nk"), []).append(("nk", (m, n, k)))
    shares: list[list[tuple[str, tuple[Any, ...]]]] = [[] for _ in range(children)]
    for number, shape in enumerate([*QUACK_FEW, *QUACK]):
        shares[number % children].append(("quack", shape))
    for number, group in enumerate(sorted(work.values(), key=len, reverse=True)):
        shares[number % children] += group
    return shares


# --- one cell -----------------------------------------------------------------------------------------------------


def measure(
    kind: str, case: Case, timer: Any, failed: Callable[[str, str], None], device: str = "cuda"
) -> dict[str, Any]:
    load: Any = workload(case, device)
    problem, op = load.problem(), registry.matmul
    expected, sets = load.expected(), load.copies(GraphTimer.MEMORY_BYTES)
    decision = op.explain(problem)
    runs: dict[str, list[Callable[[], Any]]] = {}
    configs: dict[str, Any] = {}
    errors: dict[str, float] = {}

    def admit(tag: str, launches: list[Callable[[], Any]]) -> None:
        try:
            verdict = load.judge(launches[0](), expected)
        except Exception as error:
            return failed(tag, f"{type(error).__name__}: {error}"[:300])
        if verdict.complaints:
            return failed(tag, "; ".join(verdict.complaints)[:300])
        errors[tag] = verdict.error
        runs[tag] = launches

    scales = ("scale_a", "scale_b") if kind == "fp8" else ()
    more = {"out_dtype": load.out_dtype} if kind == "fp8" else {}
    admit("ours", [lambda t=t: op(t["a"], t["b"], **{s: t[s] for s in scales}, **more) for t in sets])
    for tag, name, config in ours(kind, problem):
        configs[tag] = config
        admit(tag, load.launches(op.bind(op.variants[name], problem, config), sets))
    for tag, call in peers(kind, *sizes(case)):
        admit(tag, [lambda t=t, call=call: call(t["a"], t["b"], *(t[s] for s in scales)) for t in sets])
    rounds, settle, window = (5, 8.0, 25.0) if kind in ("large", "fp8") else (4, 0.5, 2.0)
    times: dict[str, list[Any]] = {tag: [] for tag in runs}
    for number in range(rounds):
        for tag in turn_order(list(runs), case.text, number):
            try:
                times[tag].append(timer.sample(runs[tag], settle, window))
            except Exception as error:
                failed(tag, f"while timed: {type(error).__name__}: {error}"[:300])
                runs.pop(tag)
    timer.forget()
    us = {tag: round(statistics.median(t.ms for t in times[tag]) * 1e3, 2) for tag in runs}
    state = {
        tag: [round(statistics.median(t.state[x] for t in times[tag])) for x in ("sm_mhz", "watts")]
        for tag in runs
        if all("sm_mhz" in t.state and "watts" in t.state for t in times[tag])
    }
    m, n, k = sizes(case)
    chosen = {"variant": decision.variant, "config": decision.config}
    return {
        "set": kind, "m": m, "n": n, "k": k, "us": us, "chosen": chosen, "configs": configs, "mhz_watts": state,
        "errors": {tag: float(f"{error:.3g}") for tag, error in errors.items()},
    }  # fmt: skip


def ratio(cell: dict[str, Any], *names: str) -> float:
    """Of the fastest whose tag begins with one of these, over ours as dispatched."""
    us = [v for tag, v in cell["us"].items() if tag.startswith(names)]
    return min(us) / cell["us"]["ours"] if us and "ours" in cell["us"] else math.nan


def table(found: list[dict[str, Any]]) -> list[str]:
    """Geometric means and least ratios, of `ours` over the peers; and of the best of our variants over all peers."""
    lines = ["set rows cells | over all peers: mean least | cuBLAS | DeepGEMM | quack | best config over all peers"]
    groups = {(c["set"], c["m"] if c["set"] == "rows" else 0) for c in found} | {("rows", -1)}
    for kind, m in sorted(groups):
        here = [c for c in found if c["set"] == kind and m in (c["m"], 0, -1)]
        peer = ("cuBLAS", "DeepGEMM", "quack")
        figures = [[ratio(c, *names) for c in here] for names in (peer, *((p,) for p in peer))]
        mine = ("ours", "gluon", "triton")
        best = [x / ratio(c, *mine) for c, x in zip(here, figures[0], strict=True)]
        said = []
        for values in (*figures, best):
            values = [v for v in values if not math.isnan(v)]
            mean = math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
            said.append(f"{mean:.3f} {min(values, default=math.nan):.3f}")
        lines.append(f"{kind:7} {m if m > 0 else 'all':>4} {len(here):3} | " + " | ".join(said))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=600, help="begin no cell after that")
    parser.add_argument("--compile-seconds", type=float, default=60, help="time nobody before, if peers still compile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--sets", nargs="+", default=["rows", "large", "ragged", "skinny", "fp8"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--name", default="new", help="of the file: product_cells_NAME.jsonl")
    given = parser.parse_args()
    started = time.monotonic()
    found = [(kind, case) for kind, case in cells() if kind in given.sets]
    found = [(kind, case) for kind, case in found if kind != "rows" or case.sizes["m"] in given.rows]
    given.out.mkdir(parents=True, exist_ok=True)
    stream = (given.out / f"product_cells_{given.name}.jsonl").open("w", encoding="utf-8")

    def say(what: str, **record: Any) -> None:
        stream.write(json.dumps({"kind": what, **record}) + "\n")
        stream.flush()

    target = registry.Target.named("H200")  # (nothing touches the GPU before the children are forked)
    tasks: dict[str, tuple[Any, str, dict[str, Any]]] = {}
    for kind, case in found:
        problem = registry.matmul.problem_of(**workload(case, "meta").arguments(), target=target)[0]
        decision = registry.matmul.explain(problem, target=target)
        mine = [(problem, name, config) for _, name, config in ours(kind, problem)]
        for task in [(problem, decision.variant, dict(decision.config)), *mine]:
            if registry.matmul.variants[task[1]].builds:  # (kernels of few rows know how many eights there are)
                tasks.setdefault(f"{task[1:]} {problem.dtype} {min(-(-problem.m // 8), 33)}", task)
    pool = multiprocessing.get_context("fork").Pool(given.jobs)
    results = pool.imap(compiled, tasks.values())
    children, done = [], None
    if SITE:
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Queue()
        shares = peer_kernels(found, max(2, given.jobs // 2))
        children = [spawn.Process(target=compile_peers, args=(share, done), daemon=True) for share in shares]
        for child in children:
            child.start()
        use_site()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    machine = describe(registry.Target.of(torch.device("cuda")))
    say("run", machine=machine, date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), how=__doc__)
    while any(c.is_alive() for c in children) and time.monotonic() - started < given.compile_seconds:
        time.sleep(0.5)
    for child in children:
        child.terminate()
    while done is not None and not done.empty():
        what, shape, why = done.get()
        if why:
            say("failed", who=what, shape=shape, why=why)
    print(f"peers' kernels at {time.monotonic() - started:.0f} s", flush=True)
    for why in results:
        if why:
            say("failed", who="build", why=why)
        if time.monotonic() - started > 1.3 * given.compile_seconds:
            break
    print(f"{len(tasks)} configs compiled at {time.monotonic() - started:.0f} s", flush=True)
    torch.set_float32_matmul_precision("high")
    timer = GraphTimer(Monitor())
    timer.SPAN_MS = 1.0
    records = []
    broken: set[str] = set()
    for kind, case in found:
        if time.monotonic() - started > given.seconds:
            say("failed", who="cell", cell=case.text, why="not reached in the time")
            continue

        def failed(tag: str, why: str, text: str = case.text) -> None:
            say("failed", who=tag, cell=text, why=why)
            broken.add(tag)

        try:
            record = measure(kind, case, timer, failed)
            torch.cuda.synchronize()
        except Exception as error:
            say("failed", who="cell", cell=case.text, why=f"{type(error).__name__}: {error}"[:300])
            if "CUDA error" in str(error):  # of which no process recovers
                break
            continue
        torch.cuda.empty_cache()
        say("cell", **record)
        records.append(record)
        best = sorted((v, tag) for tag, v in record["us"].items())[:3]
        print(kind, *sizes(case), f"{ratio(record, 'cuBLAS', 'DeepGEMM', 'quack'):.3f}",
              *(f"{tag} {v}" for v, tag in best), flush=True)  # fmt: skip
    print("\n".join(table(records)))
    print(f"failed at least once: {sorted(broken)}; {time.monotonic() - started:.0f} s", flush=True)
    pool.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
