"""Attention: `registry.attention(q, k, v)` and its backward, each with its own variants and tables.

The op fixes the meaning for all variants: causal is aligned bottom-right (key j is seen by query i where
j <= i + len(k) - len(q)), LSE is natural-log float32 [B, H, S], a row that sees no key gives 0 and -inf, inputs are
never modified, strides are taken as they are. q heads may be a multiple of k/v heads (GQA, MQA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.decision import NO_KERNEL, Candidate, Decision
from registry.dispatch.plan import Plan, observe
from registry.dispatch.scope import EMPTY, Scope, current
from registry.ops.attention import arguments, costs, oracle
from registry.ops.attention.arguments import Window
from registry.ops.attention.autograd import eager_with_grad
from registry.ops.attention.outputs import new_out
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem, memory_order
from registry.ops.attention.torch_op import define, through_torch
from registry.ops.fastpath import ALIGNED, WarmPlan, WarmPlans, never
from registry.ops.op import Op, with_variant
from registry.ops.tensors import autocast, dtype_name, ieee_float32, operand, plain

_is_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_deterministic = torch.are_deterministic_algorithms_enabled
_grad_enabled = torch.is_grad_enabled
_FLOAT32 = torch.float32


class _AttentionOp(Op):
    """What the forward and the backward share: the features that earn arguments, and the empty answers."""

    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        "causal": ("causal", "causal"),
        "window": ("window", "window"),
        "softcap": ("softcap", "softcap"),
    }

    def trivial(self, problem: Problem) -> Decision | None:
        assert isinstance(problem, AttentionProblem)
        sizes = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, problem.head_dim_v)
        if all(sizes):
            return None
        source = "empty tensors: the op answers by itself"
        return Decision(problem, NO_KERNEL, {}, source, (Candidate(NO_KERNEL, (), 0, source),))


class AttentionBackward(_AttentionOp):
    """Gradients of attention, with variants and tables of their own. Called by autograd, and by name in `explain`."""

    name = "attention_backward"
    summary = "gradients of attention with respect to q, k and v"
    problem_type = AttentionBackwardProblem
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        **_AttentionOp.fixed_arguments,
        "deterministic": ("deterministic", "deterministic"),
    }
    call_arguments: ClassVar[Mapping[str, str]] = {"scale": "", "grad_lse": "grad_lse"}

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool = False,
        scale: float,
        window: Window | None = None,
        softcap: float = 0.0,
        grad_lse: torch.Tensor | None = None,
        variant: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) from what the forward saved. Arguments are those of the forward, checked there."""
        if grad_out.stride(-1) != 1:
            # Autograd makes such gradients (an expanded scalar after .sum()); few kernels read them, all read a copy.
            grad_out = grad_out.contiguous()
        scope = current.get()
        tensors = (q, k, v, grad_out, out, lse)
        address = 0
        for tensor in tensors:
            address |= tensor.data_ptr()
        key = (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            grad_out.stride(),
            out.stride(),
            q.dtype,
            q.device,
            tuple(t.data_ptr() & 15 for t in tensors) if address & 15 else 0,
            causal,
            window,
            softcap,
            grad_lse is None,
            variant,
            scope.key,
            _deterministic(),
            arguments.asks_ieee(q.dtype),
        )
        plan = self.memo.get(key)
        if plan is None:
            problem, planned = self.problem_of(
                grad_out,
                q,
                k,
                v,
                out,
                lse,
                causal=causal,
                window=window,
                softcap=softcap,
                grad_lse=grad_lse,
                variant=variant,
            )
            plan = self.make_plan(key, problem, planned)
        launch = plan.launch if plan.proven else plan.first_launch
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = launch(
            grad_out, q, k, v, out, lse, scale=scale, grad_lse=grad_lse
        )
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found

    def problem_of(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        grad_lse: torch.Tensor | None = None,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[AttentionBackwardProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        fields = _fields(q, k, v, causal, window, softcap, True, target)
        extra = tuple(operand(name, t) for name, t in (("grad_out", grad_out), ("out", out)))
        fields["operands"] = (*fields["operands"], *extra)
        fields["layout"] = memory_order(fields["operands"])
        problem = AttentionBackwardProblem(**fields, grad_lse=grad_lse is not None)
        return problem, with_variant(self.name, current.get(), variant)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        return lambda grad_out, q, k, v, out, lse, **_: (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))

    def reference(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Any = None,
        softcap: float = 0.0,
        grad_lse: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv) by autograd through the oracle, in `dtype`."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out, lse = attention.reference(
                *leaves, causal=causal, scale=scale, window=window, softcap=softcap, return_lse=True, dtype=dtype
            )
            results, grads = [out], [grad_out.to(dtype)]
            if grad_lse is not None:
                results.append(torch.where(torch.isfinite(lse), lse, 0.0))
                grads.append(grad_lse.to(dtype))
            return torch.autograd.grad(results, leaves, grads)

    def flops(self, problem: AttentionProblem) -> float:
        return costs.flops(problem)


class Attention(_AttentionOp):
    """softmax(scale * q k^T) v by the fastest legal kernel. `.explain(...)` says which one and why."""

    name = "attention"
    summary = "softmax(scale * q k^T) v"
    problem_type = AttentionProblem
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        **_AttentionOp.fixed_arguments,
        "return_lse": ("lse", "lse"),
    }
    call_arguments: ClassVar[Mapping[str, str]] = {"scale": ""}

    def __init__(self) -> None:
        super().__init__()
        self.warm_plans = WarmPlans()
        self.find_warm = self.warm_plans.get

    def derive(self, plan: Plan, problem: Problem) -> None:
        plan.scale = 1.0 / math.sqrt(problem.head_dim)  # type: ignore[attr-defined]

    @property
    def backward(self) -> AttentionBackward:
        """The op of the gradients: `registry.attention.backward.explain(...)`."""
        return attention_backward

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Any = None,
        softcap: float = 0.0,
        layout: str = "bhsd",
        return_lse: bool = False,
        variant: str | None = None,
    ) -> Any:
        """Attention of q [B, H, S, D] over k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv].

        causal      key j is seen by query i where j <= i + Sk - S (aligned bottom-right)
        scale       default 1/sqrt(D)
        window      None, a number of keys seen to either side, or (left, right) with None for unlimited
        softcap     scores become softcap * tanh(score / softcap); 0.0 is off
        layout      "bhsd", or "bshd" for tensors (and an output) of [B, S, H, D]
        return_lse  also return the natural-log LSE, float32 [B, H, S]
        variant     run exactly this one, or raise IllegalVariant with its reasons
        """
        if layout != "bhsd":
            arguments.check_layout(layout)
            q, k, v = (arguments.check_4d(n, t).transpose(1, 2) for n, t in (("q", q), ("k", k), ("v", v)))
        if scale is not None and (type(scale) is not float or not 0.0 < scale < math.inf):
            q, scale = arguments.positive_scale(q, scale)
        if _is_compiling():
            warm: WarmPlan | None = None
        else:
            scope = current.get()
            warm = self.warm(q, k, v, causal, window, softcap, return_lse, variant, scope)
        if warm is not None and not warm.grad:
            plan = warm.plan
            out, lse = (plan.launch if plan.proven else plan.first_launch)(
                q, k, v, scale=plan.scale if scale is None else scale
            )
            if scope is not EMPTY:
                observe(scope, plan.decision)
        elif warm is not None:
            masks = causal, window, softcap
            out, lse = eager_with_grad(q, k, v, warm.plan, scale, masks, return_lse, scope, attention_backward)
        else:
            out, lse = through_torch(q, k, v, causal, scale, window, softcap, return_lse, variant)
        if layout != "bhsd":
            out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def warm(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: Any,
        softcap: float,
        lse: bool,
        variant: str | None,
        scope: Scope,
    ) -> WarmPlan | None:
        """The decision of an eager call on plain tensors; None where the torch op must be taken."""
        try:
            key: Any = (q.shape, causal, window, softcap, lse, variant, scope.key, _deterministic(), _grad_enabled())
            found: WarmPlan | None = self.find_warm(key)
            if found is not None and not found.guard(q, k, v):  # such queries over other keys, or in another layout
                key = (key, k.shape, q.stride(), k.stride())
                found = self.find_warm(key)
                found = found if found is not None and found.guard(q, k, v) else None
            if (
                found is not None
                and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNED
                and not _function_modes()
                and (found.ieee is None or found.ieee is ieee_float32())
            ):
                return found
        except (TypeError, AttributeError, RuntimeError):  # no tensors, no memory, unhashable: the checks name it
            key = None
        if not plain(q, k, v):
            return None
        grad = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        plan = self.plan_for(q, k, v, causal, window, softcap, lse or grad, variant, scope)
        if key is not None:
            self.warm_plans.remember(key, plan, grad, q, k, v)
        return WarmPlan(never, plan, grad, None)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        window: Any,
        softcap: float,
        lse: bool,
        variant: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Find or make the plan of this call and launch it. Knows nothing of autograd."""
        scope = current.get()
        plan = self.plan_for(q, k, v, causal, window, softcap, lse, variant, scope)
        if scale is None:
            scale = plan.scale
        found: tuple[torch.Tensor, torch.Tensor | None] = (plan.launch if plan.proven else plan.first_launch)(
            q, k, v, scale=scale
        )
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found

    def plan_for(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: Any,
        softcap: float,
        lse: bool,
        variant: str | None,
        scope: Scope,
    ) -> Plan:
        """The decision by a key of everything that can change the choice, and one lookup."""
        try:
            a, b, c, dtype = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.dtype
            key = (
                q.shape,
                k.shape,
                v.shape,
                q.stride(),
                k.stride(),
                v.stride(),
                q.device,
                k.device,
                v.device,
                dtype if k.dtype is dtype and v.dtype is dtype else None,
                (a & 15, b & 15, c & 15) if (a | b | c) & 15 else 0,
                causal,
                window,
                softcap,
                lse,
                variant,
                scope.key,
                _deterministic(),
                dtype is _FLOAT32 and ieee_float32(),
            )
            plan = self.lookup(key)
        except (TypeError, RuntimeError):  # unhashable or without memory: the checks name it, or spell it hashably
            arguments.check_qkv(q, k, v)
            arguments.check_softcap(softcap)
            window = arguments.check_window(window)
            return self.plan_for(q, k, v, causal, window, softcap, lse, variant, scope)
        if plan is None:
            problem, planned = self.problem_of(
                q, k, v, causal=causal, window=window, softcap=softcap, return_lse=lse, variant=variant
            )
            plan = self.make_plan(key, problem, planned)
        return plan

    def problem_of(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Any = None,
        softcap: float = 0.0,
        layout: str = "bhsd",
        return_lse: bool = False,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[AttentionProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        if arguments.check_layout(layout) != "bhsd":
            q, k, v = (arguments.check_4d(n, t).transpose(1, 2) for n, t in (("q", q), ("k", k), ("v", v)))
        if scale is not None:
            arguments.check_scale(scale)
        fields = _fields(q, k, v, causal, window, softcap, return_lse, target)
        return AttentionProblem(**fields), with_variant(self.name, current.get(), variant)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
            lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32) if problem.lse else None  # type: ignore[attr-defined]
            return new_out(q, v).zero_(), lse

        return launch

    def reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Any = None,
        softcap: float = 0.0,
        layout: str = "bhsd",
        return_lse: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> Any:
        """The oracle: attention by its definition, in `dtype`, differentiable."""
        if arguments.check_layout(layout) != "bhsd":
            q, k, v = (arguments.check_4d(n, t).transpose(1, 2) for n, t in (("q", q), ("k", k), ("v", v)))
        q, k, v = arguments.check_qkv(q, k, v)
        scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        arguments.check_scale(scale)
        softcap = arguments.check_softcap(softcap)
        causal, window = arguments.canonical_window(arguments.check_window(window), bool(causal))
        out, lse = oracle.reference(q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, dtype=dtype)
        out = out.transpose(1, 2) if layout != "bhsd" else out
        return (out, lse) if return_lse else out

    def flops(self, problem: AttentionProblem) -> float:
        return costs.flops(problem)


def _fields(
    q: Any, k: Any, v: Any, causal: Any, window: Any, softcap: Any, lse: bool, target: Target | None
) -> dict[str, Any]:
    """Check the arguments of a call and turn them into the fields of its Problem."""
    q, k, v = arguments.check_qkv(q, k, v)
    arguments.check_flag("causal", causal)
    q, k, v = autocast(q, k, v)
    causal, window = arguments.canonical_window(arguments.check_window(window), causal)
    operands = (operand("q", q), operand("k", k), operand("v", v))
    return {
        "target": target if target is not None else Target.of(q.device),
        "dtype": dtype_name(q.dtype),
        "batch": q.shape[0],
        "heads_q": q.shape[1],
        "heads_kv": k.shape[1],
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "layout": memory_order(operands),
        "causal": causal,
        "window": window,
        "softcap": arguments.check_softcap(softcap),
        "lse": lse,
        "ieee": arguments.asks_ieee(q.dtype),
        "deterministic": _deterministic(),
        "operands": operands,
    }


attention_backward = AttentionBackward()
attention = Attention()
define(attention.forward, attention_backward)
