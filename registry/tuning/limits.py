"""What a card reaches at best, measured: the roof of a roofline. Data sheets speak of clocks that no card keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from registry.ops.parts.memory import conditions

COPY_BYTES = 1 << 30
SIZE = 8192
"""Of square products: large enough to be bound by arithmetic."""
SECONDS = 0.25
"""Time of each probe: long enough for the clock to come down to what the power cap allows."""


def measure(seconds: float = SECONDS) -> dict[str, Any]:
    """{"gbs": bytes read and written by a copy, "tflops": {dtype: of a dense product}}, on the current GPU."""
    found: dict[str, Any] = {"gbs": round(_bandwidth(seconds)), "tflops": {}}
    for name, make in PRODUCTS.items():
        try:
            found["tflops"][name] = round(2 * SIZE**3 / _seconds(make(SIZE), seconds) / 1e12, 1)
        except RuntimeError:  # a dtype that this GPU has no products of
            torch.cuda.synchronize()
    return found


def _bandwidth(seconds: float) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source), seconds) / 1e9


def _seconds(call: Callable[[], Any], seconds: float) -> float:
    """Mean time of a call over about that time, after as long a warm-up."""
    call()
    torch.cuda.synchronize()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        call()
        torch.cuda.synchronize()
        count += 1
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _plain(dtype: torch.dtype) -> Callable[[int], Callable[[], Any]]:
    def make(n: int) -> Callable[[], Any]:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device="cuda")

        def call() -> Any:
            with conditions(ieee=False):
                return torch.mm(a, b, out=out)

        return call

    return make


def _fp8(n: int) -> Callable[[], Any]:
    a = torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)  # type: ignore[attr-defined]


def _int8(n: int) -> Callable[[], Any]:
    a = torch.randint(-8, 8, (n, n), dtype=torch.int8, device="cuda")
    b = torch.randint(-8, 8, (n, n), dtype=torch.int8, device="cuda").t()
    return lambda: torch._int_mm(a, b)  # type: ignore[attr-defined]


PRODUCTS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "bfloat16": _plain(torch.bfloat16),
    "float16": _plain(torch.float16),
    "float32": _plain(torch.float32),
    "float8_e4m3fn": _fp8,
    "int8": _int8,
}
"""float32 as tf32, which is what torch's "high" and our kernels compute in."""
