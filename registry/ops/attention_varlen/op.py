"""Attention over sequences of differing lengths: training on packed batches, prefill and decoding from caches.

The op fixes the meaning for all variants. Sequence b has the queries q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and as
many keys as cu_seqlens_k or seqused_k says; causal is aligned bottom-right for each: key j is seen by its query i where
j <= i + keys - queries. A sink is one more logit a head in the softmax's sum, and in the LSE. A query without a key
gives 0, and the sink (or -inf) as its LSE. ALiBi takes slope * |i + keys - queries - j| off a score, after the softcap.
Lengths are device memory that the host never waits for (lengths.py); nothing past a sequence's keys is read into a
result, whatever a page or a cache holds there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.plan import observe
from registry.dispatch.scope import EMPTY, Scope, current
from registry.ops.attention_varlen import arguments, lengths, oracle
from registry.ops.attention_varlen.arguments import coarse
from registry.ops.attention_varlen.autograd import eager_with_grad
from registry.ops.attention_varlen.backward import AttentionVarlenBackward, attention_varlen_backward
from registry.ops.attention_varlen.common import MASKS, SCHEDULED, Given, VarlenOp, fields_of, key_of, named, step_of
from registry.ops.attention_varlen.outputs import new_lse, new_out
from registry.ops.attention_varlen.problem import VarlenProblem
from registry.ops.attention_varlen.schedule import LENGTHS, Schedule, check_schedule, checked
from registry.ops.attention_varlen.torch_op import HOW, How, define, through_torch
from registry.ops.op import with_variant
from registry.ops.parts import masks
from registry.ops.parts.masks import LEAST_SCALE, MOST_SCALE, is_window
from registry.ops.parts.products import refuse_grad
from registry.ops.tensors import is_virtual, written

_is_compiling = torch.compiler.is_dynamo_compiling


class AttentionVarlen(VarlenOp):
    """softmax(scale * q k^T) v, sequence by sequence, by the fastest legal kernel. `.explain(...)` says which one."""

    name = "attention_varlen"
    summary = "softmax(scale * q k^T) v over packed, cached or paged sequences of differing lengths"
    problem_type = VarlenProblem
    tensors = ("q", "k", "v")
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {**MASKS, "return_lse": ("lse", "lse")}
    call_arguments: ClassVar[Mapping[str, str]] = {
        **VarlenOp.call_arguments,
        "seqused_k": "lengths",
        "block_table": "paged",
        "k_scale": "kv_scales",
        "v_scale": "kv_scales",
        "out": "out",
        "schedule": "schedule",
    }

    def default(self, problem: Problem) -> float:
        return problem.head_dim**-0.5  # type: ignore[attr-defined,no-any-return]

    @property
    def backward(self) -> AttentionVarlenBackward:
        """The op of the gradients: `registry.attention_varlen.backward.explain(...)`."""
        return attention_varlen_backward

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        plan: Schedule | None = None,
        variant: str | None = None,
    ) -> Any:
        """Attention of packed q [T, Hq, D] over k and v that are packed, in a cache, or in pages.

        k, v            [T, Hkv, D] with cu_seqlens_k; [B, S, Hkv, D] with seqused_k; [pages, page, Hkv, D] with
                        seqused_k and block_table. v may have another last dimension
        cu_seqlens_q/_k int32 [B + 1] on q's device: where each sequence begins, and the end
        seqused_k       int32 [B]: how many keys of its cache each sequence has, those of its queries included
        block_table     int32 [B, n]: the pages of each sequence, in order
        max_seqlen_q/_k the longest there is, or a bound of it: numbers of the host, which sees no length. That of a
                        cache is rounded up, so that a growing one is not another problem at each step
        causal          key j is seen by query i of a sequence where j <= i + keys - queries (aligned bottom-right)
        window          None, a number of keys seen to either side, or (left, right) with None for unlimited
        softcap         scores become softcap * tanh(score / softcap); 0.0 is off
        scale           default 1/sqrt(D)
        sinks           [Hq]: a logit a head in the sum of the softmax and in the LSE; has a gradient
        alibi_slopes    float32 [Hq]
        k_scale/v_scale for k and v of float8_e4m3fn or int8: float32 of one element, [Hkv], or their shape less D
        return_lse      also return the natural-log LSE, float32 [Hq, T]
        out             where to write the result; where it overlaps an input, by way of a temporary
        plan            what schedule(...) made for these lengths: checked, and put into tiles, once for many calls
        variant         run exactly this one, or raise IllegalVariant with its reasons
        """
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
        given: Given = {
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            "block_table": block_table,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "out": out,
        }
        asked = (max_seqlen_q, max_seqlen_k, causal, window, softcap, return_lse, variant)
        copied_to = None
        if out is not None and not _is_compiling() and arguments.is_read(out, q, k, v, cu_seqlens_q, given):
            try:
                arguments.refuse_followed(given)
                arguments.check_out(out, q, v)
                refuse_grad("out", out, q, k, v, sinks)
            except Exception:  # `explain` may name another mistake first; or none, where autocast makes another dtype
                self.problem_of(q, k, v, cu_seqlens_q=cu_seqlens_q, **dict(zip(HOW, asked, strict=True)), **given)
            copied_to, given["out"] = out, None
        if plan is not None and not isinstance(plan, Schedule):  # which raises, for what `explain` would name
            named_how = dict(zip(HOW, asked, strict=True))
            self.problem_of(q, k, v, cu_seqlens_q=cu_seqlens_q, **named_how, **given, plan=plan)
        eager = not _is_compiling() and type(max_seqlen_q) is int and type(max_seqlen_k) is int
        longest = coarse(max_seqlen_k) if eager and cu_seqlens_k is None and max_seqlen_k > 0 else max_seqlen_k
        how = (max_seqlen_q, longest, *asked[2:])
        settled = SCHEDULED if plan is not None else 0
        found = self.find_plan(*key_of(how, q, k, v, cu_seqlens_q, given, settled)) if eager else None
        if found is None:
            if plan is not None and eager and not is_virtual(q):  # under a mode or autocast: the same step as without
                q, k, v, given = arguments.as_autocast_wants(q, k, v, given)
                geometry = arguments.check_operands(q, k, v, cu_seqlens_q, given)
                step = SimpleNamespace(**step_of(q, k, geometry, max_seqlen_q, max_seqlen_k))
                plan.check(step, q.device, block_table)
                plan.check_lengths({**given, "cu_seqlens_q": cu_seqlens_q})
                given |= plan.lengths
                cu_seqlens_q = given.pop("cu_seqlens_q")
            result, lse = through_torch(how, scale, q, k, v, cu_seqlens_q, given)
            if copied_to is not None:
                arguments.check_out(copied_to, result, result)
                result = copied_to.copy_(result)
            return (result, lse) if return_lse else result
        if out is not None or alibi_slopes is not None or k_scale is not None or v_scale is not None:
            arguments.refuse_followed(given)
        if plan is not None:
            plan.check(found.decision.problem, q.device, block_table)
            if q.is_cpu:
                plan.check_lengths({**given, "cu_seqlens_q": cu_seqlens_q})
            given |= plan.lengths
        else:
            given["cu_seqlens_q"] = cu_seqlens_q
        if q.is_cpu:
            lengths.refuse_lies(q, k, given["cu_seqlens_q"], given, max_seqlen_q, max_seqlen_k)
        given["schedule"] = plan
        scale = found.default if scale is None else scale
        scope = current.get()
        if found.with_grad:
            result, lse = eager_with_grad(found, scale, scope, given, q, k, v)
        else:
            result, lse = found.launch(q, k, v, scale=scale, **given)
            if scope is not EMPTY:
                observe(scope, found.decision)
        if copied_to is not None:
            result = copied_to.copy_(result)
        elif out is not None:
            written(out)
        return (result, lse) if return_lse else result

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> None:
        """Raise what the same call would raise, and launch nothing: for who writes into a cache before the call.

        So does `explain`. This keeps the plan that it finds, as a call does, and takes a fifth of the time where there
        is one. In a graph that is being compiled it checks all but `out`.
        """
        if torch.compiler.is_compiling():
            self(q, k, v, **{**call, "out": None})  # nobody uses the result: it is traced, checked, and in no graph
        elif self._has_plan(q, k, v, **call):
            self.refuse_values(q, k, v, **call)
        else:
            self.explain(q, k, v, **call)

    def _has_plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        return_lse: bool = False,
        variant: str | None = None,
        **given: Any,
    ) -> bool:
        """Whether a call with these settings would find or make a plan; not, where it would go by the torch op, or has
        a `plan` or `out` of its own to be checked."""
        if scale is not None:
            masks.check_scale(scale)
        masks.check_flag("causal", causal)
        masks.check_flag("return_lse", return_lse)
        window, softcap = masks.check_window(window), masks.check_softcap(softcap)
        own = given.keys() - set(arguments.OPTIONAL) or given.get("out") is not None
        if own or type(max_seqlen_q) is not int or type(max_seqlen_k) is not int:
            return False
        longest = coarse(max_seqlen_k) if given.get("cu_seqlens_k") is None and max_seqlen_k > 0 else max_seqlen_k
        how = (max_seqlen_q, longest, causal, window, softcap, return_lse, variant)
        return self.find_plan(*key_of(how, q, k, v, cu_seqlens_q, self._optional(given))) is not None

    def schedule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **call: Any,
    ) -> Schedule:
        """What the calls of one step share, to be passed to each as `plan=`: takes what a call takes.

        The lengths are checked here, and not again by those calls; a variant that makes a list of tiles from them makes
        it once. Nothing waits for the device.
        """
        lent = {name: call.get(name) for name in arguments.OPTIONAL}
        call |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        problem, _ = self.problem_of(q, k, v, **call)
        lengths.refuse_lies(q, k, cu_seqlens_q, lent, max_seqlen_q, max_seqlen_k)
        given = {name: lent.get(name, cu_seqlens_q) for name in LENGTHS}
        given = {name: one if one is None else one.resolve_neg() for name, one in given.items()}  # kernels read memory
        if q.is_cuda and self.trivial(problem) is None:
            given |= checked(q, k, problem, given)
        return Schedule(problem, given)

    def forward(
        self, how: How, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is beneath the torch op: find or make the plan and launch it. Knows nothing of autograd."""
        plan = self.plans.by_facts(*key_of(how, q, k, v, cu_seqlens_q, given))
        lengths.refuse_lies(q, k, cu_seqlens_q, given, *how[:2])
        found: tuple[torch.Tensor, torch.Tensor | None]
        found = plan.launch(q, k, v, scale=scale, cu_seqlens_q=cu_seqlens_q, schedule=None, **given)
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return found

    def asked(self, settings: Any, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        present, how = settings
        q, k, v, cu_seqlens_q, *rest = tensors
        call: dict[str, Any] = dict(zip(HOW, how, strict=True)) | {"cu_seqlens_q": cu_seqlens_q}
        call["return_lse"] = call["return_lse"] or with_grad
        call |= named(present, cu_seqlens_q, rest)
        return self.problem_of(q, k, v, **call)

    def problem_of(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        return_lse: bool = False,
        variant: str | None = None,
        plan: Schedule | None = None,
        target: Target | None = None,
        **given: torch.Tensor | None,
    ) -> tuple[VarlenProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        given = self._optional(given)
        if scale is not None:
            masks.check_scale(scale)
        masks.check_flag("return_lse", return_lse)
        q, k, v, given = arguments.as_autocast_wants(q, k, v, given)
        fields = fields_of(
            q,
            k,
            v,
            cu_seqlens_q,
            given,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            softcap=softcap,
            lse=return_lse,
            target=target,
        )
        out = given["out"]
        refuse_grad("out", out, q, k, v, given["sinks"])
        if out is not None and arguments.is_read(out, q, k, v, cu_seqlens_q, given):
            fields["out"] = False  # copied to its place afterwards
        problem = VarlenProblem(**fields)
        if plan is not None:
            check_schedule(plan).check(problem, q.device, given["block_table"])
            plan.check_lengths({**given, "cu_seqlens_q": cu_seqlens_q})
        return problem, with_variant(self.name, current.get(), variant)

    def _optional(self, given: Given) -> Given:
        """All tensors that a call may leave out, of those that it was given."""
        if unknown := sorted(given.keys() - set(arguments.OPTIONAL)):
            raise TypeError(f"{self.name} has no argument {unknown[0]!r}")
        return dict.fromkeys(arguments.OPTIONAL) | given

    def refuse_values(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **call: Any,
    ) -> None:
        given = {name: call.get(name) for name in arguments.OPTIONAL}
        lengths.refuse_lies(q, k, cu_seqlens_q, given, max_seqlen_q, max_seqlen_k)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: Any, out: Any, **_: Any) -> Any:
            found = (new_out(q, v) if out is None else out).zero_()
            if not problem.lse:  # type: ignore[attr-defined]
                return found, None
            lse = new_lse(q).fill_(-torch.inf)
            return found, lse if sinks is None else lse.copy_(sinks.detach()[:, None].expand_as(lse))

        return launch

    def reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        scale: float | None = None,
        return_lse: bool = False,
        dtype: torch.dtype = torch.float64,
        **given: torch.Tensor | None,
    ) -> Any:
        """The oracle: each sequence by the definition, in `dtype`, differentiable. It waits for the lengths."""
        tensors = self._optional(given) | {"out": None}
        geometry = arguments.check_operands(q, k, v, cu_seqlens_q, tensors)
        arguments.check_maximum("max_seqlen_q", max_seqlen_q, q.shape[0])
        arguments.check_maximum("max_seqlen_k", max_seqlen_k, geometry.capacity)
        arguments.check_scales(k, tensors["k_scale"], tensors["v_scale"])
        masks.check_flag("causal", causal)
        scale = q.shape[2] ** -0.5 if scale is None else scale
        masks.check_scale(scale)
        causal, window = masks.canonical_window(masks.check_window(window), causal)
        softcap = masks.check_softcap(softcap)
        found, lse = oracle.reference(
            q, k, v, cu_seqlens_q, tensors, causal=causal, window=window, softcap=softcap, scale=scale, dtype=dtype
        )
        return (found, lse) if return_lse else found


attention_varlen = AttentionVarlen()
define(attention_varlen.forward, functools.partial(attention_varlen_backward.in_a_row, beneath=True))
