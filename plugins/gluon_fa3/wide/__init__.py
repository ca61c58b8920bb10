"""`gluon_fa3_wide`: heads over 256, in gluon_fa3's shape.

Reading order: traits.py, kernel.py, consumer.py, products.py, tiles.py, host.py.
"""

from __future__ import annotations

from registry import Requires, Variant
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.wide import host
from registry.plugins.gluon_fa3.wide.traits import configs, design_of, registers, rule, shared_memory
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import specialised

VARIANT = Variant(
    "gluon_fa3_wide",
    op="attention",
    run=host.HOST.run,
    prepare=host.HOST.prepare,
    builds=host.HOST.builds,
    requires=Requires(
        **CLAIMS | {"head_dim": (264, 576), "head_dim_v": (8, 512)},
        layouts=("bhsd", "bshd", "strided"),
        cross_length=True,
        shared_memory=shared_memory,
        registers=registers,
        rule=rule,
    ),
    design=specialised((128, 64), 2, tasks=3),
    configs=configs,
    cost=unknown_cost,
    design_of=design_of,
    summary="gluon_fa3 for heads over 256: a head in pieces, and values over 256 as two tiles",
)
