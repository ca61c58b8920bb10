"""`gluon_fa3_varlen`: gluon_fa3's kernel over sequences packed end to end, as training and prompts have them, and
`gluon_fa3_cached`: over keys in a cache or on pages, as prompts of engines have them that serve.

Reading order: tile_list.py (which tiles there are, found on the device), cached_list.py, ../places.py (where they lie),
../pages.py, kernel.py, parts.py (keys shared out among tiles), configs.py, host.py; the roles are gluon_fa3's.
"""

from __future__ import annotations

import dataclasses

from registry import Requires, Variant
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.configs import design_of
from registry.plugins.gluon_fa3.varlen import host
from registry.plugins.gluon_fa3.varlen.configs import cached_rule, configs, registers, rule, shared_memory
from registry.plugins.gluon_fa3.varlen.cost import cost
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
        sinks=True,
        out=True,
        checks_lengths=True,
        shared_memory=shared_memory,
        registers=registers,
        rule=rule,
    ),
    design=specialised((128, 128), 2, tasks=3),
    configs=configs,
    cost=cost,
    design_of=design_of,
    summary="gluon_fa3 over packed sequences: its tiles come from a list that the device makes of the lengths",
)

PAGES = 8  # page sizes are multiples of it: a swizzle repeats after so many rows of a box

CACHED = dataclasses.replace(
    VARIANT,
    name="gluon_fa3_cached",
    requires=dataclasses.replace(
        VARIANT.requires,
        kv_layouts=("cache", "paged"),
        page_size=(PAGES, 1 << 20),
        page_size_multiple=PAGES,
        rule=cached_rule,
    ),
    summary="gluon_fa3 over the keys of a cache or of pages, which a block's boxes come from one by one",
)
