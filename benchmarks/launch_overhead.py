"""CPU time per launch: `kernel[grid](...)` against a bound launch, in microseconds per call.

    python benchmarks/launch_overhead.py [--output DIR]

Two kernels that do nothing, so that the GPU never holds up the CPU: one with three pointers and three scalars, and a
Gluon kernel with four tensor descriptors, a pointer and two scalars. Median over rounds of the mean per call; the
contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.toolbox.launch import Launcher


@triton.jit
def nothing(x, y, z, m, n, scale, BLOCK: tl.constexpr):
    pass


@gluon.jit
def nothing_described(q, k, v, o, lse, n, scale):
    pass


def contenders(device: str = "cuda") -> dict[str, Callable[[], object]]:
    """Each kernel's launches by name. Every call gives the tensors anew, as an op does."""
    x = torch.randn(4, 16, 1024, 64, device=device, dtype=torch.bfloat16)
    q, k, v, o = (x.clone() for _ in range(4))
    lse = torch.empty(4, 16, 1024, device=device, dtype=torch.float32)
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, 64], gl.bfloat16)

    def described(t: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(t, [64, 1024, 64], [65536, 64, 1], [1, 64, 64], layout)

    plain = Launcher(nothing, constants={"BLOCK": 128}).bind(
        {"x": q, "y": k, "z": v, "m": 1024, "n": 64, "scale": 1.0}, (132,), vary=("scale",)
    )
    maps = Launcher(nothing_described).bind(
        {
            "q": described(q),
            "k": described(k),
            "v": described(v),
            "o": described(o),
            "lse": lse,
            "n": 1024,
            "scale": 1.0,
        },
        (132,),
        vary=("scale",),
    )
    addresses = [t.data_ptr() for t in (q, k, v, o, lse)]
    fresh = iter(range(10**9))
    base = q.data_ptr()
    kept = [described(t) for t in (q, k, v, o)]
    return {
        "triton kernel[grid]": lambda: nothing[(132,)](q, k, v, 1024, 64, 0.5, BLOCK=128),
        "triton bound, tensors": lambda: plain(q, k, v, 0.5),
        "triton bound, addresses": lambda: plain(*addresses[:3], 0.5),
        "gluon kernel[grid], descriptors built": lambda: nothing_described[(132,)](
            described(q), described(k), described(v), described(o), lse, 1024, 0.5
        ),
        "gluon kernel[grid], descriptors kept": lambda: nothing_described[(132,)](*kept, lse, 1024, 0.5),
        "gluon bound, tensors": lambda: maps(q, k, v, o, lse, 0.5),
        "gluon bound, addresses": lambda: maps(*addresses, 0.5),
        "gluon bound, one new address": lambda: maps(base + 16 * next(fresh), k, v, o, lse, 0.5),
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int = 25, number: int = 400) -> dict[str, list[float]]:
    """Microseconds per call, one figure for each round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for call in calls.values():
        for _ in range(50):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(number):
                call()
            found[name].append((time.perf_counter() - start) / number * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for the raw figures")
    options = parser.parse_args()
    figures = measure(contenders())
    for name, values in figures.items():
        print(f"{name:40} {statistics.median(values):7.2f} us   (fastest {min(values):.2f}, slowest {max(values):.2f})")
    if options.output:
        machine = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "unit": "microseconds of CPU time per call, one figure per round",
        }
        options.output.mkdir(parents=True, exist_ok=True)
        rounded = {name: [round(value, 3) for value in values] for name, values in figures.items()}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in rounded.items())
        text = json.dumps({**machine, "figures": None}, indent=1).replace("null", f"{{\n{lines}\n }}")
        (options.output / "launch_overhead.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
