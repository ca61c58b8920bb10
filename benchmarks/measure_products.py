"""Products beside the peers' own kernels, cell by cell: a sweep into OUT/product_cells_NAME.jsonl, and a table of it.

    PEERS_SITE=... python benchmarks/measure_products.py OUT --seconds 150

PEERS_SITE (or FA4_SITE) names the folder in which quack and DeepGEMM were unpacked; without it cuBLAS is the only peer.
The sets of cells are in product_cells.py; cuBLAS is torch._scaled_mm for fp8, without fast accumulation.

Contestants: registry.matmul as the tables in force dispatch it; the first configs of our variants; cuBLAS as
torch_matmul calls it; DeepGEMM, by kernels that take sizes at run time (one for all shapes), and from 512 rows on also
by those that have N and K compiled in; quack in several of the configurations that its tuner tries for this GPU.

The sweep is that of `kreg tune --graph`, with this file for a plugin: it gates, times and names who fails. First come
the sets of many rows, each turn long enough for the card to be at its limit of power, then those of few.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from product_cells import COLUMNS, DISPATCHED, ROWS, SETS, cells, lines_of, measured_in

import registry
from registry import Design, Requires, Variant
from registry.ops.parts.cases import Case
from registry.tuning import journal, worker
from registry.tuning.contestants import Selection
from registry.tuning.measure import Effort, Sweep

SITE = os.environ.get("PEERS_SITE") or os.environ.get("FA4_SITE", "")
QUACK = (
    (256, 128, False, 2, 1, False),
    (256, 192, False, 2, 1, False),
    (256, 208, False, 2, 1, False),
    (128, 256, False, 2, 1, False),
    (128, 256, False, 1, 2, False),
    (128, 192, True, 2, 1, False),
    (128, 208, True, 1, 2, False),
    (192, 128, True, 2, 1, False),
)
"""Rows, columns, ping-pong, cluster, and whether b's columns are the rows: of its tuner's 44."""
QUACK_FEW = ((128, 128, True, 1, 2, True), (128, 192, True, 2, 1, False))
"""The same for few tiles."""
BASE = ("gluon_matmul*", "torch_matmul", "peer.*")
CONFIGS = 5
"""At most so many of each variant take part."""
FEW_EFFORT = Effort(9, 4, settle_ms=3.0, measure_ms=5.0, drop=1.25, least_drop=1.12)
"""Short turns, but many: some cells of few rows take the card to its limit of power, in the middle of a round."""
SETTINGS: tuple[tuple[tuple[str, ...], tuple[str, ...], float, Effort], ...] = (
    (("fp8", "large", "ragged"), BASE, 0.65, Effort(9, 4, settle_ms=15.0, measure_ms=25.0, drop=1.25)),
    (("rows", "drawn", "skinny"), (*BASE, "triton_matmul*", "triton_gemv"), 1.0, FEW_EFFORT),
)
"""Sets that are measured alike: by whom, in which part of the time that is left, and how long."""
MANY = 512
"""Rows."""
CHILDREN = 6
"""Processes that compile DeepGEMM's kernels, seconds each, while others are measured."""


def in_order(found: dict[str, list[Case]], names: Sequence[str]) -> list[Case]:
    """Of these sets: half of the cells of few rows, then all others, so far as a beginning is a fair sample."""
    rows = found.get("rows", []) if "rows" in names else []
    others = [case for name in names if name != "rows" for case in found.get(name, ())]
    half = len(rows) // 2
    return [*rows[:half], *others, *rows[half:]]


# --- contestants ------------------------------------------------------------------------------------------------------


def dispatched(a: torch.Tensor, b: torch.Tensor, *, config: Any, **given: Any) -> torch.Tensor:
    return registry.matmul(a, b, **given)


def deepgemm(a: torch.Tensor, b: torch.Tensor, *, config: Any) -> torch.Tensor:
    import deep_gemm

    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    deep_gemm.bf16_gemm_nt(a, b.t(), out, compiled_dims=config["compiled"])
    return out


def quack(a: torch.Tensor, b: torch.Tensor, *, config: Any) -> torch.Tensor:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    chosen = GemmConfig(**config, device_capacity=9, is_dynamic_persistent=False, use_tma_gather=False)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    gemm_tuned.fn(a, b, out=out, config=chosen)
    return out


def quack_configs(pingpong: bool) -> Callable[[Any], list[dict[str, Any]]]:
    names = ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n", "swap_ab")

    def configs(problem: Any) -> list[dict[str, Any]]:
        few = problem.m <= 256 or problem.k >= 16 * problem.m
        found = [dict(zip(names, shape, strict=True)) for shape in (QUACK_FEW if few else QUACK)]
        return [config for config in found if config["pingpong"] is pingpong]

    return configs


def deepgemm_configs(problem: Any) -> list[dict[str, Any]]:
    """With sizes compiled in, a kernel a shape, which takes long: not for few rows."""
    return [{"compiled": dims} for dims in ("", "nk")[: 1 if problem.m < MANY else 2]]


def compile_deepgemm(work: Sequence[tuple[str, dict[str, int]]]) -> None:
    """A child: kernels that the sweep will ask for, into DeepGEMM's cache. Who fails here fails there, and is named."""
    use_site()
    for compiled, sizes in work:
        with contextlib.suppress(Exception):
            m, n, k = (sizes[name] for name in "mnk")
            a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="cuda") for rows in (m, n))
            deepgemm(a, b.t(), config={"compiled": compiled})


def compile_peers(found: dict[str, list[Case]]) -> list[Any]:
    """The children that do so. Kernels without sizes are alike where there are as many rows: one child makes those."""
    work: dict[Any, list[tuple[str, dict[str, int]]]] = {}
    for name, cases in found.items():
        for case in cases if name != "fp8" else ():
            sizes = dict(case.sizes)
            work.setdefault(sizes["m"], []).append(("", sizes))
            if sizes["m"] >= MANY:
                work[tuple(sizes.values())] = [("nk", sizes)]
    shares: list[list[tuple[str, dict[str, int]]]] = [[] for _ in range(CHILDREN)]
    for number, group in enumerate(work.values()):
        shares[number % CHILDREN] += group
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=compile_deepgemm, args=(share,), daemon=True) for share in shares]
    for child in children:
        child.start()
    return children


def registry_variants() -> Iterator[Variant]:
    anything = Requires(
        arch=("any",),
        dtypes=("bfloat16", "float8_e4m3fn"),
        promoted=True,
        layouts=("nt",),
        scaling=("rowwise",),
        out_dtypes=("bfloat16",),
    )
    yield Variant(DISPATCHED, op="matmul", run=dispatched, requires=anything)
    if SITE:
        use_site()
        plain = Requires(arch=("sm90",), dtypes=("bfloat16",), layouts=("nt",))
        kinds = [("deepgemm", deepgemm, deepgemm_configs, "cuda")]
        kinds += [(f"quack_{how}", quack, quack_configs(how == "pingpong"), "cutedsl") for how in ("coop", "pingpong")]
        for name, run, configs, dsl in kinds:
            design = Design(dsl=dsl)
            yield Variant(f"peer.{name}", op="matmul", run=run, requires=plain, configs=configs, design=design)


def use_site() -> None:
    paths = [SITE, str(Path(SITE, "nvidia_cutlass_dsl", "dsl_packages"))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("QUACK_CACHE_DIR", str(Path(os.environ.get("TMPDIR", "/tmp"), "quack_cache")))
    if not os.environ.get("CUDA_HOME") and Path("/usr/local/cuda/bin/nvcc").exists():
        os.environ["CUDA_HOME"] = "/usr/local/cuda"


# --- all cells --------------------------------------------------------------------------------------------------------


def measure(
    found: dict[str, list[Case]],
    path: Path,
    seconds: float,
    device: str = "cuda",
    *,
    skip: Sequence[str] = (),
    plugins: Sequence[str] = (__file__,),
) -> list[str]:
    """Sweep the cells, or go on with a sweep of them; what there is to say of it."""
    end = time.monotonic() + seconds
    compilers = compile_peers(found) if SITE and device == "cuda" else []
    mode = "graph" if device == "cuda" else "events"
    failed, unreached = [], 0
    with worker.child(device, mode, plugins) as child:
        for names, only, part, effort in SETTINGS:
            if cases := in_order(found, names):
                rest = any(found.get(name) for others, *_ in SETTINGS for name in others if others != names)
                effort = replace(effort, budget_s=(end - time.monotonic()) * (part if rest else 1.0))
                how: Any = {"device": device, "mode": mode, "plugins": plugins, "child": child}
                report = Sweep(cases, path, effort=effort, selection=Selection(only, skip, CONFIGS), **how).run()
                failed += report.failed
                unreached += len(report.unreached)
    for compiler in compilers:
        compiler.kill()
    lines = [["cells", *COLUMNS], *lines_of(found, measured_in([journal.read(path)]))]
    return [*map(" | ".join, lines), *(f"failed: {text[:250]}" for text in failed), f"not reached: {unreached}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=600, help="stop after that")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--skip", nargs="+", default=[], help="without these contestants (patterns)")
    parser.add_argument("--name", default="new", help="of the file: product_cells_NAME.jsonl")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"product_cells_{given.name}.jsonl"
    print("\n".join(measure(cells(given.sets, given.rows), path, given.seconds, skip=given.skip)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
