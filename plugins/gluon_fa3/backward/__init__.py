"""`gluon_fa3_backward`: the gradients of attention on Hopper, in the shape of FlashAttention-3's.

TMA producer -> two matrix warp groups, each with its keys -> a warp for each that takes the gradients to memory and
adds dQ up: a chain of three tasks. Reading order: traits.py, kernel.py, group.py, terms.py, scores.py, signals.py,
helpers.py, schedule.py, sums.py, host.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry import Design, Requires, Variant
from registry.plugins.gluon_fa3.backward import host
from registry.plugins.gluon_fa3.backward.traits import GROUPS, configs, registers, rule, shared_memory
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.toolbox.costs import unknown_cost


def design_of(config: Mapping[str, Any]) -> Design:
    return Design(
        warp_groups=GROUPS,
        pipeline_stages=config["stages"],
        warp_specialized=True,
        pipeline_tasks=3 if config["method"] == "sums" else 2,
        tile=(config["BLOCK_M"], config["BLOCK_N"]),
        dsl="gluon",
    )


VARIANT = Variant(
    "gluon_fa3_backward",
    op="attention_backward",
    run=host.HOST.run,
    prepare=host.HOST.prepare,
    builds=host.HOST.builds,
    requires=Requires(
        **CLAIMS,
        layouts=("bhsd", "bshd", "strided"),
        grad_lse=True,
        cross_length=True,
        shared_memory=shared_memory,
        registers=registers,
        rule=rule,
    ),
    design=Design(warp_groups=GROUPS, pipeline_stages=3, warp_specialized=True, pipeline_tasks=3, dsl="gluon"),
    configs=configs,
    cost=unknown_cost,
    design_of=design_of,
    summary="Its gradients: TMA producer, two matrix warp groups, and warps that add dQ up in float32",
)
