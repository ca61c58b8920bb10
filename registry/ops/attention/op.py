"""Attention: `registry.attention(q, k, v)` and its backward, each with its own variants and tables.

The op fixes the meaning for all variants: causal is aligned bottom-right (key j is seen by query i where
j <= i + len(k) - len(q)), LSE is natural-log float32 [B, H, S], a row that sees no key gives 0 and -inf, inputs are
never modified, strides are taken as they are. q heads may be a multiple of k/v heads (GQA, MQA).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.decision import Decision
from registry.dispatch.plan import observe
from registry.dispatch.scope import EMPTY, Scope, current
from registry.ops.attention import arguments, oracle, ragged
from registry.ops.attention.arguments import BHSD
from registry.ops.attention.autograd import eager_with_grad
from registry.ops.attention.backward import AttentionBackward, attention_backward
from registry.ops.attention.common import AttentionOp, fields_of
from registry.ops.attention.outputs import in_the_order_of, new_out
from registry.ops.attention.problem import AttentionProblem
from registry.ops.attention.torch_op import Settings, define, through_torch
from registry.ops.op import with_variant
from registry.ops.parts import masks
from registry.ops.parts.masks import LEAST_SCALE, MOST_SCALE, is_window
from registry.ops.tensors import autocast

_is_compiling = torch.compiler.is_dynamo_compiling


class Attention(AttentionOp):
    """softmax(scale * q k^T) v by the fastest legal kernel. `.explain(...)` says which one and why."""

    name = "attention"
    summary = "softmax(scale * q k^T) v"
    problem_type = AttentionProblem
    tensors = ("q", "k", "v")
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        **AttentionOp.fixed_arguments,
        "return_lse": ("lse", "lse"),
    }
    call_arguments: ClassVar[Mapping[str, str]] = {"scale": ""}

    def default(self, problem: Problem) -> float:
        return 1.0 / math.sqrt(problem.head_dim)  # type: ignore[attr-defined]

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
        key_lengths: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        variant: str | None = None,
    ) -> Any:
        """Attention of q [B, H, S, D] over k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv].

        causal      key j is seen by query i where j <= i + Sk - S (aligned bottom-right)
        scale       default 1/sqrt(D)
        window      None, a number of keys seen to either side, or (left, right) with None for unlimited (as is 2**30)
        softcap     scores become softcap * tanh(score / softcap); 0.0 is off
        layout      "bhsd", or "bshd" for tensors (and an output) of [B, S, H, D]
        return_lse  also return the natural-log LSE, float32 [B, H, S]
        key_lengths integers [B] on q's device: how many of the Sk keys there are; causal is aligned to the last one.
                    With this or `sinks` registry.attention_varlen answers, and `variant` names one of its variants
        sinks       [H]: a logit a head in the sum of the softmax and in the LSE
        variant     run exactly this one, or raise IllegalVariant with its reasons
        """
        if layout is not BHSD and arguments.check_layout(layout) != BHSD:
            q, k, v = arguments.from_bshd(q, k, v)
        if key_lengths is not None or sinks is not None:
            how = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "variant": variant}
            how |= {"return_lse": return_lse, "key_lengths": key_lengths, "sinks": sinks}
            return ragged.attend(q, k, v, layout=layout, **how)
        if scale is not None and (type(scale) is not float or not LEAST_SCALE <= scale <= MOST_SCALE):
            q, scale = masks.positive_scale(q, scale)
        # A plan is found by settings that are equal, and True == 1 == 1.0: so types are looked at on every call.
        if causal is not False and causal is not True:
            masks.check_flag("causal", causal)
        if return_lse is not False and return_lse is not True:
            masks.check_flag("return_lse", return_lse)
        if type(softcap) is not float:
            softcap = masks.check_softcap(softcap)
        if window is not None and not is_window(window):
            window = masks.check_window(window)
        settings = (causal, window, softcap, return_lse, variant)
        plan = None if _is_compiling() else self.find_plan(settings, q, k, v)
        if plan is None:
            out, lse = through_torch(settings, scale, q, k, v)
        elif plan.with_grad:
            out, lse = eager_with_grad(plan, scale, return_lse, attention_backward.of, q, k, v)
        else:
            out, lse = plan.launch(q, k, v, scale=plan.default if scale is None else scale)
            scope = current.get()
            if scope is not EMPTY:
                observe(scope, plan.decision)
        if layout is not BHSD and layout != BHSD:
            out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def forward(self, settings: Settings, scale: float, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is beneath the torch op: find or make the plan and launch it. Knows nothing of autograd."""
        plan = self.plans.by_facts(settings, *qkv)
        found: tuple[torch.Tensor, torch.Tensor | None] = plan.launch(*qkv, scale=scale)
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """As every op's. One with key_lengths or sinks is explained as the call of attention_varlen that it becomes."""
        if kwargs.get("key_lengths") is None and kwargs.get("sinks") is None:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("key_lengths", "sinks")}
            return super().explain(*args, **kwargs)
        found: Decision = ragged.explain(*args, **kwargs)
        return found

    def asked(self, settings: Settings, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        causal, window, softcap, lse, variant = settings
        mask = {"causal": causal, "window": window, "softcap": softcap}
        return self.problem_of(*tensors, **mask, return_lse=lse or with_grad, variant=variant)

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
        if arguments.check_layout(layout) != BHSD:
            q, k, v = arguments.from_bshd(q, k, v)
        if scale is not None:
            masks.check_scale(scale)
        masks.check_flag("return_lse", return_lse)
        q, k, v = autocast(q, k, v)
        fields = fields_of(q, k, v, causal, window, softcap, return_lse, target)
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
        key_lengths: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Any:
        """The oracle: attention by its definition, in `dtype`, differentiable."""
        if arguments.check_layout(layout) != BHSD:
            q, k, v = arguments.from_bshd(q, k, v)
        if key_lengths is not None or sinks is not None:
            how = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "dtype": dtype}
            how |= {"return_lse": return_lse, "key_lengths": key_lengths, "sinks": sinks}
            return ragged.attend(q, k, v, layout=layout, by=ragged.oracle(), **how)
        q, k, v = arguments.check_qkv(q, k, v)
        scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        masks.check_scale(scale)
        softcap = masks.check_softcap(softcap)
        masks.check_flag("causal", causal)
        causal, window = masks.canonical_window(masks.check_window(window), causal)
        out, lse = oracle.reference(q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, dtype=dtype)
        out = in_the_order_of(out, q)
        out = out.transpose(1, 2) if layout != BHSD else out
        return (out, lse) if return_lse else out


attention = Attention()
_beneath = functools.partial(attention_backward.gradients, beneath=True)
define(attention.forward, _beneath, attention.graph_launch, attention.plans.holding)
