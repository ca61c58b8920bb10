"""FlashAttention-2 in plain Triton: the portable kernel, the baseline of all others, and the one to learn from.

Its files:
    tiles.py      what the kernels share: tile order, masks as two bounds, offsets
    forward.py    one kernel
    query_pass.py the backward's first kernel: dQ    key_pass.py   its second: dK and dV
    host.py       the call of each launch            configs.py    tiles, warps, stages, and what they need
    stored/       gradients by way of P and dS in memory
"""

from __future__ import annotations

from functools import partial
from typing import Any

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.triton_fa2 import configs, host, stored
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import tiled

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
        host.FORWARD.variant(
            "triton_fa2",
            op="attention",
            requires=Requires(
                **_CLAIMS | {"head_dim": (16, 576), "head_dim_v": (16, 512)},
                rule=configs.forward_reasons,
                shared_memory=configs.forward_shared_memory,
            ),
            design=Design(pipeline_stages=3),
            design_of=tiled,
            configs=configs.forward_configs,
            cost=unknown_cost,
            summary="FlashAttention-2 in plain Triton: every feature, every NVIDIA GPU from sm80",
        ),
        host.BACKWARD.variant(
            "triton_fa2_backward",
            op="attention_backward",
            requires=Requires(
                **_CLAIMS, grad_lse=True, rule=configs.backward_reasons, shared_memory=configs.backward_shared_memory
            ),
            design=Design(pipeline_stages=2),
            design_of=partial(tiled, part="KEY"),  # the longer pass: its traits stand for both
            configs=configs.backward_configs,
            cost=unknown_cost,
            summary="Its gradients in two passes without atomics: the same bits on every run",
        ),
        *stored.VARIANTS,
    ]
