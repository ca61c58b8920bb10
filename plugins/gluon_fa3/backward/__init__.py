"""`gluon_fa3_backward`: the gradients of attention on Hopper, in the shape of FlashAttention-3's.

TMA producer -> two matrix warp groups, each with its keys -> a warp for each that takes the gradients to memory and
adds dQ up: a chain of three tasks. Reading order: traits.py, kernel.py, group.py, terms.py, scores.py, signals.py,
helpers.py, schedule.py, sections.py, sums.py, host.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry import Design, Requires
from registry.plugins.gluon_fa3.backward import host
from registry.plugins.gluon_fa3.backward.traits import GROUPS, configs, registers, rule, shared_memory
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import specialised


def design_of(config: Mapping[str, Any]) -> Design:
    return specialised(
        (config["BLOCK_M"], config["BLOCK_N"]),
        config["stages"],
        groups=GROUPS,
        tasks=3 if config["method"] == "sums" else 2,
        persistent=False,
    )


VARIANT = host.HOST.variant(
    "gluon_fa3_backward",
    op="attention_backward",
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
