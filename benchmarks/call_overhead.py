"""CPU time per call, in microseconds: the registry's front door beside torch's own calls, and bare launches.

    python benchmarks/call_overhead.py [--output DIR] [--rounds 40]
    python benchmarks/call_overhead.py --launches        # `kernel[grid](...)` against a bound launch, on a Hopper GPU

The tensors are small, so that the GPU never holds up the CPU. Each round runs every contender in a new order; a figure
is the median over rounds of the mean over the calls of a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import registry
from registry.contract.target import Target
from registry.toolbox.launch import Launcher
from registry.tuning import machine
from registry.tuning.timing import turn_order

CALLS = 100
MASKS, EPILOGUE = (False, None, 0.0, False, None), (None, None, None)
"""What the calls below ask for besides tensors, as the ops pass it on."""
Call = Callable[[], Any]


@triton.jit
def nothing(x, y, z, m, n, scale, BLOCK: tl.constexpr):
    pass


@gluon.jit
def nothing_described(q, k, v, o, lse, n, scale):
    pass


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


def launch_calls() -> dict[str, Call]:
    """Launches of two kernels that do nothing: three pointers, three scalars; four maps, a pointer, two scalars."""
    q, k, v, o = (torch.randn(4, 16, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    lse = torch.empty(4, 16, 1024, device="cuda", dtype=torch.float32)
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, 64], gl.bfloat16)

    def described() -> list[Any]:
        return [TensorDescriptor(t, [64, 1024, 64], [65536, 64, 1], [1, 64, 64], layout) for t in (q, k, v, o)]

    scalars = {"x": q, "y": k, "z": v, "m": 1024, "n": 64, "scale": 1.0}
    plain = Launcher(nothing, constants={"BLOCK": 128}).bind(scalars, (132,), vary=("scale",))
    kept = described()
    mapped = dict(zip("qkvo", kept, strict=True)) | {"lse": lse, "n": 1024, "scale": 1.0}
    maps = Launcher(nothing_described).bind(mapped, (132,), vary=("scale",))
    addresses = [t.data_ptr() for t in (q, k, v, o, lse)]
    fresh = itertools.count()
    return {
        "triton kernel[grid]": lambda: nothing[(132,)](q, k, v, 1024, 64, 0.5, BLOCK=128),
        "triton bound, tensors": lambda: plain(q, k, v, 0.5),
        "triton bound, addresses": lambda: plain(*addresses[:3], 0.5),
        "gluon kernel[grid], descriptors built": lambda: nothing_described[(132,)](*described(), lse, 1024, 0.5),
        "gluon kernel[grid], descriptors kept": lambda: nothing_described[(132,)](*kept, lse, 1024, 0.5),
        "gluon bound, tensors": lambda: maps(q, k, v, o, lse, 0.5),
        "gluon bound, addresses": lambda: maps(*addresses, 0.5),
        "gluon bound, one new address": lambda: maps(addresses[0] + 16 * next(fresh), k, v, o, lse, 0.5),
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
    parser.add_argument("--launches", action="store_true", help="bare launches alone; no raw figures are kept")
    parser.add_argument("--no-compile", action="store_true", help="leave out the torch.compile'd calls")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    synchronize = torch.cuda.synchronize if cuda else (lambda: None)
    calls = launch_calls() if options.launches else {**attention_calls(device, dtype), **matmul_calls(device, dtype)}
    if not options.launches and not options.no_compile:
        calls |= compiled_calls(device, dtype)
    figures = measure(calls, options.rounds, synchronize)
    for name, values in figures.items():
        print(f"{statistics.median(values):8.2f} us   {name}")
    if options.output and not options.launches:
        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": "microseconds of CPU time per call, one figure per round",
            "machine": machine.describe(Target.of(torch.device(device))),
            "figures": {name: [round(value, 3) for value in values] for name, values in figures.items()},
        }
        (options.output / "call_overhead.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
