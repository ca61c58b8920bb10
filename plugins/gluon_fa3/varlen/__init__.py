"""`gluon_fa3_varlen`: gluon_fa3's kernel over sequences packed end to end, as training and prompts have them.

Reading order: tile_list.py (which tiles there are, found on the device), ../places.py (where they lie), kernel.py,
configs.py, host.py; the roles are gluon_fa3's.
"""

from __future__ import annotations

from registry import Requires, Variant
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.configs import design_of
from registry.plugins.gluon_fa3.varlen import host
from registry.plugins.gluon_fa3.varlen.configs import configs, registers, rule, shared_memory
from registry.toolbox.costs import unknown_cost
from registry.toolbox.designs import specialised

VARIANT = Variant(
    "gluon_fa3_varlen",
    op="attention_varlen",
    run=host.run,
    prepare=host.prepare,
    builds=host.ALONE.builds,
    schedule=host.schedule,
    requires=Requires(
        **CLAIMS,
        kv_layouts=("packed",),
        out=True,
        checks_lengths=True,
        shared_memory=shared_memory,
        registers=registers,
        rule=rule,
    ),
    design=specialised((128, 128), 2, tasks=3),
    configs=configs,
    cost=unknown_cost,
    design_of=design_of,
    summary="gluon_fa3 over packed sequences: its tiles come from a list that the device makes of the lengths",
)
