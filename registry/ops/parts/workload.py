"""A case as tensors: what a call of it takes, and the zero-argument launches that the timer runs.

`workload(case, "meta")` allocates nothing and serves planning; on a real device it holds random values, and as many
copies of them as a graph of launches needs to find its inputs out of the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from registry.contract.problem import Problem
from registry.errors import InvalidArgument
from registry.ops.known import op_named

Tensors = dict[str, Any]
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides (both in elements) and base alignment (in bytes) of one recorded operand."""
MAX_COPIES = 32


class Case(Protocol):
    """What is needed of a registry.ops.parts.cases.Case, which makes workloads itself."""

    @property
    def op(self) -> str: ...
    @property
    def operands(self) -> tuple[tuple[str, Layout], ...]: ...
    @property
    def sizes(self) -> dict[str, Any]: ...


class Workload:
    """Inputs of one case on one device. Subclasses know one op's arguments."""

    outputs: tuple[str, ...] = ("out",)

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case = case
        self.device = torch.device(device)
        self.op = op_named(case.op)
        self.sizes = case.sizes
        self._generator = None if device == "meta" else torch.Generator(self.device).manual_seed(seed)
        with self.settings():
            self.tensors: Tensors = self.make()

    def make(self) -> Tensors:
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """What `problem_of` takes besides the tensors."""
        raise NotImplementedError

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        """One launch as the op does it."""
        raise NotImplementedError

    def problem(self, target: Any = None) -> Problem:
        """The problem that a call of this case is."""
        with self.settings():
            problem, _ = self.op.problem_of(**self.arguments(), target=target)
        return problem

    def flops(self, problem: Problem) -> float:
        return float(getattr(self.op, "flops", lambda _: 0.0)(problem))

    def copies(self, wanted_bytes: int) -> list[Tensors]:
        """The inputs, and copies elsewhere in memory until they fill `wanted_bytes`."""
        each = sum(t.numel() * t.element_size() for t in self.tensors.values() if isinstance(t, torch.Tensor))
        count = max(1, min(MAX_COPIES, math.ceil(wanted_bytes / max(each, 1))))
        return [self.tensors, *({n: _copy(t) for n, t in self.tensors.items()} for _ in range(count - 1))]

    def launches(self, launch: Callable[..., Any], sets: list[Tensors]) -> list[Callable[[], Any]]:
        """One zero-argument launch for each set of inputs."""
        return [lambda tensors=tensors: self.call(launch, tensors) for tensors in sets]  # type: ignore[misc]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """torch's switches as the case wants them."""
        deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        filling: Any = torch.utils.deterministic
        fill = filling.fill_uninitialized_memory
        torch.use_deterministic_algorithms(bool(self.sizes.get("deterministic", False)))
        filling.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("highest" if self.sizes.get("ieee") else "high")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            filling.fill_uninitialized_memory = fill
            torch.set_float32_matmul_precision(precision)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Normal values (any of its values for int8), never zeros."""
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if dtype is torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=self.device, generator=self._generator)
        made = dtype if dtype.itemsize > 1 else torch.float16
        return torch.randn(shape, dtype=made, device=self.device, generator=self._generator).to(dtype)

    def recorded(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """An operand with the strides and the alignment that were recorded, if any were."""
        found: Layout | None = dict(self.case.operands).get(name)
        if found is None:
            return None
        shape, strides, alignment = found
        offset = alignment // dtype.itemsize if alignment < 16 else 0
        extent = 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))
        return self.random((offset + extent,), dtype).as_strided(shape, strides, offset)


def workload(case: Case, device: str, seed: int = 0) -> Workload:
    """The workload of a case; ops from outside add theirs to WORKLOADS."""
    kind = WORKLOADS.get(case.op)
    if kind is None:
        raise InvalidArgument("op", repr(case.op), ", ".join(sorted(WORKLOADS)))
    return kind(case, device, seed)


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgument("dtype", repr(name), "a torch dtype such as bfloat16")
    return found


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    whole = value.as_strided((extent,), (1,), value.storage_offset()).clone()
    return whole.as_strided(value.shape, value.stride(), 0)


class AttentionWorkload(Workload):
    outputs: tuple[str, ...] = ("out", "lse")

    def make(self) -> Tensors:
        get = self.sizes.get
        b, hq, s, d = get("b", 1), get("hq", 1), get("s", 1024), get("d", 128)
        hkv, sk, dv = get("hkv", hq), get("sk", s), get("dv", d)
        self.dtype = torch_dtype(get("dtype", "bfloat16"))
        shapes = {"q": (b, hq, s, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
        return {name: self.operand(name, shape) for name, shape in shapes.items()}

    def operand(self, name: str, shape: tuple[int, int, int, int]) -> torch.Tensor:
        found = self.recorded(name, self.dtype)
        if found is not None:
            return found
        if self.sizes.get("layout", "bhsd") == "bshd":
            b, h, s, d = shape
            return self.random((b, s, h, d), self.dtype).transpose(1, 2)
        return self.random(shape, self.dtype)

    def mask(self) -> dict[str, Any]:
        get = self.sizes.get
        return {"causal": get("causal", False), "window": get("window"), "softcap": get("softcap", 0.0)}

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.tensors["q"].shape[3])

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.mask(), "return_lse": bool(self.sizes.get("lse", False))}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        return launch(tensors["q"], tensors["k"], tensors["v"], scale=self.scale)


class AttentionBackwardWorkload(AttentionWorkload):
    outputs: tuple[str, ...] = ("dq", "dk", "dv")

    def make(self) -> Tensors:
        found = super().make()
        q, v = found["q"], found["v"]
        shape = (*q.shape[:3], v.shape[3])
        found["grad_out"] = self.operand("grad_out", shape)
        found["out"] = self.operand("out", shape)
        found["lse"] = torch.empty(q.shape[:3], dtype=torch.float32, device=self.device)
        wants_lse_gradient = self.sizes.get("grad_lse", False)
        found["grad_lse"] = self.random(tuple(q.shape[:3]), torch.float32) if wants_lse_gradient else None
        if self.device.type != "meta":
            from registry.ops.parts.accuracy import forward_into

            forward_into(found, scale=1.0 / math.sqrt(q.shape[3]), **self.mask())
        return found

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.mask()}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        order = (tensors[name] for name in ("grad_out", "q", "k", "v", "out", "lse"))
        return launch(*order, scale=self.scale, grad_lse=tensors["grad_lse"])


class MatmulWorkload(Workload):
    def make(self) -> Tensors:
        get = self.sizes.get
        m, n, k, batch = get("m", 1024), get("n", 1024), get("k", 1024), get("b", 1)
        dtype = torch_dtype(get("dtype", "bfloat16"))
        layout = get("layout", "nn")
        found = {
            "a": self.operand("a", (m, k), batch, layout[0], dtype),
            "b": self.operand("b", (k, n), batch, layout[1], torch_dtype(get("dtype_b", get("dtype", "bfloat16")))),
        }
        scaling = get("scaling", "")
        if scaling:
            vector = scaling == "rowwise"
            found["scale_a"] = self.random((m,) if vector else (), torch.float32).abs()
            found["scale_b"] = self.random((n,) if vector else (), torch.float32).abs()
        if get("bias", False):
            found["bias"] = self.random((n,), dtype if dtype.itemsize > 1 else torch.bfloat16)
        self.out_dtype = torch_dtype(str(get("out_dtype"))) if get("out_dtype") else None
        return found

    def operand(self, name: str, shape: tuple[int, int], batch: int, letter: str, dtype: torch.dtype) -> torch.Tensor:
        found = self.recorded(name, dtype)
        if found is not None:
            return found
        rows, columns = shape if letter == "n" else shape[::-1]
        made = self.random((batch, rows, columns) if batch > 1 else (rows, columns), dtype)
        return made if letter == "n" else made.transpose(-1, -2)

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, "activation": self.sizes.get("activation") or None, "out_dtype": self.out_dtype}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        from registry.ops.matmul.arguments import default_out_dtype

        extra = {name: tensors.get(name) for name in ("bias", "scale_a", "scale_b")}
        out_dtype = self.out_dtype or default_out_dtype(tensors["a"].dtype)
        return launch(tensors["a"], tensors["b"], out_dtype=out_dtype, out=None, **extra)


WORKLOADS: dict[str, type[Workload]] = {
    "attention": AttentionWorkload,
    "attention_backward": AttentionBackwardWorkload,
    "matmul": MatmulWorkload,
}
