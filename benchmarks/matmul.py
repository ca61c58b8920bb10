"""Times every matmul variant against torch's (cuBLAS) on this machine's GPU and writes the raw figures as JSON.

    python benchmarks/matmul.py --wide --out benchmarks/results/h200/matmul_cells.json      measure
    python benchmarks/matmul.py --dispatched --out dispatched.json      what registry.matmul picks, against torch's

Dispatch tables are not made of these figures but by `kreg tune`, from benchmarks/results/h200/matmul.jsonl.

How it times.  Each contender is captured in a CUDA graph that walks several input sets (together larger than L2), so no
CPU cost is in the figures.  In each round the contenders run in a new random order; the SM clock is read while each one
runs.  A figure is the median of the rounds.  All contenders of a row are timed in the same seconds, so compare ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

import registry
from registry.contract.target import Target
from registry.ops.matmul.problem import MatmulProblem
from registry.plugins import gluon_matmul_ws, torch_matmul, triton_matmul, triton_matmul_tma

L2_BYTES = 200e6
VARIANTS = {
    v.name: v
    for module in (torch_matmul, triton_matmul, triton_matmul_tma, gluon_matmul_ws)
    for v in module.registry_variants()
}
LLAMA = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate-up": (28672, 4096),
    "8b down": (4096, 14336),
    "70b qkv": (10240, 8192),
    "70b o": (8192, 8192),
    "70b gate-up": (57344, 8192),
    "70b down": (8192, 28672),
}
Row = tuple[str, int, int, int, str, str]


def rows_of(name: str) -> Iterator[Row]:
    """(set, m, n, k, layout, dtype) of one named set."""
    if name == "squares":
        for dtype in ("bfloat16", "float16"):
            for size in (1024, 2048, 4096, 8192, 16384):
                yield from ((name, size, size, size, layout, dtype) for layout in ("nn", "nt", "tn"))
    elif name in ("llm", "llm-small"):
        for m in (512, 2048, 8192) if name == "llm" else (1, 16, 128):
            yield from ((name, m, n, k, "nt", "bfloat16") for n, k in LLAMA.values())
    elif name == "llm-fp16":
        yield from ((name, 2048, n, k, "nt", "float16") for n, k in LLAMA.values())
    elif name == "skinny":
        for m, n, k in (
            (64, 64, 65536),
            (128, 128, 32768),
            (256, 256, 16384),
            (512, 512, 16384),
            (8192, 64, 8192),
            (64, 8192, 8192),
            (4096, 256, 4096),
        ):
            yield from ((name, m, n, k, layout, "bfloat16") for layout in ("nn", "nt", "tn"))
    elif name == "fp8":
        for size in (1024, 2048, 4096, 8192):
            yield name, size, size, size, "nt", "float8_e4m3fn"
        for m in (16, 512, 2048):
            yield from ((name, m, n, k, "nt", "float8_e4m3fn") for n, k in ((6144, 4096), (28672, 4096), (8192, 28672)))
    elif name == "tf32":
        yield from ((name, size, size, size, "nt", "float32") for size in (1024, 2048, 4096, 8192))
        yield from ((name, m, 6144, 4096, "nt", "float32") for m in (128, 512, 2048))
    elif name == "ragged":
        yield from ((name, s, s, s, layout, "bfloat16") for s in (1000, 3000, 5000) for layout in ("nn", "nt"))
    else:
        raise ValueError(f"no set is called {name!r}")


def wider(variant: str, problem: MatmulProblem) -> list[dict[str, Any]]:
    """Configs worth trying beside a variant's own first choices."""
    item = getattr(torch, problem.dtype).itemsize
    if variant == "gluon_matmul_ws":
        return gluon_matmul_ws.candidates(problem)
    if variant == "triton_matmul" and problem.m <= 128:
        found = []
        for bm, bn, bk, warps, stages in (
            (16, 64, 128, 4, 4),
            (16, 32, 256, 4, 4),
            (16, 128, 64, 4, 4),
            (16, 64, 256, 4, 3),
            (16, 128, 128, 4, 4),
            (16, 256, 64, 8, 4),
            (32, 64, 128, 4, 4),
            (64, 64, 128, 4, 4),
            (64, 128, 64, 4, 4),
            (128, 64, 64, 4, 4),
            (128, 128, 64, 8, 4),
        ):
            if bm // 2 < problem.m <= 4 * bm or bm == 16 >= problem.m:
                split = triton_matmul.split_of(problem, bm, bn, bk * 2 // item)
                for s in sorted({1, split, 2 * split}):
                    found.append(triton_matmul.config_of(bm, bn, bk * 2 // item, warps, stages, split=s))
        return found
    return []


def operands(row: Row, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, m, n, k, layout, dtype = row
    made = []
    generator = torch.Generator("cuda").manual_seed(seed)
    for rows, columns, letter in ((m, k, layout[0]), (k, n, layout[1])):
        shape = (rows, columns) if letter == "n" else (columns, rows)
        x = torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype))
        made.append(x if letter == "n" else x.mT)
    return made[0], made[1]


def out_kind(row: Row) -> torch.dtype:
    return torch.bfloat16 if row[5].startswith("float8") else getattr(torch, row[5])


def problem_of(row: Row) -> MatmulProblem:
    _, m, n, k, layout, dtype = row
    scaling = "rowwise" if dtype.startswith("float8") else ""
    return MatmulProblem.of_shape(
        Target.of(torch.device("cuda")), dtype=dtype, m=m, n=n, k=k, layout=layout, scaling=scaling
    )


def contenders(row: Row, most: int, wide: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """label -> (variant, config): torch's, up to `most` legal configs of each of the others (-1: only the pick)."""
    problem = problem_of(row)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    if most < 0:
        decision = registry.matmul.explain(problem)
        picked = f"{decision.variant} {json.dumps(dict(decision.config))}"
        return {"torch_matmul": ("torch_matmul", {}), picked: (decision.variant, dict(decision.config))}
    for name, variant in VARIANTS.items():
        configs = variant.legal_configs(problem)[:most] if not variant.reasons(problem) else []
        for config in configs + ([c for c in wider(name, problem) if c not in configs] if wide else []):
            found["torch_matmul" if name == "torch_matmul" else f"{name} {json.dumps(config)}"] = (name, config)
    return found


def caller(row: Row, name: str, config: dict[str, Any]) -> Callable[..., Any]:
    run = VARIANTS[name].run
    kind = out_kind(row)
    rest = {"bias": None, "activation": "", "out_dtype": kind, "scale_a": None, "scale_b": None}
    if row[5].startswith("float8"):
        scales = {
            "scale_a": torch.rand(row[1], device="cuda") + 0.5,
            "scale_b": torch.rand(row[2], device="cuda") + 0.5,
        }
        if name == "torch_matmul":  # its result as it comes: no copy into `out`
            return lambda a, b, out: run(a, b, config=config, **{**rest, **scales, "out": None})
        return lambda a, b, out: run(a, b, config=config, **{**rest, **scales, "out": out})
    return lambda a, b, out: run(a, b, config=config, **rest, out=out)


def captured(call: Callable[..., Any], data: list, calls: int) -> torch.cuda.CUDAGraph:
    call(*data[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(*data[i % len(data)])
    return graph


def replay(graph: torch.cuda.CUDAGraph, calls: int, milliseconds: float, clock: Callable[[], int]) -> tuple[float, int]:
    """(milliseconds per call, SM clock in MHz)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    repeats = max(1, int(milliseconds / max(start.elapsed_time(end), 1e-3)))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    mhz = clock()
    end.synchronize()
    return start.elapsed_time(end) / repeats / calls, mhz


def measure(
    row: Row, entries: dict[str, tuple[str, dict[str, Any]]], rounds: int, milliseconds: float, clock: Callable[[], int]
) -> dict[str, Any]:
    _, m, n, k, _, dtype = row
    kind = out_kind(row)
    flops = 2 * m * n * k
    moved = getattr(torch, dtype).itemsize * (m * k + k * n) + kind.itemsize * m * n
    sets = max(1, min(8, int(L2_BYTES // moved) + 1))
    calls = max(sets, min(32, int(2e-3 / (flops / 7e14 + moved / 4e12 + 3e-6))) // sets * sets)
    data = [(*operands(row, s), torch.empty(m, n, device="cuda", dtype=kind)) for s in range(sets)]
    graphs, failed = {}, {}
    for label, (name, config) in entries.items():
        try:
            graphs[label] = captured(caller(row, name, config), data, calls)
        except Exception as error:  # a contender that cannot run is a result too
            failed[label] = repr(error)[:300]
    times: dict[str, list[float]] = {label: [] for label in graphs}
    clocks: dict[str, list[int]] = {label: [] for label in graphs}
    for _ in range(rounds):
        order = list(graphs)
        random.shuffle(order)
        for label in order:
            ms, mhz = replay(graphs[label], calls, milliseconds, clock)
            times[label].append(round(ms * 1e3, 3))
            clocks[label].append(mhz)
    return {
        "set": row[0],
        "m": m,
        "n": n,
        "k": k,
        "layout": row[4],
        "dtype": dtype,
        "us": times,
        "mhz": clocks,
        "failed": failed,
    }


def summary(result: dict[str, Any]) -> str:
    base = statistics.median(result["us"]["torch_matmul"])
    best: dict[str, tuple[float, str]] = {}
    for label, times in result["us"].items():
        name, _, config = label.partition(" ")
        config = config or "{}"
        ratio = base / statistics.median(times)
        if label != "torch_matmul" and ratio > best.get(name, (0.0, ""))[0]:
            best[name] = (ratio, " ".join(str(v) for v in json.loads(config).values()))
    flops = 2 * result["m"] * result["n"] * result["k"]
    found = "  ".join(
        f"{name} {ratio:.3f} [{config}]" for name, (ratio, config) in sorted(best.items(), key=lambda x: -x[1][0])
    )
    return (
        f"{result['dtype'][:8]} {result['layout']} {result['m']}x{result['n']}x{result['k']}: torch {base:.1f} us "
        f"{flops / base / 1e6:.0f} T | {found} {'FAILED ' + str(len(result['failed'])) if result['failed'] else ''}"
    )


def compile_all(rows: list[Row], most: int, wide: bool) -> None:
    """Run every contender once, in several threads, so that nothing compiles during the measurements."""

    def once(row: Row, name: str, config: dict[str, Any]) -> None:
        kind = out_kind(row)
        try:
            call = caller(row, name, config)
            call(*operands(row, 0), torch.empty(row[1], row[2], device="cuda", dtype=kind))
        except Exception as error:
            print("compile:", name, config, repr(error)[-300:], flush=True)

    jobs = {}
    for row in rows:
        for label, entry in contenders(row, most, wide).items():
            jobs[label, row[4], row[5], row[1] % 256, row[2] % 256, row[3] % 256] = (row, *entry)
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda job: once(*job), jobs.values()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="squares,llm,llm-fp16,llm-small,skinny,ragged,fp8,tf32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=8.0, help="milliseconds per contender and round")
    parser.add_argument("--most", type=int, default=2, help="configs of each variant's own list")
    parser.add_argument("--wide", action="store_true", help="and configs beyond that list")
    parser.add_argument("--dispatched", action="store_true", help="only what registry.matmul would run")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after so many seconds")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    options.most = -1 if options.dispatched else options.most
    torch.set_float32_matmul_precision("high")
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    started = time.time()
    rows = [row for name in options.sets.split(",") for row in rows_of(name)]
    compile_all(rows, options.most, options.wide)
    print(f"compiled after {time.time() - started:.0f} s", flush=True)
    target = Target.of(torch.device("cuda"))
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "date": time.strftime("%Y-%m-%d"),
        "sm_count": target.sm_count,
        "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "rows": [],
    }
    for row in rows:
        if time.time() - started > options.limit:
            print("time is up before", row)
            break
        result = measure(
            row,
            contenders(row, options.most, options.wide),
            options.rounds,
            options.ms,
            lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        )
        report["rows"].append(result)
        print(summary(result), flush=True)
        if options.out:
            with open(options.out, "w") as file:
                json.dump(report, file)
    ratios: dict[str, list[float]] = {}
    for result in report["rows"]:
        base = statistics.median(result["us"]["torch_matmul"])
        others = [base / statistics.median(times) for label, times in result["us"].items() if label != "torch_matmul"]
        ratios.setdefault(
            f"{result['set']} {result['dtype']} {'M >= 512' if result['m'] >= 512 else 'M < 512'}", []
        ).append(max(others, default=0.0))
    for name, values in ratios.items():
        print(
            f"{name}: {len(values)} cells, geometric mean {statistics.geometric_mean(values):.3f}, "
            f"least {min(values):.3f}"
        )
    print(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
