"""`gluon_fa3`: attention forward for Hopper in the shape of FlashAttention-3, written in Gluon.

A producer warp and two or three consumer warp groups, TMA and mbarriers, asynchronous wgmma with QK(i) beside PV(i-1)
and softmax, ping-pong, persistent. Reading order: traits.py, kernel.py, pipeline.py, schedule.py, softmax.py, host.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.gluon_fa3.configs import configs
from registry.plugins.gluon_fa3.traits import ROWS, registers, rule, shared_memory

if TYPE_CHECKING:
    import torch

    from registry.toolbox.builds import Build


@dataclass(frozen=True)
class _Call:
    """The fields of an AttentionProblem that the plan reads, taken from the tensors of a direct call."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    lse: bool


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    config: Mapping[str, Any],
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> tuple:
    """(out, lse or None), launched through Triton's JIT."""
    from registry.ops.attention.outputs import new_lse, new_out
    from registry.plugins.gluon_fa3 import host

    out = new_out(q, v)
    lse = new_lse(q) if return_lse else None
    (batch, heads, seqlen_q, head_dim), (_, heads_kv, seqlen_k, head_dim_v) = q.shape, v.shape
    call = _Call(
        str(q.dtype).removeprefix("torch."),
        batch,
        heads,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        causal,
        window,
        softcap,
        return_lse,
    )
    operands = {name: (x.shape, x.stride()) for name, x in (("q", q), ("k", k), ("v", v), ("o", out))}
    p = host.plan(call, config, _sm_count(q.device), operands, score=host.score_kind(scale, softcap))
    host.launch(p, q, k, v, out, lse, *host.score_scalars(scale, softcap))
    return out, lse


def builds(problem: Any, config: Mapping[str, Any]) -> list[Build]:
    """The one kernel that `run` would launch with a positive scale."""
    from registry.plugins.gluon_fa3 import host
    from registry.plugins.gluon_fa3.kernel import attention_forward
    from registry.toolbox.builds import Build

    p = host.plan(problem, config, problem.target.sm_count, _operands(problem))
    described = dict(constants={"T": p.traits}, options=host.options(p.traits), arch=problem.target.arch)
    return [Build.of(attention_forward, host.example_arguments(p), **described)]


def prepare(problem: Any, config: Mapping[str, Any]) -> Callable[..., tuple]:
    """`run` with all host work but the addresses done once."""
    from registry.ops.attention.outputs import lse_allocator, out_allocator
    from registry.plugins.gluon_fa3 import host
    from registry.plugins.gluon_fa3.kernel import attention_forward
    from registry.toolbox.launch import Launcher

    def planned(score: str) -> host.Plan:
        return host.plan(problem, config, problem.target.sm_count, _operands(problem), score=score)

    def bind(p: host.Plan) -> Callable[..., None]:
        launcher = Launcher(attention_forward, constants={"T": p.traits}, options=host.options(p.traits))
        return launcher.bind(host.example_arguments(p), grid=(p.grid,), vary=("scale", "cap"))

    softcap = problem.softcap
    new_out, new_lse = out_allocator(problem), lse_allocator(problem)
    plan = planned(host.score_kind(1.0, softcap))
    usual, dynamic = bind(plan), plan.traits.dynamic
    others: dict[str, Callable[..., None]] = {}

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple:
        out, lse = new_out(q), new_lse(q)
        bound = usual
        if scale <= 0 and not softcap:
            kind = host.score_kind(scale, softcap)
            bound = others[kind] if kind in others else others.setdefault(kind, bind(planned(kind)))
        counter = host.tile_counter(q) if dynamic else 0
        bound(q, k, v, out, 0 if lse is None else lse, counter, *host.score_scalars(scale, softcap))
        return out, lse

    return launch


def _operands(problem: Any) -> dict[str, tuple]:
    """(shape, strides) of q, k, v and of the output that `new_out` would allocate."""
    from registry.ops.attention.outputs import out_geometry

    found = {fact.name: (fact.shape, fact.strides) for fact in problem.operands}
    return {**found, "o": out_geometry(*found["q"], problem.head_dim_v)}


def design_of(config: Mapping[str, Any]) -> Design:
    return Design(
        warp_groups=config["consumers"],
        pipeline_stages=config["stages"],
        warp_specialized=True,
        pipeline_tasks=config["consumers"] + 1,
        tile=(ROWS * config["consumers"], config["BLOCK_N"]),
        persistent=True,
        dsl="gluon",
    )


def _sm_count(device: torch.device) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


VARIANT = Variant(
    "gluon_fa3",
    op="attention",
    run=run,
    prepare=prepare,
    builds=builds,
    requires=Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16"),
        head_dim=(8, 256),
        head_dim_multiple=8,
        head_dim_v=(8, 256),
        head_dim_v_multiple=8,
        layouts=("bhsd", "bshd", "strided"),
        base_alignment=16,  # of a tensor map's address
        stride_alignment=16,  # and of each of its strides
        causal=True,
        window=True,
        softcap=True,
        gqa=True,
        lse=True,
        cross_length=True,
        deterministic=True,
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=shared_memory,
        registers=registers,
        rule=rule,
    ),
    design=Design(
        warp_groups=2,
        pipeline_stages=2,
        warp_specialized=True,
        pipeline_tasks=3,
        tile=(128, 128),
        persistent=True,
        dsl="gluon",
    ),
    configs=configs,
    design_of=design_of,
    summary="FlashAttention-3 for Hopper in Gluon: TMA producer, 1 to 3 wgmma consumer warp groups, persistent",
)


@hookimpl
def registry_variants() -> list[Variant]:
    return [VARIANT]
