"""CPU time of a whole call of a shape that the process has not met, beside torch's of the same shape, in microseconds.

    python benchmarks/first_calls.py [--output DIR] [--shapes 200]

All that a call does is in it: checks, the decision, binding and launching. Kernels were loaded before: a call that
takes over 4 ms (it compiled, or a library built something) is counted apart. Each shape is called twice by the registry
and twice by torch, in an order that changes, in two regimes: `waiting`, where the process waited for the GPU before
each, as one does that reads results, so that the processor's caches hold other things; and `ahead`, where it does not
wait, as in a loop over layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from call_tables import BUILT

import registry


def attention_shapes(draw: random.Random) -> Iterator[tuple[torch.Tensor, ...]]:
    """Any batch, heads and length of one kind: causal, bfloat16, head dim 128."""
    while True:
        shape = draw.choice((1, 2, 3, 4, 6)), draw.choice((8, 16, 24, 32)), draw.randint(300, 4000), 128
        yield tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")


def matmul_shapes(draw: random.Random) -> Iterator[tuple[torch.Tensor, ...]]:
    """Any rows; widths that are multiples of 64."""
    while True:
        m, n, k = draw.randint(1, 6000), 64 * draw.randint(8, 128), 64 * draw.randint(8, 128)
        yield (
            torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(k, n, device="cuda", dtype=torch.bfloat16),
        )


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def our_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return registry.attention(q, k, v, causal=True)


Calls = dict[str, Callable[..., Any]]
OPS: dict[str, tuple[Callable[[random.Random], Iterator[tuple[torch.Tensor, ...]]], Calls]] = {
    "attention": (attention_shapes, {"registry": our_attention, "torch": torch_attention}),
    "matmul": (matmul_shapes, {"registry": registry.matmul, "torch": torch.matmul}),
}


def taken(call: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """The first call of this shape, and the second."""
    times = []
    for _ in range(2):
        begun = time.thread_time()
        call(*tensors)
        times.append(round((time.thread_time() - begun) * 1e6, 1))
    return times[0], times[1]


def measured(op: str, shapes: int, waiting: bool, seed: int) -> dict[str, list[tuple[float, float]]]:
    """(first, second) of each shape, by whose call it is."""
    shapes_of, calls = OPS[op]
    draw = random.Random(f"{op} {seed}")
    names, found = [*calls], {name: [] for name in calls}
    for number, tensors in zip(range(shapes), shapes_of(draw), strict=False):
        for name in names[:: 1 if number % 2 else -1]:
            if waiting:
                torch.cuda.synchronize()
            found[name].append(taken(calls[name], tensors))
    torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the raw figures")
    parser.add_argument("--shapes", type=int, default=200, help="of each op and regime")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for op in OPS:
        for seed in (0, 1):  # kernels are compiled, and loaded
            measured(op, options.shapes, False, seed)
        gc.collect()
        gc.freeze()  # no search through all that is there in the middle of a call
        for regime in ("waiting", "ahead"):
            found = measured(op, options.shapes, regime == "waiting", 2 if regime == "waiting" else 3)
            for name, pairs in found.items():
                figures[f"{op}, {regime}: {name}"] = pairs
                firsts = sorted(first for first, _ in pairs if first < BUILT)
                seconds = sorted(second for _, second in pairs)
                print(
                    f"{op:10} {regime:8} {name:9} first {firsts[len(firsts) // 2]:6.0f}, 95th percentile "
                    f"{firsts[int(len(firsts) * 0.95)]:6.0f}; {len(pairs) - len(firsts)} built something; "
                    f"second {seconds[len(seconds) // 2]:5.0f}",
                    flush=True,
                )
    if options.output:
        from registry import Target
        from registry.tuning import machine

        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": "microseconds of CPU time: the first call of a shape, and the second",
            "machine": machine.describe(Target.of(torch.device("cuda"))),
            "figures": figures,
        }
        (options.output / "first_calls.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
