"""DTensors through `registry.attention` and `registry.matmul`: which shardings they can be computed in, shard by shard.

    from registry.integrations import dtensor
    dtensor.enable()
    registry.attention(q, k, v, causal=True)       # q, k, v: DTensors, sharded by batch or by heads

Attention is sharded by batch and by heads (with one key head for all, the queries' heads), attention_varlen by heads,
matmul by rows, columns, batches and along K, whose results are partial sums. Lengths are replicated DTensors. Other
placements are redistributed to one of these, as DTensor does for torch's own functions.
The gradients are sharded alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_Rules = list[tuple[list[Any], list[Any]]]
"""(placements of the results, placements of the arguments, None for what is no tensor), each for one mesh dimension."""


@functools.cache
def enable() -> None:
    """Tell DTensor how the registry's ops are sharded, for the life of the process."""
    ops = torch.ops.registry
    rules: dict[Any, Callable[..., _Rules]] = {
        ops.attention.default: _attention,
        ops.attention_backward.default: _attention_backward,
        ops.attention_varlen.default: _varlen,
        ops.attention_varlen_backward.default: _varlen_backward,
        ops.matmul.default: _matmul,
    }
    for op, rule in rules.items():
        register_sharding(op)(rule)


def _heads_divide(*specs: Any, at: tuple[int, ...] = (1, 1, 1)) -> bool:
    """Whether the heads that each shard has are those that belong together; `at` says which dimension they are."""
    shards = 1
    for spec, dim in zip(specs, at, strict=True):
        sizes = zip(spec.mesh.shape, spec.placements, strict=True)
        shards = max(shards, math.prod(n for n, placement in sizes if placement == Shard(dim)))
    return all(spec.shape[dim] % shards == 0 for spec, dim in zip(specs, at, strict=True))


def _attention(q: Any, k: Any, v: Any, *settings: Any) -> _Rules:
    with_lse = settings[-2]
    nothing = [None] * len(settings)

    def rule(of_q: Any, of_kv: Any) -> tuple[list[Any], list[Any]]:
        return [of_q, of_q if with_lse else Replicate()], [of_q, of_kv, of_kv, *nothing]

    rules = [rule(Replicate(), Replicate()), rule(Shard(0), Shard(0))]
    if _heads_divide(q, k, v):
        rules.append(rule(Shard(1), Shard(1)))
    elif k.shape[1] == 1:
        rules.append(rule(Shard(1), Replicate()))
    return rules


def _attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, grad_lse: Any, *settings: Any
) -> _Rules:
    nothing = [None] * len(settings)

    def rule(of_q: Any, of_kv: Any, of_grads: Any = None) -> tuple[list[Any], list[Any]]:
        grads = of_grads or of_kv
        given = [of_q, of_q, of_kv, of_kv, of_q, of_q, None if grad_lse is None else of_q]
        return [of_q, grads, grads], [*given, *nothing]

    rules = [rule(Replicate(), Replicate()), rule(Shard(0), Shard(0))]
    if _heads_divide(q, k, v):
        rules.append(rule(Shard(1), Shard(1)))
    elif k.shape[1] == 1:
        rules.append(rule(Shard(1), Replicate(), Partial()))
    return rules


def _varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    used: Any,
    table: Any,
    sinks: Any,
    alibi: Any,
    k_scale: Any,
    v_scale: Any,
    *settings: Any,
) -> _Rules:
    with_lse = settings[-2]
    lengths = [None if tensor is None else Replicate() for tensor in (cu_q, cu_k, used, table)]

    def rule(by_heads: bool) -> tuple[list[Any], list[Any]]:
        def at(dim: int, tensor: Any = q) -> Any:
            return None if tensor is None else Shard(dim) if by_heads else Replicate()

        def of_scale(scale: Any) -> Any:
            return None if scale is None else _of_vector(scale, at(scale.ndim - 1))

        given = [at(1), at(k.ndim - 2), at(v.ndim - 2), *lengths, at(0, sinks), at(0, alibi)]
        results = [at(1), at(0) if with_lse else Replicate()]
        return results, [*given, of_scale(k_scale), of_scale(v_scale), *[None] * len(settings)]

    divide = _heads_divide(q, k, v, at=(1, k.ndim - 2, v.ndim - 2))
    return [rule(False), rule(True)] if divide else [rule(False)]


def _varlen_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_q: Any,
    cu_k: Any,
    sinks: Any,
    alibi: Any,
    grad_lse: Any,
    *settings: Any,
) -> _Rules:
    def rule(by_heads: bool) -> tuple[list[Any], list[Any]]:
        def at(dim: int, tensor: Any = q) -> Any:
            return None if tensor is None else Shard(dim) if by_heads else Replicate()

        given = [*[at(1)] * 5, at(0), Replicate(), Replicate(), at(0, sinks), at(0, alibi), at(0, grad_lse)]
        return [at(1), at(1), at(1), at(0, sinks) or Replicate()], [*given, *[None] * len(settings)]

    return [rule(False), rule(True)] if _heads_divide(q, k, v) else [rule(False)]


def _matmul(
    a: Any, b: Any, bias: Any, activation: str, out_dtype: Any, scale_a: Any, scale_b: Any, variant: Any
) -> _Rules:
    def rule(of_out: Any, of_a: Any, of_b: Any, rows: Any = None, columns: Any = None) -> tuple[list[Any], list[Any]]:
        along_rows, along_columns = rows or Replicate(), columns or Replicate()
        of_bias = None if bias is None else along_columns
        of_scales = (_of_vector(scale_a, along_rows), _of_vector(scale_b, along_columns))
        return [of_out], [of_a, of_b, of_bias, None, None, *of_scales, None]

    result = max(a.ndim, b.ndim)
    rules = [rule(Replicate(), Replicate(), Replicate())]
    rules.append(rule(Shard(result - 1), Replicate(), Shard(b.ndim - 1), columns=Shard(0)))
    if a.ndim == result:
        rules.append(rule(Shard(result - 2), Shard(a.ndim - 2), Replicate(), rows=Shard(0)))
    if bias is None and not activation:
        rules.append(rule(Partial(), Shard(a.ndim - 1), Shard(b.ndim - 2)))
    if a.ndim == b.ndim == 3:
        rules.append(rule(Shard(0), Shard(0), Shard(0)))
    elif result == 3:
        rules.append(rule(Shard(0), *((Shard(0), Replicate()) if a.ndim == 3 else (Replicate(), Shard(0)))))
    return rules


def _of_vector(scale: Any, along: Any) -> Any:
    """The placement of a scale: one value for all is everywhere."""
    if scale is None:
        return None
    return along if math.prod(scale.shape) > 1 else Replicate()


__all__ = ["enable"]
