"""`triton_fa2_wide_backward`: gradients of heads over 256, of which no tile's rows fit a block of the GPU.

P and dS go to memory once, in 16 bits, and three products read them: five matrix products in all, as many as with
atomics, where passes that keep nothing would take seven and twice as many for halves of a head. Both are as large as
the scores in 16 bits, so heads come in chunks. Reading order: weights.py, product.py, host.py, configs.py.
"""

from __future__ import annotations

from functools import partial

from registry import Design, Requires
from registry.plugins.triton_fa2.wide import configs, host
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import tiled

VARIANT = host.HOST.variant(
    "triton_fa2_wide_backward",
    op="attention_backward",
    requires=Requires(
        arch=("sm80+",),
        dtypes=("float16", "bfloat16"),
        deterministic=True,
        head_dim=(264, 1024),
        head_dim_multiple=8,
        head_dim_v=(8, 1024),
        head_dim_v_multiple=8,
        layouts=("bhsd", "bshd", "strided"),
        base_alignment=16,
        stride_alignment=16,
        causal=True,
        window=True,
        softcap=True,
        gqa=True,
        lse=True,
        grad_lse=True,
        cross_length=True,
        toolchain={"triton": ">=3.6,<4"},
        rule=configs.rule,
        shared_memory=configs.shared_memory,
    ),
    design=Design(pipeline_stages=3),
    design_of=partial(tiled, part="WEIGHTS"),
    configs=configs.configs,
    cost=unknown_cost,
    summary="Gradients of heads over 256: P and dS in memory, in 16 bits, and three products of them",
)
