"""`gluon_fa3_varlen_backward`: gluon_fa3_backward over sequences packed end to end.

list (tile_list.py)      the blocks of keys, those that the most queries may see first; for sweeps, of queries too
before (sums.py)         delta, LSE, zeroes, for each block of queries
main (kernel.py)         five products; beyond 128 columns a sweep for each gradient
after (sums.py)          dQ from the order of the registers to rows, and dK and dV of tiles in parts
sinks                    their gradient, from the delta of `before` (registry/ops/attention_varlen/sink_pass.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from registry import Reason, Requires
from registry.ops.attention_varlen.calls import BACKWARD
from registry.plugins.gluon_fa3.backward import VARIANT as DENSE
from registry.plugins.gluon_fa3.backward import traits
from registry.plugins.gluon_fa3.backward.sections import ask_memory, unlike
from registry.plugins.gluon_fa3.backward.traits import (
    KEYS,
    MEMORY,
    SUMS_STEPS,
    TILE_STEPS,
    SumsTraits,
    SweepTraits,
    divisions,
)
from registry.plugins.gluon_fa3.claims import CLAIMS
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.plugins.gluon_fa3.varlen.configs import rows_rule
from registry.plugins.gluon_fa3.varlen.gradients import one_kernel, sweeps
from registry.toolbox.call import Call, Host, Operands

FEW_STEPS = 64  # of the longest sequence's tiles
NEAR = 1.15
# What a tile in parts costs was fitted to the times of 33 batches with 1, 2 and 4 parts (varlen_backward_gluon.txt).
# With any divisor, 16 others take 1.025 of their best number's time, at most 1.19 (varlen_parts.json); with powers of
# two 1.51, up to 5.7


def configs(problem: Any) -> list[dict[str, Any]]:
    """Those of dense tensors; at 64 columns those with two tiles in flight first, and where the sequences are short in
    the mean, those of 64 rows a step before them: less is zeroed, added to and read again for rows that are not."""
    made = traits.configs(problem)
    if _wide(problem) > 64:
        return made
    made = sorted(made, key=lambda config: (config["order"], config["stages"]))
    short = not problem.softcap and problem.total_q <= 2 * KEYS * problem.batch
    return [{**config, "BLOCK_M": KEYS} for config in made if short] + made


def traits_of(problem: Any, config: Mapping[str, Any]) -> SumsTraits:
    """The main kernel that `config` means for `problem`."""
    known = {"mask": _mask(problem), "parts": parts_of(problem, config), "drawn": draws(problem, config)}
    return traits.sums_with(problem, config, packed=True, **known)


def draws(problem: Any, config: Mapping[str, Any]) -> bool:
    """Whether a block of an SM draws tiles, as of dense tensors. With a cap or a left bound the steady loop spills."""
    steps = problem.max_seqlen_q * problem.heads_q // problem.heads_kv / config["BLOCK_M"]
    spills = bool(problem.softcap) or _mask(problem) == "band"
    return not spills and (_wide(problem) == 64 or steps <= FEW_STEPS)


def sweeps_of(problem: Any, config: Mapping[str, Any]) -> list[SweepTraits]:
    """Those of the three gradients."""
    first, *more = traits.sweeps_with(problem, config, mask=_mask(problem), packed=True)
    return [first, *(replace(t, follows=False) for t in more)]


def _wide(problem: Any) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def _mask(problem: Any) -> str:
    """Keys past a sequence's end are always hidden."""
    left, _ = window_bounds(problem.causal, problem.window)
    return "band" if left < UNLIMITED else "from"


def parts_of(problem: Any, config: Mapping[str, Any]) -> int:
    """Blocks for a tile, as of dense tensors: as few as come near the best of these times, in steps. All SMs are done
    when the work is, if it can be shared, and not before the longest sequence's tiles: one after the other where these
    are alike, any of them where one bound cuts. Short sequences' tiles are divided too, which costs more than it
    brings. Of the lengths the host knows the longest and the sum: the others are taken to be even."""
    group, sms = problem.heads_q // problem.heads_kv, max(problem.target.sm_count, 1)
    alike = not unlike(problem)
    ordered = config["order"] == "fixed"
    rest = max(problem.batch - 1, 1)
    others_q = max(problem.total_q - problem.max_seqlen_q, 0) / rest
    others_k = max(problem.total_k - problem.max_seqlen_k, 0) / rest
    steps = max(-(-problem.max_seqlen_q // config["BLOCK_M"]), 1) * group
    longest = -(-problem.max_seqlen_k // config["BLOCK_N"])
    long_tiles = longest * problem.heads_kv
    short_tiles = rest * math.ceil(others_k / config["BLOCK_N"]) * problem.heads_kv
    tiles = long_tiles + short_tiles
    work = (steps * long_tiles + others_q / config["BLOCK_M"] * group * short_tiles) * (1.0 if alike else 0.5)
    times = {}
    for parts in divisions(problem, ordered):
        rounds = -(-long_tiles * parts // sms) if alike else 1
        shared = (work + TILE_STEPS * parts * tiles) / sms
        if not ordered and ask_memory(
            problem, problem.heads_kv * parts, longest, problem.max_seqlen_q * group // parts
        ):
            shared *= MEMORY
        times[parts] = max(shared, rounds * (steps / parts + TILE_STEPS))
        times[parts] += SUMS_STEPS * _wide(problem) / 128 * tiles / sms if parts > 1 else 0.0
    return next(parts for parts, time in times.items() if time <= NEAR * min(times.values()))


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets, and what a tensor map cannot count."""
    yield from traits.rule(problem, config)
    yield from rows_rule(problem)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    if config["method"] == "sweeps":
        return sweeps(problem, config["BLOCK_M"], sweeps_of(problem, config), given)
    return one_kernel(problem, traits_of(problem, config), given)


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    if config["method"] == "sweeps":
        return max(t.shared_memory for t in sweeps_of(problem, config))
    return traits_of(problem, config).shared_memory


HOST = Host(BACKWARD, call, contiguous=("lse", "grad_lse"))
VARIANT = HOST.variant(
    "gluon_fa3_varlen_backward",
    op="attention_varlen_backward",
    requires=Requires(
        **CLAIMS,
        kv_layouts=("packed",),
        grad_lse=True,
        sinks=True,
        checks_lengths=True,
        shared_memory=shared_memory,
        registers=traits.registers,
        rule=rule,
    ),
    design=DENSE.design,
    configs=configs,
    design_of=DENSE.design_of,
    summary="gluon_fa3_backward over packed sequences",
)
