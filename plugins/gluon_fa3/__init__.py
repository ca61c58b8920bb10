"""Attention for Hopper in the shape of FlashAttention-3, written in Gluon: `gluon_fa3`,
`_backward`, `_varlen`, `_cached`.

Forward: a producer warp and two or three consumer warp groups, TMA and mbarriers, asynchronous wgmma with QK(i) beside
PV(i-1) and softmax, ping-pong, persistent. Reading order: traits.py, kernel.py, pipeline.py, schedule.py, tiles.py,
softmax.py, products.py, one_product.py, host.py. The gradients: backward/. Packed sequences, caches and pages: varlen/.
"""

from __future__ import annotations

from registry import Design, Requires, Variant, hookimpl
from registry.plugins.gluon_fa3 import backward, host, varlen, wide
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.configs import configs, design_of
from registry.plugins.gluon_fa3.cost import cost
from registry.plugins.gluon_fa3.traits import registers, rule, shared_memory
from registry.plugins.gluon_fa3.varlen import backward as packed_backward

VARIANT = Variant(
    "gluon_fa3",
    op="attention",
    run=host.HOST.run,
    prepare=host.HOST.prepare,
    builds=host.HOST.builds,
    requires=Requires(
        **CLAIMS,
        layouts=("bhsd", "bshd", "strided"),
        cross_length=True,
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
    cost=cost,
    design_of=design_of,
    summary="FlashAttention-3 for Hopper in Gluon: TMA producer, 1 to 3 wgmma consumer warp groups, persistent",
)


@hookimpl
def registry_variants() -> list[Variant]:
    return [VARIANT, wide.VARIANT, backward.VARIANT, varlen.VARIANT, varlen.CACHED, packed_backward.VARIANT]
