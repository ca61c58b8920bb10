"""FlashAttention-2 in plain Triton: the portable kernel, the baseline of all others, and the one to learn from.

Its files:
    tiles.py      what the kernels share: tile order, masks as two bounds, offsets
    forward.py    one kernel                         backward.py   a query pass and a key pass
    host.py       arguments of each launch           configs.py    tiles, warps, stages, and what they need
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from registry import Design, Requires, Variant, hookimpl
from registry.ops.attention.outputs import grad_allocators, lse_allocator, new_lse, new_out, out_allocator
from registry.plugins.triton_fa2 import configs, host
from registry.toolbox.builds import Build
from registry.toolbox.launch import Launcher, StandIn
from registry.toolbox.outputs import allocator

Config = Mapping[str, Any]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    config: Config,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax(scale q k^T) v, with its LSE where asked for."""
    out, lse = new_out(q, v), new_lse(q) if return_lse else None
    kernel, grid, arguments, constants = host.forward_call(
        q, k, v, out, lse, scale=scale, config=config, causal=causal, window=window, softcap=softcap
    )
    kernel[grid](**arguments, **constants, **configs.options(config, configs.FORWARD))
    return out, lse


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    config: Config,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv). Always deterministic."""
    dq, dk, dv, delta = new_out(q, q), new_out(k, k), new_out(v, v), new_lse(q)
    calls = host.backward_calls(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        dq,
        dk,
        dv,
        delta,
        scale=scale,
        config=config,
        causal=causal,
        window=window,
        softcap=softcap,
        grad_lse=None if grad_lse is None else grad_lse.contiguous(),
    )
    for number, (kernel, grid, arguments, constants) in enumerate(calls):
        options = configs.options(config, configs.KEY if number else configs.QUERY)
        kernel[grid](**arguments, **constants, **options)
    return dq, dk, dv


# --- without a GPU, and without Triton's own launcher ---------------------------------------------------------------


def _stand_ins(problem: Any) -> dict[str, torch.Tensor]:
    """Meta tensors like the operands: shapes and strides, no memory."""
    return {
        fact.name: torch.empty_strided(fact.shape, fact.strides, dtype=getattr(torch, fact.dtype), device="meta")
        for fact in problem.operands
    }


def _aligned(problem: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with each tensor replaced by a stand-in that has its operand's alignment."""
    names = {"q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "do_ptr": "grad_out"}
    if problem.op == "attention_backward":
        names["out_ptr"] = "out"
    alignment = {fact.name: fact.base_alignment for fact in problem.operands}
    return {
        name: StandIn(value.shape, value.dtype, value.stride(), alignment.get(names.get(name, ""), 16))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def _features(problem: Any) -> dict[str, Any]:
    return {"causal": problem.causal, "window": problem.window, "softcap": problem.softcap}


def _forward_example(problem: Any, config: Config, scale: float = 1.0) -> host.Call:
    t = _stand_ins(problem)
    out, lse = new_out(t["q"], t["v"]), new_lse(t["q"]) if problem.lse else None
    return host.forward_call(t["q"], t["k"], t["v"], out, lse, scale=scale, config=config, **_features(problem))


def _backward_example(problem: Any, config: Config) -> list[host.Call]:
    t = _stand_ins(problem)
    q, k, v = t["q"], t["k"], t["v"]
    out = t.get("out", new_out(q, v))
    lse, grad_lse = new_lse(q), new_lse(q) if problem.grad_lse else None
    return host.backward_calls(
        t.get("grad_out", out),
        q,
        k,
        v,
        out,
        lse,
        new_out(q, q),
        new_out(k, k),
        new_out(v, v),
        new_lse(q),
        scale=1.0,
        config=config,
        grad_lse=grad_lse,
        **_features(problem),
    )


def forward_builds(problem: Any, config: Config) -> list[Build]:
    kernel, _, arguments, constants = _forward_example(problem, config)
    options = configs.options(config, configs.FORWARD)
    return [Build.of(kernel, _aligned(problem, arguments), constants=constants, options=options, arch=problem.target)]


def backward_builds(problem: Any, config: Config) -> list[Build]:
    return [
        Build.of(
            kernel,
            _aligned(problem, arguments),
            constants=constants,
            arch=problem.target,
            options=configs.options(config, configs.KEY if number else configs.QUERY),
        )
        for number, (kernel, _, arguments, constants) in enumerate(_backward_example(problem, config))
    ]


def prepare_forward(problem: Any, config: Config) -> Callable[..., Any]:
    """All host work once; each call passes its pointers and its scale."""
    kernel, grid, arguments, constants = _forward_example(problem, config)
    launcher = Launcher(kernel, constants=constants, options=configs.options(config, configs.FORWARD))
    bound = launcher.bind(_aligned(problem, arguments), grid, vary=("scale_log2",))
    factor = 1.0 / problem.softcap if problem.softcap else host.LOG2_E

    return_lse = problem.lse
    new_out, new_lse = out_allocator(problem), lse_allocator(problem)

    def launch(q, k, v, *, scale):
        if not scale > 0.0:  # the sign of the scale is a constant of the kernel
            return attention(q, k, v, scale=scale, config=config, return_lse=return_lse, **_features(problem))
        out, lse = new_out(q), new_lse(q)
        if lse is None:
            bound(q, k, v, out, scale * factor)
        else:
            bound(q, k, v, out, lse, scale * factor)
        return out, lse

    return launch


def prepare_backward(problem: Any, config: Config) -> Callable[..., Any]:
    passes = []
    for number, (kernel, grid, arguments, constants) in enumerate(_backward_example(problem, config)):
        options = configs.options(config, configs.KEY if number else configs.QUERY)
        launcher = Launcher(kernel, constants=constants, options=options)
        passes.append(launcher.bind(_aligned(problem, arguments), grid, vary=("scale", "scale_log2")))
    query_pass, *key_passes = passes
    factor = 1.0 / problem.softcap if problem.softcap else host.LOG2_E

    new_dq, new_dk, new_dv = grad_allocators(problem)
    new_delta = allocator((problem.batch, problem.heads_q, problem.seqlen_q), torch.float32)

    def launch(grad_out, q, k, v, out, lse, *, scale, grad_lse=None):
        dq, dk, dv, delta = new_dq(q), new_dk(k), new_dv(v), new_delta(q)
        lse = lse.contiguous()
        extra = () if grad_lse is None else (grad_lse.contiguous(),)
        query_pass(q, k, v, out, grad_out, lse, *extra, delta, dq, scale, scale * factor)
        for key_pass in key_passes:
            key_pass(q, k, v, grad_out, lse, delta, dk, dv, scale, scale * factor)
        return dq, dk, dv

    return launch


# --- the declaration ------------------------------------------------------------------------------------------------

_CLAIMS: dict[str, Any] = dict(
    arch=("sm80+",),
    dtypes=("float16", "bfloat16", "float32"),
    ieee=True,
    deterministic=True,
    head_dim=(16, 256),
    head_dim_multiple=8,
    head_dim_v=(16, 256),
    head_dim_v_multiple=8,
    layouts=("bhsd", "bshd", "strided"),
    unit_inner_stride=False,
    causal=True,
    window=True,
    softcap=True,
    gqa=True,
    lse=True,
    cross_length=True,
    toolchain={"triton": ">=3.6,<4"},
)


@hookimpl
def registry_variants() -> list[Variant]:
    return [
        Variant(
            "triton_fa2",
            op="attention",
            run=attention,
            prepare=prepare_forward,
            builds=forward_builds,
            requires=Requires(**_CLAIMS, rule=configs.copy_reasons, shared_memory=configs.forward_shared_memory),
            design=Design(pipeline_stages=3),
            design_of=configs.forward_design,
            configs=configs.forward_configs,
            summary="FlashAttention-2 in plain Triton: every feature, every NVIDIA GPU from sm80",
        ),
        Variant(
            "triton_fa2_backward",
            op="attention_backward",
            run=attention_backward,
            prepare=prepare_backward,
            builds=backward_builds,
            requires=Requires(
                **_CLAIMS, grad_lse=True, rule=configs.backward_reasons, shared_memory=configs.backward_shared_memory
            ),
            design=Design(pipeline_stages=2),
            design_of=configs.backward_design,
            configs=configs.backward_configs,
            summary="Its gradients in two passes without atomics: the same bits on every run",
        ),
    ]
