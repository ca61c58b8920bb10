"""What the forward and the backward share: features that earn arguments, empty answers, the fields of a Problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from registry.contract.target import Target
from registry.ops.attention import arguments, costs
from registry.ops.attention.problem import AttentionProblem, memory_order
from registry.ops.op import Op
from registry.ops.parts import masks
from registry.ops.tensors import asks_ieee, dtype_name, operand

_deterministic = torch.are_deterministic_algorithms_enabled


class AttentionOp(Op):
    """The features that earn arguments, and the empty answers."""

    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        "causal": ("causal", "causal"),
        "window": ("window", "window"),
        "softcap": ("softcap", "softcap"),
    }

    flops = staticmethod(costs.flops)
    bytes_moved = staticmethod(costs.bytes_moved)

    def empty(self, problem: AttentionProblem) -> bool:
        return not all((problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, problem.head_dim_v))


def fields_of(
    q: Any, k: Any, v: Any, causal: Any, window: Any, softcap: Any, lse: bool, target: Target | None
) -> dict[str, Any]:
    """Check the arguments of a call and turn them into the fields of its Problem."""
    q, k, v = arguments.check_qkv(q, k, v)
    masks.check_flag("causal", causal)
    window = masks.check_window(window)
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
        "softcap": masks.check_softcap(softcap),
        "lse": lse,
        "ieee": asks_ieee(q.dtype),
        "deterministic": _deterministic(),
        "operands": operands,
    }
