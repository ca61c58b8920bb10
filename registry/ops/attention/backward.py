"""The gradients of attention: an op with variants and tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.plan import observe
from registry.dispatch.scope import EMPTY, Scope, current, entered
from registry.ops.attention import arguments, oracle
from registry.ops.attention.common import AttentionOp, fields_of
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem, memory_order
from registry.ops.attention.torch_op import Gradients, Settings, gradients_through_torch, no_second_derivative
from registry.ops.op import with_variant
from registry.ops.parts import masks
from registry.ops.parts.derivatives import gradients_by_name, gradients_of_oracle, last_derivative, of_seen_rows
from registry.ops.parts.masks import LEAST_SCALE, MOST_SCALE, Window
from registry.ops.tensors import check_fits, check_tensor, operand, plain, refuse_tangents

BackwardSettings = Settings
"""causal, window, softcap, whether there is a gradient of the LSE, variant."""


class AttentionBackward(AttentionOp):
    """Gradients of attention, with variants and tables of their own. Called by autograd, and by name in `explain`."""

    name = "attention_backward"
    summary = "gradients of attention with respect to q, k and v"
    problem_type = AttentionBackwardProblem
    tensors = ("grad_out", "q", "k", "v", "out", "lse")
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        **AttentionOp.fixed_arguments,
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
        scale: float | None = None,
        window: Window | None = None,
        softcap: float = 0.0,
        grad_lse: torch.Tensor | None = None,
        variant: str | None = None,
    ) -> Gradients:
        """(dq, dk, dv) from what the forward saved; all else as the forward was given it."""
        # A plan knows the shapes and dtypes of tensors. What is none, or has no such dimensions, is told here.
        for name, tensor in (("grad_out", grad_out), ("q", q), ("k", k), ("v", v), ("out", out)):
            arguments.check_4d(name, tensor)
        for name, sums in (("lse", lse), ("grad_lse", grad_lse)):
            if sums is not None or name == "lse":
                check_tensor(name, sums)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        negative = False
        if type(scale) is not float or not LEAST_SCALE <= scale <= MOST_SCALE:
            (q, positive), negative = masks.positive_scale(q, scale), bool(scale < 0)
            scale = positive
        masks.check_flag("causal", causal)
        window, softcap = masks.check_window(window), masks.check_softcap(softcap)
        settings = (causal, window, softcap, grad_lse is not None, variant)
        tensors = (grad_out, q, k, v, out, lse, grad_lse)
        found: Gradients
        found = gradients_by_name(self.gradients, _through_torch, _LastDerivative, variant, settings, scale, *tensors)
        return (-found[0], *found[1:]) if negative else found

    def of(self, problem: AttentionProblem, scale: float, *tensors: torch.Tensor | None) -> Gradients:
        """(dq, dk, dv) of a forward that had this Problem; `tensors` are grad_out, q, k, v, out, lse, grad_lse."""
        mask = problem.causal, problem.window, problem.softcap
        return self.gradients((*mask, tensors[-1] is not None, None), scale, *tensors)

    def gradients(
        self, settings: BackwardSettings, scale: float, grad_out: Any, *saved: Any, beneath: bool = False
    ) -> Gradients:
        """The same for autograd, whose settings and scale the forward has checked; and for the torch op, `beneath`
        which nobody is left who wants to see the call. `saved` ends with grad_lse."""
        if grad_out.stride(-1) != 1:
            # Autograd makes such gradients (an expanded scalar after .sum()); few kernels read them, all read a copy.
            grad_out = grad_out.contiguous()
        *tensors, grad_lse = grad_out, *saved
        causal, window, *_ = settings
        if grad_lse is not None and (causal or window is not None):
            grad_lse = of_seen_rows(grad_lse, tensors[5])
        plan = self.find_plan(settings, *tensors) if grad_lse is None else self.find_plan(settings, *tensors, grad_lse)
        if plan is None:
            if not beneath:
                with entered(with_variant(self.name, current.get(), settings[-1])):
                    return _through_torch(settings, scale, *tensors, grad_lse)
            plan = self.plans.by_facts(settings, *tensors, *([] if grad_lse is None else [grad_lse]))
        found: Gradients = plan.launch(*tensors, scale=scale, grad_lse=grad_lse)
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found

    def eager(self, *tensors: Any) -> bool:
        refuse_tangents("the gradients of attention", *tensors)
        return plain(*tensors)

    def asked(self, settings: BackwardSettings, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        causal, window, softcap, _, variant = settings
        grad_lse = tensors[6] if len(tensors) > 6 else None
        mask = {"causal": causal, "window": window, "softcap": softcap}
        return self.problem_of(*tensors[:6], **mask, grad_lse=grad_lse, variant=variant)

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
        if scale is not None:
            masks.check_scale(scale)
        fields = fields_of(q, k, v, causal, window, softcap, True, target)
        _check_saved(grad_out, q, v, out, lse, grad_lse)
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
        leaves = [t.detach().to(dtype).requires_grad_() for t in arguments.check_qkv(q, k, v)]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        masks.check_scale(scale)
        softcap = masks.check_softcap(softcap)
        masks.check_flag("causal", causal)
        causal, window = masks.canonical_window(masks.check_window(window), causal)
        with torch.enable_grad():
            found = oracle.reference(*leaves, causal=causal, scale=scale, window=window, softcap=softcap, dtype=dtype)
            return gradients_of_oracle(found, leaves, grad_out, grad_lse)


def _check_saved(grad_out: Any, q: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, grad_lse: Any) -> None:
    """What a forward of these q and v saved, and the gradients of what it gave."""
    rows = tuple(q.shape[:3])
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check_fits(name, tensor, (*rows, v.shape[3]), q.dtype, q.device)
    for name, sums in (("lse", lse), ("grad_lse", grad_lse)):
        if sums is not None or name == "lse":
            check_fits(name, sums, rows, torch.float32, q.device)


def _through_torch(settings: BackwardSettings, scale: float, *tensors: Any) -> Gradients:
    """By the torch op, which compilers, modes, subclasses and functorch can see. Fake kernels check no argument."""
    grad_out, q, k, v, out, lse, grad_lse = tensors
    arguments.check_qkv(q, k, v)
    _check_saved(grad_out, q, v, out, lse, grad_lse)
    return gradients_through_torch(settings, scale, *tensors)


attention_backward = AttentionBackward()
_LastDerivative = last_derivative(lambda *call: attention_backward.gradients(*call), no_second_derivative)
