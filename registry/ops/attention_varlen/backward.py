"""The gradients of attention over packed sequences: an op with variants and tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.plan import observe
from registry.dispatch.scope import EMPTY, Scope, current, entered
from registry.ops.attention_varlen import lengths, oracle
from registry.ops.attention_varlen.arguments import OPTIONAL, check_maximum, check_operands
from registry.ops.attention_varlen.common import MASKS, VarlenOp, fields_of
from registry.ops.attention_varlen.derivatives import no_second_derivative
from registry.ops.attention_varlen.problem import VarlenBackwardProblem, VarlenProblem
from registry.ops.attention_varlen.torch_op import gradients_through_torch
from registry.ops.op import with_variant
from registry.ops.parts import masks
from registry.ops.parts.derivatives import gradients_by_name, gradients_of_oracle, last_derivative, of_seen_rows
from registry.ops.tensors import check_dims, check_fits, check_tensor, operand, plain, refuse_tangents

Gradients = tuple[torch.Tensor, ...]
"""(dq, dk, dv), and the gradient of the sinks where there are some."""
Settings = tuple[tuple[bool, ...], bool, Any, float, int, int, str | None]
"""Which of sinks, slopes and gradient of the LSE there are; causal, window, softcap, the maxima, variant."""
_LENT = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "grad_lse")
"""The tensors of a call behind grad_out, q, k, v, out and lse."""


class AttentionVarlenBackward(VarlenOp):
    """Gradients of attention_varlen for packed q, k and v. Called by autograd, and by name in `explain`."""

    name = "attention_varlen_backward"
    summary = "gradients of attention_varlen with respect to packed q, k and v, and the sinks"
    problem_type = VarlenBackwardProblem
    tensors = ("grad_out", "q", "k", "v", "out", "lse")
    first_operand: ClassVar[int] = 1
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        **MASKS,
        "deterministic": ("deterministic", "deterministic"),
    }
    call_arguments: ClassVar[Mapping[str, str]] = {**VarlenOp.call_arguments, "grad_lse": "grad_lse"}

    def __call__(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float | None = None,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        grad_lse: torch.Tensor | None = None,
        variant: str | None = None,
    ) -> Gradients:
        """(dq, dk, dv[, dsinks]) from what the forward saved. Arguments are those of the forward."""
        for name, tensor in (("grad_out", grad_out), ("q", q), ("out", out)):
            check_dims(name, tensor, 3, "[T, Hq, D]")
        for name, tensor in (("k", k), ("v", v), ("lse", lse)):
            check_tensor(name, tensor)
        scale = q.shape[2] ** -0.5 if scale is None else scale
        negative = False
        if type(scale) is not float or not masks.LEAST_SCALE <= scale <= masks.MOST_SCALE:
            (q, positive), negative = masks.positive_scale(q, scale), bool(scale < 0)
            scale = positive
        masks.check_flag("causal", causal)
        window, softcap = masks.check_window(window), masks.check_softcap(softcap)
        how = (causal, window, softcap, max_seqlen_q, max_seqlen_k, variant)
        tensors = (grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, grad_lse)
        found: Gradients
        found = gradients_by_name(self.in_a_row, _through_torch, _LastDerivative, variant, how, scale, *tensors)
        return (-found[0], *found[1:]) if negative else found

    def gradients(
        self,
        how: tuple[Any, ...],
        scale: float,
        grad_out: torch.Tensor,
        *saved: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        beneath: bool = False,
    ) -> Gradients:
        """The same for autograd, whose settings and scale the forward has checked; and for the torch op, `beneath`
        which nobody is left who wants to see the call."""
        if grad_out.stride(-1) != 1:
            # Autograd makes such gradients (an expanded scalar after .sum()); few kernels read them, all read a copy.
            grad_out = grad_out.contiguous()
        present = (sinks is not None, alibi_slopes is not None, grad_lse is not None)
        tensors = (grad_out, *saved)
        grad_lse = of_seen_rows(grad_lse, tensors[5])
        more = [t for t in (sinks, alibi_slopes, grad_lse) if t is not None]
        plan = self.find_plan((present, *how), *tensors, cu_seqlens_q, cu_seqlens_k, *more)
        if plan is None:
            if not beneath:
                with entered(with_variant(self.name, current.get(), how[-1])):
                    return _through_torch(
                        how, scale, *tensors, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, grad_lse
                    )
            plan = self.plans.by_facts((present, *how), *tensors, cu_seqlens_q, cu_seqlens_k, *more)
        q, k = saved[:2]
        lengths.refuse_lies(q, k, cu_seqlens_q, _given(cu_seqlens_k, None, None), *how[3:5])
        found: Gradients = plan.launch(
            *tensors,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            grad_lse=grad_lse,
            scale=scale,
        )
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found if sinks is not None else found[:3]

    def in_a_row(self, how: tuple[Any, ...], scale: float, *given: Any, beneath: bool = False) -> Gradients:
        """The same of all tensors in the order of the torch op."""
        lent = dict(zip(_LENT, given[6:], strict=True))
        return self.gradients(how, scale, *given[:6], **lent, beneath=beneath)

    def of(self, problem: VarlenProblem, scale: float, *tensors: torch.Tensor, **given: Any) -> Gradients:
        """The gradients of a forward that had this Problem; `tensors` are grad_out, q, k, v, out, lse."""
        asked = problem.causal, problem.window, problem.softcap
        return self.gradients((*asked, problem.max_seqlen_q, problem.max_seqlen_k, None), scale, *tensors, **given)

    def eager(self, *tensors: Any) -> bool:
        refuse_tangents("the gradients of attention_varlen", *tensors)
        return plain(*tensors)

    def asked(self, settings: Settings, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        present, *how = settings
        names = ("causal", "window", "softcap", "max_seqlen_q", "max_seqlen_k", "variant")
        call: dict[str, Any] = dict(zip(names, how, strict=True))
        more = [name for name, there in zip(("sinks", "alibi_slopes", "grad_lse"), present, strict=True) if there]
        call |= zip(("cu_seqlens_q", "cu_seqlens_k", *more), tensors[6:], strict=True)
        return self.problem_of(*tensors[:6], **call)

    def problem_of(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        grad_lse: torch.Tensor | None = None,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[VarlenBackwardProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        if scale is not None:
            masks.check_scale(scale)
        fields = fields_of(
            q,
            k,
            v,
            cu_seqlens_q,
            _given(cu_seqlens_k, sinks, alibi_slopes),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            softcap=softcap,
            lse=True,
            target=target,
        )
        _check_saved(grad_out, q, v, out, lse, grad_lse)
        extra = tuple(operand(name, t) for name, t in (("grad_out", grad_out), ("out", out)))
        fields["operands"] = (*fields["operands"], *extra)
        problem = VarlenBackwardProblem(**fields, grad_lse=grad_lse is not None)
        return problem, with_variant(self.name, current.get(), variant)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        def launch(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, sinks: Any, **given: Any) -> Gradients:
            found = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
            if sinks is None:
                return found
            # Without a key the LSE is the sink itself.
            grad_lse = given["grad_lse"]
            if grad_lse is None:
                return *found, torch.zeros_like(sinks)
            exact = torch.promote_types(grad_lse.dtype, sinks.dtype)
            return *found, grad_lse.sum(1, dtype=exact).to(sinks.dtype)

        return launch

    def reference(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        grad_lse: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
    ) -> Gradients:
        """(dq, dk, dv[, dsinks]) by autograd through the oracle, in `dtype`, which needs no maxima."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, sinks) if t is not None]
        given = _given(cu_seqlens_k, leaves[3] if sinks is not None else None, alibi_slopes)
        causal, window = masks.canonical_window(masks.check_window(window), causal)
        scale = q.shape[2] ** -0.5 if scale is None else scale
        how = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "dtype": dtype}
        with torch.enable_grad():
            found = oracle.reference(leaves[0], leaves[1], leaves[2], cu_seqlens_q, given, **how)
            return gradients_of_oracle(found, leaves, grad_out, grad_lse)


def _given(cu_seqlens_k: Any, sinks: Any, alibi_slopes: Any) -> dict[str, Any]:
    return dict.fromkeys(OPTIONAL) | {"cu_seqlens_k": cu_seqlens_k, "sinks": sinks, "alibi_slopes": alibi_slopes}


def _check_saved(grad_out: Any, q: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, grad_lse: Any) -> None:
    """What a forward of these q and v saved, and the gradients of what it gave."""
    rows, heads = q.shape[:2]
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check_fits(name, tensor, (rows, heads, v.shape[2]), q.dtype, q.device)
    for name, sums in (("lse", lse), ("grad_lse", grad_lse)):
        if sums is not None or name == "lse":
            check_fits(name, sums, (heads, rows), torch.float32, q.device)


def _through_torch(how: tuple[Any, ...], scale: float, *given: Any) -> Gradients:
    """By the torch op, which compilers, modes, subclasses and functorch can see. Fake kernels check no argument."""
    grad_out, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, grad_lse = given
    geometry = check_operands(q, k, v, cu_seqlens_q, _given(cu_seqlens_k, sinks, alibi_slopes))
    check_maximum("max_seqlen_q", how[3], q.shape[0])
    check_maximum("max_seqlen_k", how[4], geometry.capacity)
    _check_saved(grad_out, q, v, out, lse, grad_lse)
    found = gradients_through_torch(how, scale, *given)
    return found if sinks is not None else found[:3]


attention_varlen_backward = AttentionVarlenBackward()
_LastDerivative = last_derivative(lambda *call: attention_varlen_backward.in_a_row(*call), no_second_derivative)
