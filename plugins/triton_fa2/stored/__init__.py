"""Attention and gradients by way of memory: P, and dS, are found once, kept in 16 bits, and products read them.

Gradients take five matrix products in all, where passes that keep nothing take seven, and for heads over 256 as many
again for each part of a head that a block can hold; so does attention itself there. What is kept is as large as the
scores, so it comes in chunks: of heads and keys, or of heads and rows.

`triton_stored_backward`   everything in plain Triton, for any GPU from sm80
`gluon_stored_backward`    Hopper: two persistent kernels of a producer warp and two warp groups, one that finds P and
                           dS, one for all three products
`gluon_stored`             attention of heads over 256 on Hopper, in the same way: one that finds P, one for P V

Reading order: weights.py, product.py; pieces.py, specialised_weights.py, specialised_product.py, host.py;
specialised_scores.py, specialised_output.py, forward_host.py; configs.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from registry import Design, Requires
from registry.plugins.triton_fa2.stored import configs, forward_host, host
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import specialised, tiled

_CLAIMS: dict[str, Any] = dict(
    dtypes=("float16", "bfloat16"),
    deterministic=True,
    head_dim_multiple=8,
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
)
_TILE = (128, 256)

VARIANTS = [
    forward_host.GLUON.variant(
        "gluon_stored",
        op="attention",
        requires=Requires(
            **{name: claim for name, claim in _CLAIMS.items() if name != "grad_lse"},
            arch=("sm90",),
            head_dim=(264, 576),
            head_dim_v=(64, 1024),
            shared_memory=configs.forward_shared_memory,
            registers=configs.gluon_registers,
            rule=configs.forward_rule,
        ),
        design=specialised((128, 128), 3, tasks=3, persistent=True),
        design_of=lambda config: specialised((128, 128), config["weights_stages"], tasks=3, persistent=True),
        configs=configs.forward_configs,
        cost=unknown_cost,
        summary="Heads over 256 on Hopper: probabilities in memory, in 16 bits, and one product of them",
    ),
    host.TRITON.variant(
        "triton_stored_backward",
        op="attention_backward",
        requires=Requires(
            **_CLAIMS,
            arch=("sm80+",),
            head_dim=(264, 1024),
            head_dim_v=(8, 1024),
            shared_memory=configs.triton_shared_memory,
        ),
        design=Design(pipeline_stages=3),
        design_of=partial(tiled, part="WEIGHTS"),
        configs=configs.triton_configs,
        cost=unknown_cost,
        summary="Gradients of heads over 256: P and dS in memory, in 16 bits, and three products of them",
    ),
    host.GLUON.variant(
        "gluon_stored_backward",
        op="attention_backward",
        requires=Requires(
            **_CLAIMS,
            arch=("sm90",),
            head_dim=(64, 1024),
            head_dim_v=(64, 1024),
            shared_memory=configs.gluon_shared_memory,
            registers=configs.gluon_registers,
            rule=configs.gluon_rule,
        ),
        design=specialised(_TILE, 3, tasks=3, persistent=True),
        design_of=lambda config: specialised(_TILE, config["weights_stages"], tasks=3, persistent=True),
        configs=configs.gluon_configs,
        cost=unknown_cost,
        summary="The same on Hopper: the fastest from head dim 192 on, and where key heads are few",
    ),
]
