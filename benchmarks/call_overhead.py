"""CPU time per call, in microseconds: the registry's front door beside torch's own calls.

    python benchmarks/call_overhead.py [--output DIR] [--rounds 40]

The tensors are small, so that the GPU never holds up the CPU. Each round runs every contender in a new order; a figure
is the median over rounds of the mean over the calls of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import registry
from registry.contract.target import Target
from registry.tuning import machine
from registry.tuning.timing import turn_order

CALLS = 100
MASKS, EPILOGUE = (False, None, 0.0, False, None), (None, None, None)
"""What the calls below ask for besides tensors, as the ops pass it on."""
Call = Callable[[], Any]


def attention_calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """Forward calls: without grad, and as autograd sees them."""
    q, k, v = (torch.randn(1, 8, 128, 128, device=device, dtype=dtype) for _ in range(3))
    trained = [x.clone().requires_grad_() for x in (q, k, v)]

    def chosen() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    calls: dict[str, Call] = {
        "attention: torch SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "attention: torch SDPA inside sdpa_kernel": chosen,
        "attention with grad: torch SDPA": lambda: F.scaled_dot_product_attention(*trained),
        "attention: the decision alone": lambda: registry.attention.find_plan(MASKS, q, k, v),
        "attention: registry, as dispatched": lambda: registry.attention(q, k, v),
        "attention with grad: registry, as dispatched": lambda: registry.attention(*trained),
    }
    for name in legal(registry.attention, q, k, v):
        calls[f"attention: registry, {name}"] = lambda name=name: registry.attention(q, k, v, variant=name)
        calls[f"attention with grad: registry, {name}"] = lambda name=name: registry.attention(*trained, variant=name)
    fa3 = peer_fa3(q, k, v)
    if fa3 is not None:
        calls["attention: FlashAttention-3"] = fa3
    return calls


def matmul_calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    a, b = (torch.randn(128, 128, device=device, dtype=dtype) for _ in range(2))
    calls: dict[str, Call] = {
        "matmul: torch": lambda: torch.matmul(a, b),
        "matmul: the decision alone": lambda: registry.matmul.find_plan(EPILOGUE, a, b),
        "matmul: registry, as dispatched": lambda: registry.matmul(a, b),
    }
    for name in legal(registry.matmul, a, b):
        calls[f"matmul: registry, {name}"] = lambda name=name: registry.matmul(a, b, variant=name)
    return calls


def compiled_calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """The same under torch.compile."""
    q, k, v = (torch.randn(1, 8, 128, 128, device=device, dtype=dtype) for _ in range(3))
    a, b = (torch.randn(128, 128, device=device, dtype=dtype) for _ in range(2))
    sdpa = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True)
    ours = torch.compile(lambda q, k, v: registry.attention(q, k, v), fullgraph=True)
    theirs = torch.compile(lambda a, b: torch.matmul(a, b), fullgraph=True)
    product = torch.compile(lambda a, b: registry.matmul(a, b), fullgraph=True)
    return {
        "attention: torch SDPA, compiled": lambda: sdpa(q, k, v),
        "attention: registry, compiled": lambda: ours(q, k, v),
        "matmul: torch, compiled": lambda: theirs(a, b),
        "matmul: registry, compiled": lambda: product(a, b),
    }


def legal(op: Any, *tensors: torch.Tensor) -> list[str]:
    """Variants that may run here, but for those that decompose into many torch operations."""
    decision = op.explain(*tensors)
    return [c.variant for c in decision.candidates if c.legal and op.variants[c.variant].design.dsl != "aten"]


def peer_fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call | None:
    """FlashAttention-3's op on the same tensors, where its library is to be had (see peers.py)."""
    peers = __import__("peers").registry_variants() if q.is_cuda else []
    for peer in peers:
        if peer.name == "peer.fa3":
            problem, _ = registry.attention.problem_of(q, k, v)
            launch, scale = peer.prepare(problem, {}), q.shape[-1] ** -0.5
            return lambda: launch(q, k, v, scale=scale)
    return None


def measure(calls: dict[str, Call], rounds: int, synchronize: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds per call of every contender, one figure a round."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for turn in range(rounds):
        for name in turn_order(calls, turn):
            call = calls[name]
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            figures[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the raw figures")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-compile", action="store_true", help="leave out the torch.compile'd calls")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    synchronize = torch.cuda.synchronize if cuda else (lambda: None)
    calls = {**attention_calls(device, dtype), **matmul_calls(device, dtype)}
    if not options.no_compile:
        calls |= compiled_calls(device, dtype)
    figures = measure(calls, options.rounds, synchronize)
    for name, values in figures.items():
        print(f"{statistics.median(values):8.2f} us   {name}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": "microseconds of CPU time per call, one figure per round",
            "machine": machine.describe(Target.of(torch.device(device))),
            "figures": {name: [round(value, 3) for value in values] for name, values in figures.items()},
        }
        (options.output / "call_overhead.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
