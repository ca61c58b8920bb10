"""What the forward and the backward share: arguments that features earn, the fields of a Problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from registry.contract.capability import Config
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.ops.attention_varlen import arguments, costs
from registry.ops.attention_varlen.problem import VarlenProblem
from registry.ops.attention_varlen.schedule import Stepped
from registry.ops.op import Op
from registry.ops.parts import masks
from registry.ops.tensors import asks_ieee, dtype_name, operand

_deterministic = torch.are_deterministic_algorithms_enabled

Given = dict[str, Any]
"""The tensors that a call may leave out, each by its name, None where it did: arguments.OPTIONAL."""

SAME = 1 << len(arguments.OPTIONAL)
"""Among the bits of optional tensors: cu_seqlens_k is the tensor that cu_seqlens_q is."""
SCHEDULED = 2 * SAME
"""And that lengths come with a schedule, which has them elsewhere, and by rows of another stride: a launch may hold on
to the strides of the first that it meets."""

MASKS: Mapping[str, tuple[str, str]] = {
    "causal": ("causal", "causal"),
    "window": ("window", "window"),
    "softcap": ("softcap", "softcap"),
    "max_seqlen_q": ("", "max_seqlen_q"),
    "max_seqlen_k": ("", "max_seqlen_k"),
}


class VarlenOp(Op):
    """The features that earn arguments, and the empty answers."""

    call_arguments: ClassVar[Mapping[str, str]] = {
        "scale": "",
        "cu_seqlens_q": "",
        "cu_seqlens_k": "packed",
        "sinks": "sinks",
        "alibi_slopes": "alibi",
    }

    def earned(self, variant: Variant, claim: str) -> bool:
        """Lengths are handed to those that claim a layout which has them."""
        layouts = variant.requires.claim("kv_layouts") or ()
        if claim == "lengths":
            return any(layout in layouts for layout in ("cache", "paged"))
        if claim == "schedule":
            return variant.schedule is not None
        return claim in layouts if claim in arguments.KV_LAYOUTS else super().earned(variant, claim)

    first_operand: ClassVar[int] = 0
    """Where q stands among the tensors of a launch; k follows it."""

    def bind(self, variant: Variant, problem: Problem, config: Config) -> Callable[..., Any]:
        launch = super().bind(variant, problem, config)
        checks = problem.target.arch != "cpu" and not variant.requires.claim("checks_lengths")
        if not checks and variant.schedule is None:
            return launch
        return Stepped(launch, variant, problem, config, checks, self.first_operand)

    def launch_of_any_size(self, variant: Variant, noted: Problem, config: Config) -> Callable[..., Any] | None:
        return None  # where lengths are checked, the launch holds them to those of its Problem

    def launches(self, variant: Variant, problem_of: Any, config: Config) -> None:
        return None

    flops = staticmethod(costs.flops)
    bytes_moved = staticmethod(costs.bytes_moved)

    def empty(self, problem: VarlenProblem) -> bool:
        """Nothing to attend with, or nothing to attend over, whatever the lengths."""
        queries = (problem.batch, problem.heads_q, problem.total_q, problem.max_seqlen_q, problem.head_dim_v)
        keys = (size for fact in problem.operands if fact.name == "k" for size in fact.shape)
        return not (all(queries) and problem.max_seqlen_k and all(keys))


def fields_of(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    given: Given,
    *,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    lse: bool,
    target: Target | None,
) -> dict[str, Any]:
    """Check the arguments of a call and turn them into the fields of its Problem."""
    geometry = arguments.check_operands(q, k, v, cu_seqlens_q, given)
    masks.check_flag("causal", causal)
    scale = arguments.check_scales(k, given["k_scale"], given["v_scale"])
    return step_of(q, k, geometry, max_seqlen_q, max_seqlen_k) | {
        "target": target if target is not None else Target.of(q.device),
        "dtype": dtype_name(q.dtype),
        "heads_q": q.shape[1],
        "heads_kv": k.shape[-2],
        "head_dim": q.shape[2],
        "head_dim_v": v.shape[-1],
        "kv_dtype": dtype_name(k.dtype),
        "kv_scale": scale,
        "causal": causal,
        "window": masks.check_window(window),
        "softcap": masks.check_softcap(softcap),
        "sinks": given["sinks"] is not None,
        "alibi": given["alibi_slopes"] is not None,
        "lse": lse,
        "out": given["out"] is not None,
        "ieee": asks_ieee(q.dtype),
        "deterministic": _deterministic(),
        "operands": tuple(
            operand(name, t) for name, t in (("q", q), ("k", k), ("v", v), ("out", given["out"])) if t is not None
        ),
    }


def step_of(
    q: torch.Tensor, k: torch.Tensor, geometry: arguments.Geometry, max_seqlen_q: Any, max_seqlen_k: Any
) -> dict[str, Any]:
    """The fields of a Problem that all layers of a step share: its sizes, and how its keys lie."""
    longest = arguments.check_maximum("max_seqlen_k", max_seqlen_k, geometry.capacity)
    if geometry.kv_layout != "packed" and isinstance(longest, int):
        longest = min(arguments.coarse(longest), geometry.capacity)
    return {
        "batch": geometry.batch,
        "total_q": q.shape[0],
        "total_k": k.shape[0] if geometry.kv_layout == "packed" else 0,
        "max_seqlen_q": arguments.check_maximum("max_seqlen_q", max_seqlen_q, q.shape[0]),
        "max_seqlen_k": longest,
        "kv_layout": geometry.kv_layout,
        "page_size": geometry.page_size,
    }


def key_of(how: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, given: Given, present: int = 0) -> list[Any]:
    """The settings of a call and its tensors, those that were given: cu_seqlens_k is not where it is cu_seqlens_q,
    for a guard takes no tensor twice. Which there are is one number, a bit for each: a tuple of them costs twice the
    time."""
    bit = 1
    found: list[Any] = [None, q, k, v, cu_seqlens_q]
    for tensor in given.values():
        if tensor is not None:
            present |= bit
            if bit == 1 and tensor is cu_seqlens_q:
                present |= SAME
            else:
                found.append(tensor)
        bit += bit
    found[0] = present, how
    return found


def named(present: int, cu_seqlens_q: Any, others: Sequence[Any]) -> Given:
    """The optional tensors of such a key by name: one for each bit, in order."""
    rest = iter([cu_seqlens_q, *others] if present & SAME else others)
    return {name: next(rest) if present >> i & 1 else None for i, name in enumerate(arguments.OPTIONAL)}
