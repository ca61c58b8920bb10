"""The host side: from shapes, strides and a config to a grid, four tensor maps, the kernel's scalars, and a launch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.plugins.gluon_fa3.kernel import attention_forward
from registry.plugins.gluon_fa3.traits import ROWS, Traits, traits_of, window_bounds
from registry.toolbox.counters import zeroes

KV_SECTION = 32 << 20  # bytes of K and V that a section of heads may take: what stays in a 50 MB L2 cache
LOG2E = math.log2(math.e)
COUNTER_WORDS = 32  # a cache line for each counter
_GLUON_DTYPE = {"bf16": gl.bfloat16, "fp16": gl.float16}


Geometry = tuple[Sequence[int], Sequence[int]]  # shape and strides


@dataclass(frozen=True)
class TensorMap:
    """One [batch, head, row, column] tensor map, all but its address. Strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], rows: int, columns: int) -> TensorMap:
        """A dimension of one element may carry any stride in torch; the map needs a multiple of 16 bytes."""
        legal = -(-shape[3] // 8) * 8
        outer = tuple(legal if size == 1 else stride for size, stride in zip(shape[:3], strides[:3], strict=True))
        return cls(tuple(shape), (*outer, 1), (1, 1, rows, columns))


@dataclass(frozen=True)
class Plan:
    """Everything about a launch but addresses, streams and the float scalars. Made from shapes alone."""

    traits: Traits
    grid: int
    maps: Mapping[str, TensorMap]
    scalars: Mapping[str, int]


def plan(
    problem: Any,
    config: Mapping[str, Any],
    sm_count: int,
    operands: Mapping[str, Geometry],
    *,
    score: str | None = None,
) -> Plan:
    """`problem` has the fields of an AttentionProblem; `operands` gives (shape, strides) of q, k, v and o."""
    t = traits_of(problem, config, score=score)
    boxes = {
        "q": (ROWS, t.head),
        "k": (t.block_n, t.head),
        "v": (t.block_n, t.head_v),
        "o": (ROWS, t.head_v // t.o_steps),
    }
    left, right = window_bounds(problem.causal, problem.window)
    row_blocks = -(-problem.seqlen_q // t.block_m)
    heads = problem.batch * problem.heads_q
    group = problem.heads_q // problem.heads_kv
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * 2
    section = min(max(KV_SECTION // kv_bytes, 1) * group, heads)
    grid = min(sm_count * t.blocks_per_sm, row_blocks * heads)
    if grid == row_blocks * heads:  # one tile a block: there is nothing to draw
        t = dataclasses.replace(t, schedule="static")
    return Plan(
        traits=t,
        grid=grid,
        maps={name: TensorMap.of(*operands[name], *box) for name, box in boxes.items()},
        scalars=dict(
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            left=left,
            right=right,
            heads_q=problem.heads_q,
            group=group,
            tiles=row_blocks * heads,
            row_blocks=row_blocks,
            heads=heads,
            section_heads=section,
        ),
    )


def options(t: Traits) -> dict[str, int]:
    """Compiler options. Left alone, a single consumer group would be given all registers of an SM."""
    return {"num_warps": 4, "maxnreg": t.launch_registers} if t.groups == 1 else {"num_warps": 4}


@functools.cache
def box_layout(block: tuple[int, ...], dtype: str) -> Any:
    """The swizzled shared-memory layout in which a box of a tensor map lands."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPE[dtype])


def score_kind(scale: float, softcap: float) -> str:
    """How scores become base-2 exponents. A scale <= 0 would turn the row maximum around, so it is applied before."""
    return "softcap" if softcap else "plain" if scale > 0 else "scaled"


def score_scalars(scale: float, softcap: float) -> tuple[float, float]:
    """The kernel's (scale, cap): softcap is cap * tanh(x / cap) = cap - 2 cap / (1 + 2^(2 x log2(e) / cap))."""
    return (scale * 2 * LOG2E / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)


def tile_counter(q: torch.Tensor) -> torch.Tensor:
    """A zero for the next launch on the current stream of q's device. The kernel leaves it at zero: see schedule.py."""
    return zeroes(q.get_device(), COUNTER_WORDS).take()


def descriptors(p: Plan, bases: Mapping[str, Any]) -> list[TensorDescriptor]:
    """The tensor maps of q, k, v and o in the kernel's order; `bases` gives their tensors, or stand-ins for them."""
    made = []
    for name, m in p.maps.items():
        layout = box_layout(m.block, p.traits.dtype)
        made.append(TensorDescriptor(bases[name], list(m.shape), list(m.strides), list(m.block), layout))
    return made


def launch(
    p: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    cap: float,
) -> None:
    """The plain launch through Triton's JIT."""
    maps = descriptors(p, {"q": q, "k": k, "v": v, "o": out})
    counter = tile_counter(q) if p.traits.dynamic else unused(q.device.index)
    lse = unused(q.device.index).view(torch.float32) if lse is None else lse
    attention_forward[(p.grid,)](
        *maps, lse, counter, **p.scalars, scale=scale, cap=cap, T=p.traits, **options(p.traits)
    )


@functools.cache
def unused(device: int) -> torch.Tensor:
    """An argument for a parameter that a build does not read."""
    return torch.zeros(COUNTER_WORDS, device=device, dtype=torch.int32)


def example_arguments(p: Plan) -> dict[str, Any]:
    """Arguments of a launch over tensors without memory: what a build, or a bound launch, is described by."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[p.traits.dtype]
    base = torch.empty(1, device="meta", dtype=dtype)
    maps = descriptors(p, dict.fromkeys(p.maps, base))
    buffers = {"lse": torch.empty(1, device="meta"), "counter": torch.empty(1, device="meta", dtype=torch.int32)}
    return {
        **dict(zip(("q_map", "k_map", "v_map", "o_map"), maps, strict=True)),
        **buffers,
        **p.scalars,
        "scale": 1.0,
        "cap": 1.0,
    }
