"""Matmul: `registry.matmul(a, b)` with torch.matmul's shapes, any strides, and a fused epilogue.

out = activation((a @ b) * scale_a[:, None] * scale_b[None, :] + bias), accumulated in float32 (int32 for int8).
Gradients are matmuls that dispatch too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.decision import NO_KERNEL, Candidate, Decision
from registry.dispatch.plan import Plan, observe
from registry.dispatch.scope import EMPTY, Scope, current
from registry.errors import InvalidArgument
from registry.ops.fastpath import ALIGNED, WarmPlan, WarmPlans, never
from registry.ops.matmul import arguments
from registry.ops.matmul.oracle import activate
from registry.ops.matmul.problem import MatmulProblem, layout_letter
from registry.ops.matmul.torch_op import define, through_torch
from registry.ops.op import Op, with_variant
from registry.ops.tensors import autocast, dtype_name, ieee_float32, operand, plain

_is_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_deterministic = torch.are_deterministic_algorithms_enabled
_grad_enabled = torch.is_grad_enabled
_FLOAT32 = torch.float32


class Matmul(Op):
    """a @ b by the fastest legal kernel. `.explain(...)` says which one and why."""

    name = "matmul"
    summary = "activation((a @ b) * scales + bias)"
    problem_type = MatmulProblem
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
        self.warm_plans = WarmPlans()
        self.find_warm = self.warm_plans.get

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
        variant: str | None = None,
    ) -> torch.Tensor:
        """The product of a [..., M, K] and b [..., K, N], batch dimensions broadcast as in torch.matmul.

        bias        [N], added to each row
        activation  None, "relu", "gelu" or "silu", after the bias
        out_dtype   default: the operands' dtype; int32 for int8, bfloat16 for fp8
        scale_a/_b  float32 scalars, or one value a row of a and a column of b
        out         where to write the result
        variant     run exactly this one, or raise IllegalVariant with its reasons
        """
        if not _is_compiling():
            scope = current.get()
            if scale_a is None and scale_b is None and out is None:
                warm = self.warm(a, b, bias, activation, out_dtype, variant, scope)
                if warm is not None:
                    plan = warm.plan
                    result: torch.Tensor = (plan.launch if plan.proven else plan.first_launch)(
                        a, b, out_dtype=plan.out_dtype, bias=bias, scale_a=None, scale_b=None, out=None
                    )
                    if scope is not EMPTY:
                        observe(scope, plan.decision)
                    return result
            if plain(a, b) and (bias is None or plain(bias)) and not _needs_grad(a, b, bias):
                return self.forward(a, b, bias, activation, out_dtype, scale_a, scale_b, out, variant)
        return through_torch(a, b, bias, activation, out_dtype, scale_a, scale_b, out, variant)

    def warm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        out_dtype: torch.dtype | None,
        variant: str | None,
        scope: Scope,
    ) -> WarmPlan | None:
        """The decision of an eager product of two plain matrices without grad; None for all else."""
        try:
            key = (a.shape, b.shape, activation, out_dtype, variant, scope.key, _deterministic(), _grad_enabled())
            found: WarmPlan | None = self.find_warm(key if bias is None else (key, bias.shape))
            if (
                found is not None
                and (found.guard(a, b) if bias is None else found.guard(a, b, bias))
                and not (a.data_ptr() | b.data_ptr()) & ALIGNED
                and (bias is None or not bias.data_ptr() & ALIGNED)
                and not _function_modes()
                and (found.ieee is None or found.ieee is ieee_float32())
            ):
                return found
            if a.dim() != 2 or b.dim() != 2 or _needs_grad(a, b, bias):
                return None
        except (TypeError, AttributeError, RuntimeError):  # no tensors, no memory, unhashable: the checks name it
            return None
        tensors = (a, b) if bias is None else (a, b, bias)
        if not plain(*tensors):
            return None
        plan = self.plan_for(a, b, bias, activation, out_dtype, None, None, None, variant, scope)
        self.warm_plans.remember(key if bias is None else (key, bias.shape), plan, False, *tensors)
        return WarmPlan(never, plan, False, None)

    def forward(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        out_dtype: torch.dtype | None,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out: torch.Tensor | None,
        variant: str | None,
    ) -> torch.Tensor:
        """The product without autograd: views of two or three dimensions, then `launch`."""
        if a.dim() == 2 and b.dim() == 2:
            return self.launch(a, b, bias, activation, out_dtype, scale_a, scale_b, out, variant)
        a2, b2, shape = arguments.as_matrices(*arguments.check_operands(a, b))
        if out is None:
            return self.launch(a2, b2, bias, activation, out_dtype, scale_a, scale_b, None, variant).view(shape)
        if tuple(out.shape) != shape:
            raise InvalidArgument("out", f"shape {tuple(out.shape)}", f"shape {shape}")
        try:
            view = out.view(*((a2.shape[0],) if a2.dim() == 3 else ()), a2.shape[-2], b2.shape[-1])
        except RuntimeError:  # no view of `out` has so few dimensions
            return out.copy_(self.forward(a, b, bias, activation, out_dtype, scale_a, scale_b, None, variant))
        self.launch(a2, b2, bias, activation, out_dtype, scale_a, scale_b, view, variant)
        return out

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        out_dtype: torch.dtype | None,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out: torch.Tensor | None,
        variant: str | None,
    ) -> torch.Tensor:
        """Find or make the plan for these matrices and launch it."""
        scope = current.get()
        plan = self.plan_for(a, b, bias, activation, out_dtype, scale_a, scale_b, out, variant, scope)
        result: torch.Tensor = (plan.launch if plan.proven else plan.first_launch)(
            a, b, out_dtype=plan.out_dtype, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out
        )
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return result

    def plan_for(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        out_dtype: torch.dtype | None,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out: torch.Tensor | None,
        variant: str | None,
        scope: Scope,
    ) -> Plan:
        """The warm decision: a key of everything that can change the choice, and one lookup."""
        try:
            x, y = a.data_ptr(), b.data_ptr()
            dtype = a.dtype
            key = (
                a.shape,
                b.shape,
                a.stride(),
                b.stride(),
                dtype,
                b.dtype,
                a.device,
                b.device,
                (x & 15, y & 15) if (x | y) & 15 else 0,
                activation,
                out_dtype,
                None if bias is None else _identity(bias),
                None if scale_a is None and scale_b is None else (_identity(scale_a), _identity(scale_b)),
                None if out is None else _identity(out),
                variant,
                scope.key,
                _deterministic(),
                dtype is _FLOAT32 and ieee_float32(),
            )
            plan = self.lookup(key)
        except (TypeError, RuntimeError, AttributeError):  # no tensor, no memory, unhashable: the checks below name it
            key, plan = None, None
        if plan is None:
            problem, planned = self.problem_of(
                a,
                b,
                bias=bias,
                activation=activation,
                out_dtype=out_dtype,
                scale_a=scale_a,
                scale_b=scale_b,
                out=out,
                variant=variant,
            )
            plan = self.make_plan(key, problem, planned)
        return plan

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
        a, b = arguments.check_operands(a, b)
        if bias is not None:
            arguments.check_bias(bias, a, b)
        a, b = autocast(a, b)
        a, b, shape = arguments.as_matrices(a, b)
        result_dtype = arguments.check_out_dtype(out_dtype, a.dtype)
        if out is not None:
            arguments.check_out(out, (*a.shape[:-1], b.shape[-1]), shape, result_dtype, a.device)
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
            activation=arguments.check_activation(activation),
            scaling=arguments.check_scales(scale_a, scale_b, a, b),
            out=out is not None,
            ieee=a.dtype is torch.float32 and ieee_float32(),
            deterministic=_deterministic(),
            operands=operands,
        )
        return problem, with_variant(self.name, current.get(), variant)

    def derive(self, plan: Plan, problem: Problem) -> None:
        plan.out_dtype = getattr(torch, problem.out_dtype)  # type: ignore[attr-defined]

    def trivial(self, problem: Problem) -> Decision | None:
        assert isinstance(problem, MatmulProblem)
        if problem.m and problem.n and problem.k and problem.batch:
            return None
        source = "empty tensors: the op answers by itself"
        return Decision(problem, NO_KERNEL, {}, source, (Candidate(NO_KERNEL, (), 0, source),))

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
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """The oracle: the product by its definition, in `dtype`, differentiable."""
        a, b = arguments.check_operands(a, b)
        result = torch.matmul(a.to(dtype), b.to(dtype))
        if arguments.check_scales(scale_a, scale_b, a, b):
            assert scale_a is not None and scale_b is not None
            result = result * scale_a.to(dtype).reshape(-1, 1) * scale_b.to(dtype)
        if bias is not None:
            arguments.check_bias(bias, a, b)
            result = result + bias.to(dtype)
        return activate(result, arguments.check_activation(activation))

    def flops(self, problem: MatmulProblem) -> float:
        """Floating-point operations of the product."""
        return 2.0 * problem.batch * problem.m * problem.n * problem.k


def _identity(tensor: torch.Tensor | None) -> Any:
    """What of a secondary operand can change the choice or break a bound launch."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


def _needs_grad(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return _grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad))


matmul = Matmul()
define(matmul.launch, matmul)
