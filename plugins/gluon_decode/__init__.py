"""Decoding for Hopper in Gluon: few queries over the keys of a cache or of pages, `gluon_decode`.

Reading order: traits.py, kernel.py, line.py (which keys are whose), producer.py, consumer.py, parts.py, host.py.
"""

from __future__ import annotations

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.gluon_decode import host, traits
from registry.toolbox.costs import unknown_cost

VARIANT = Variant(
    "gluon_decode",
    op="attention_varlen",
    run=host.HOST.run,
    prepare=host.HOST.prepare,
    builds=host.HOST.builds,
    requires=Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16"),
        head_dim=(8, 256),
        head_dim_multiple=8,
        base_alignment=16,  # of a tensor map's address
        stride_alignment=16,  # and of each of its strides
        kv_layouts=("cache", "paged"),
        page_size=(traits.PAGES, 1 << 20),
        page_size_multiple=traits.PAGES,
        kv_dtypes=("float8_e4m3fn", "int8"),
        kv_scales=("tensor", "head"),
        causal=True,
        window=True,
        softcap=True,
        gqa=True,
        sinks=True,
        lse=True,
        out=True,
        deterministic=True,
        checks_lengths=True,
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=traits.shared_memory,
        registers=traits.registers,
        rule=traits.rule,
    ),
    design=Design(
        warp_groups=1,
        pipeline_stages=3,
        warp_specialized=True,
        pipeline_tasks=2,
        tile=(64, 8),
        persistent=True,
        dsl="gluon",
    ),
    configs=traits.configs,
    cost=unknown_cost,
    design_of=traits.design_of,
    summary="decoding for Hopper in Gluon: a TMA producer over pages, swapped wgmma operands, keys shared out equally",
)


@hookimpl
def registry_variants() -> list[Variant]:
    return [VARIANT]
