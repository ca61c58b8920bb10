"""Attention over ragged batches in plain Triton: packed, cached or paged, every feature, every GPU from sm80 on.

Its files:
    lengths.py      how long each sequence is, and which tile a program has; nothing is read beyond
    keys.py         where keys lie: packed, in a cache, or in pages of any size
    rows.py         the rows of a tile: queries, and the heads that share a key head
    scores.py       scale, cap, alibi, masks, sinks, and one step of the streaming softmax
    prefill.py      forward: one program a tile          split.py      forward: the keys shared out among all SMs
    dense.py        the same where all sequences are as long: attention of few queries over many keys
    query_pass.py   backward: dQ                         key_pass.py   backward: dK and dV
    switches.py     what is fixed when a kernel is compiled
    host.py         the call of each launch              configs.py    tiles, warps, stages, and what they need
"""

from __future__ import annotations

from functools import partial
from typing import Any

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.triton_varlen import configs, dense_cost, dense_host, host
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
    causal=True,
    window=True,
    softcap=True,
    gqa=True,
    lse=True,
    toolchain={"triton": ">=3.6,<4"},
)
_RAGGED_CLAIMS: dict[str, Any] = dict(**_CLAIMS, sinks=True, alibi=True, checks_lengths=True)
_FORWARD_CLAIMS: dict[str, Any] = dict(
    **_RAGGED_CLAIMS,
    kv_layouts=("packed", "cache", "paged"),
    page_size=(1, 1 << 20),
    kv_dtypes=("float8_e4m3fn", "int8"),
    kv_scales=("tensor", "head", "token"),
    out=True,
    rule=configs.quantised_reasons,
    shared_memory=configs.forward_shared_memory,
)


@hookimpl
def registry_variants() -> list[Variant]:
    return [
        host.PREFILL.variant(
            "triton_varlen",
            op="attention_varlen",
            requires=Requires(**_FORWARD_CLAIMS),
            design=Design(pipeline_stages=3),
            design_of=tiled,
            configs=configs.prefill_configs,
            cost=unknown_cost,
            summary="one program a tile of rows: training and prompts, every feature, any page size",
        ),
        host.SPLIT.variant(
            "triton_varlen_split",
            op="attention_varlen",
            requires=Requires(**_FORWARD_CLAIMS),
            design=Design(pipeline_stages=3, persistent=True),
            design_of=partial(tiled, persistent=True),
            configs=configs.split_configs,
            cost=unknown_cost,
            summary="the keys of all sequences shared out equally among all SMs, in one launch: decoding",
        ),
        dense_host.FORWARD.variant(
            "triton_split",
            op="attention",
            requires=Requires(
                **_CLAIMS,
                layouts=("bhsd", "bshd", "strided"),
                cross_length=True,
                rule=dense_host.reasons,
                shared_memory=dense_host.shared_memory,
            ),
            design=Design(pipeline_stages=3, persistent=True),
            design_of=partial(tiled, persistent=True),
            configs=dense_host.tiles,
            cost=dense_cost.cost,
            summary="few queries over many keys, shared out equally among all SMs in one launch: decoding",
        ),
        host.BACKWARD.variant(
            "triton_varlen_backward",
            op="attention_varlen_backward",
            requires=Requires(
                **_RAGGED_CLAIMS,
                kv_layouts=("packed",),
                grad_lse=True,
                rule=configs.backward_reasons,
                shared_memory=configs.backward_shared_memory,
            ),
            design=Design(pipeline_stages=2),
            design_of=partial(tiled, part="KEY"),  # the longer pass: its traits stand for both
            configs=configs.backward_configs,
            summary="gradients in two passes without atomics: the same bits on every run",
        ),
    ]
