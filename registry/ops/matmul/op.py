"""Matmul: `registry.matmul(a, b)` with torch.matmul's shapes, any strides, and a fused epilogue.

out = activation((a @ b) * scale_a[:, None] * scale_b[None, :] + bias), accumulated in float32 (int32 for int8).
With `gated`, one half of the columns gates the other half (gated.py). Gradients are matmuls that dispatch too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.decision import Decision
from registry.dispatch.plan import Plan, observe
from registry.dispatch.plan_cache import NOT_TENSORS
from registry.dispatch.precision import float32_precision
from registry.dispatch.scope import EMPTY, Scope, current
from registry.errors import InvalidArgument
from registry.ops.matmul import arguments, costs
from registry.ops.matmul import gated as with_gate
from registry.ops.matmul.problem import MatmulProblem
from registry.ops.matmul.torch_op import define, through_torch
from registry.ops.op import Op, with_variant
from registry.ops.parts.products import (
    activate,
    check_activation,
    check_out,
    check_out_dtype,
    check_writable,
    layout_letter,
    needs_copy,
    refuse_grad,
)
from registry.ops.parts.rounding import rounded_to
from registry.ops.tensors import (
    asks_ieee,
    autocast,
    dtype_name,
    jit_traced,
    operand,
    overlap,
    plain_and_not_followed,
    written,
)

_is_compiling = torch.compiler.is_dynamo_compiling
_deterministic = torch.are_deterministic_algorithms_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_scope = current.get
Settings = tuple[Any, ...]
"""activation, out_dtype, variant: all of a call but its tensors. And what the tensors behind a and b are, where those
that are left out do not stand at the end."""
_APART = 1_000_003
"""What tells the numbers of elements of two operands apart in one number."""
_INTO = {2: ("out",), 3: ("bias", "out")}


class Matmul(Op):
    """a @ b by the fastest legal kernel. `.explain(...)` says which one and why."""

    name = "matmul"
    summary = "activation((a @ b) * scales + bias)"
    problem_type = MatmulProblem
    tensors = ("a", "b")
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {"activation": ("activations", "activation")}
    call_arguments: ClassVar[Mapping[str, str]] = {
        "out_dtype": "out_dtypes",
        "bias": "bias",
        "scale_a": "scaling",
        "scale_b": "scaling",
        "out": "out",
    }

    def __init__(self) -> None:
        super().__init__()
        self._straight = self.plans.straight

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        gated: bool = False,
        variant: str | None = None,
    ) -> torch.Tensor:
        """The product of a [..., M, K] and b [..., K, N], batch dimensions broadcast as in torch.matmul.

        bias        [N], added to each row: floating for a floating result, integers for int32, added modulo 2**32
        activation  None, "relu", "gelu" or "silu", after the bias
        out_dtype   default: the operands' dtype; int32 for int8 (exact; K to 131071), bfloat16 for fp8. An int32
                    result takes integers and relu alone: with scales or another activation it is floating
        scale_a/_b  float32 scalars, or vectors: one value a column of b, and one a row of a. Where b is one matrix
                    these are all rows of a, whatever its dimensions; else those of one matrix
        out         where to write the result; where it overlaps an input, by way of a temporary
        gated       b, bias and scale_b have 2 N columns: activation(first half) * second half is the result. Where that
                    was measured to be the fastest it runs as one group of registry.grouped_mm, whose variants
                    `variant` may name, too; else as a plain product and torch's operations
        variant     run exactly this one, or raise IllegalVariant with its reasons
        """
        if gated is not False:
            how: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype, "variant": variant, "gated": gated}
            return with_gate.product(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out, **how)
        if not _is_compiling() and not jit_traced():
            product, key = None, None
            epilogue = bias is not None or scale_a is not None or scale_b is not None or activation is not None
            if not epilogue and out is None and out_dtype is None:
                try:
                    sizes = a.numel() * _APART + b.numel()
                    key = sizes if variant is None else (sizes, variant)
                    known = self._straight.get(key)
                    if (
                        known is not None
                        and not (a.is_nested or b.is_nested)
                        and known[0](a, b)
                        and (known[2] is None or known[2] == float32_precision())
                    ):
                        product = known[1]
                except NOT_TENSORS:
                    key = None
            if product is not None and not _function_modes() and not _dispatch_modes() and _scope() is EMPTY:
                return product(a, b)  # type: ignore[no-any-return]
            settings = (activation, out_dtype, variant)
            if scale_a is None and scale_b is None:
                if out is not None:
                    given = (a, b) if bias is None else (a, b, bias)
                    plan = self._plan_into(out, settings, given)
                else:
                    plan = self.find_plan(settings, a, b) if bias is None else self.find_plan(settings, a, b, bias)
                if plan is not None:
                    result: torch.Tensor = plan.launch(
                        a, b, out_dtype=plan.default, bias=bias, scale_a=None, scale_b=None, out=out
                    )
                    if out is not None:
                        written(out)
                    scope = current.get()
                    if scope is not EMPTY:
                        observe(scope, plan.decision)
                    elif key is not None and product is None:
                        self.plans.keep_straight(key, settings, plan, (a, b), a, b)
                    return result
            if out is not None:
                try:
                    out = check_writable(out)
                except InvalidArgument as late:
                    self.refuse(late, settings, a, b, bias, scale_a, scale_b, out)
            if plain_and_not_followed(a, b, bias, scale_a, scale_b, out):
                if out is not None and needs_copy(out, a, b, bias, scale_a, scale_b):
                    result = self.forward(settings, a, b, bias, scale_a, scale_b, None)
                    check_out(out, tuple(result.shape), result.dtype, result.device)
                    return out.copy_(result)
                return self.forward(settings, a, b, bias, scale_a, scale_b, out, key if product is None else None)
        return through_torch((activation, out_dtype, variant), a, b, bias, scale_a, scale_b, out)

    def _plan_into(self, out: torch.Tensor, settings: Settings, given: tuple[torch.Tensor, ...]) -> Plan | None:
        """The plan of an eager call that writes to `out`; None where all of it is to be checked again: memory that two
        share is no fact that a plan is kept by."""
        try:
            for tensor in given:
                if overlap(out, tensor):
                    return None
        except NOT_TENSORS:  # the checks name the argument
            return None
        return self.find_plan((*settings, _INTO[len(given)]), *given, out)

    def eager(self, *tensors: Any) -> bool:
        if not plain_and_not_followed(*tensors):
            return False
        return all(isinstance(tensor, torch.Tensor) and tensor.dim() == 2 for tensor in tensors[:2])

    def forward(
        self,
        settings: Settings,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out: torch.Tensor | None,
        key: Any = None,
    ) -> torch.Tensor:
        """The product without autograd: views of two or three dimensions, then `launch`. With a `key`, calls like this
        one may go straight to a function of torch."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim() == 2:
            return self.launch(settings, a, b, bias, scale_a, scale_b, out)
        a2, b2, shape = arguments.as_matrices(*arguments.check_operands(a, b), scale_a)
        if out is None:
            called = (key, a, b) if key is not None else None
            return self.launch(settings, a2, b2, bias, scale_a, scale_b, None, called).view(shape)
        if tuple(out.shape) != shape:
            late = InvalidArgument("out", f"shape {tuple(out.shape)}", f"shape {shape}")
            self.refuse(late, settings, a, b, bias, scale_a, scale_b, out)
        try:
            view = out.view(*((a2.shape[0],) if a2.dim() == 3 else ()), a2.shape[-2], b2.shape[-1])
        except RuntimeError:  # no view of `out` has so few dimensions
            return out.copy_(self.forward(settings, a, b, bias, scale_a, scale_b, None))
        self.launch(settings, a2, b2, bias, scale_a, scale_b, view)
        return out

    def launch(
        self,
        settings: Settings,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        called: tuple[Any, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Find or make the plan for these matrices, views of those `called`, and launch it."""
        plan = self.plans.by_facts(settings, a, b, bias, scale_a, scale_b, out)
        result: torch.Tensor = plan.launch(
            a, b, out_dtype=plan.default, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out
        )
        if out is not None:
            written(out)
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        elif called is not None:
            self.plans.keep_straight(called[0], settings, plan, called[1:], a, b, bias, scale_a, scale_b, out)
        return result

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """As every op's. A call with `gated` is explained as what it becomes (gated.py)."""
        if kwargs.get("gated", False) is False:
            return super().explain(*args, **{name: value for name, value in kwargs.items() if name != "gated"})
        return with_gate.explain(*args, **kwargs)

    def asked(self, settings: Settings, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        activation, out_dtype, variant, *names = settings
        optional = dict(zip(names[0] if names else ("bias", "scale_a", "scale_b", "out"), tensors[2:], strict=False))
        what: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype, "variant": variant}
        return self.problem_of(tensors[0], tensors[1], **optional, **what)

    def problem_of(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[MatmulProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        a, b = arguments.check_operands(*autocast(a, b))
        result_dtype = check_out_dtype(out_dtype, a.dtype, arguments.OUT_DTYPES)
        if bias is not None:
            arguments.check_bias(bias, a, b, result_dtype)
        given = (a, b, bias, scale_a, scale_b)
        a, b, shape = arguments.as_matrices(a, b, scale_a)
        named, scaling = check_activation(activation), arguments.check_scales(scale_a, scale_b, a, b)
        arguments.check_integers(result_dtype, a.dtype, named, scaling)
        refuse_grad("scale_a", scale_a, *given[:3])
        refuse_grad("out", out, *given[:3])
        if out is not None:
            check_writable(out)
            check_out(out, shape, result_dtype, a.device)
            out = None if needs_copy(out, *given) else out  # copied to its place afterwards
        operands = (operand("a", a), operand("b", b))
        letters = "".join(map(layout_letter, operands))
        problem = MatmulProblem(
            target=target if target is not None else Target.of(a.device),
            dtype=dtype_name(a.dtype),
            dtype_b=dtype_name(b.dtype),
            out_dtype=dtype_name(result_dtype),
            m=a.shape[-2],
            n=b.shape[-1],
            k=a.shape[-1],
            batch=a.shape[0] if a.dim() == 3 else 1,
            layout=letters if len(letters) == 2 else "strided",
            bias=bias is not None,
            activation=named,
            scaling=scaling,
            out=out is not None,
            ieee=asks_ieee(a.dtype),
            deterministic=_deterministic(),
            operands=operands,
        )
        return problem, with_variant(self.name, current.get(), variant)

    def default(self, problem: Problem) -> Any:
        return getattr(torch, problem.out_dtype)  # type: ignore[attr-defined]

    def empty(self, problem: MatmulProblem) -> bool:
        return not (problem.m and problem.n and problem.k and problem.batch)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        def launch(a: torch.Tensor, b: torch.Tensor, *, bias: Any, out: Any, out_dtype: torch.dtype, **_: Any) -> Any:
            result = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
            if bias is not None:
                result = result + bias.to(out_dtype)
            result = activate(result, problem.activation)  # type: ignore[attr-defined]
            return result if out is None else out.copy_(result)

        return launch

    def reference(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        gated: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """The oracle: the product by its definition, in `dtype`, differentiable."""
        a, b = arguments.check_operands(a, b)
        if gated:
            with_gate.check_columns(b)
        rows, columns, shape = arguments.as_matrices(a, b, scale_a)
        result = torch.matmul(a.to(dtype), b.to(dtype)).reshape(*rows.shape[:-1], columns.shape[-1])
        if arguments.check_scales(scale_a, scale_b, rows, columns):
            assert scale_a is not None and scale_b is not None
            result = result * scale_a.to(dtype).reshape(-1, 1) * scale_b.to(dtype)
        if bias is not None:
            arguments.check_bias(bias, a, b)
            result = result + bias.to(dtype)
            if a.dtype is torch.int8 and not bias.is_floating_point():
                result = rounded_to(result, torch.int32).to(dtype)
        result, named = result.reshape(shape), check_activation(activation)
        if not gated:
            return activate(result, named)
        gate, up = result.chunk(2, -1)
        return activate(gate, named) * up

    flops = staticmethod(costs.flops)
    bytes_moved = staticmethod(costs.bytes_moved)


matmul = Matmul()
define(matmul.launch, matmul, matmul.graph_launch, matmul.plans.holding)
