"""How many heads' tiles take turns, and with that what of their queries stays in the L2 cache. No import of Triton.

Tiles go by sections of heads: inside one, all heads' first tiles come before their second ones. A config says which:

without "sections"      as many heads as leave each some blocks, whatever their lengths
"sections": "cached"    as many as the L2 cache holds of what their tiles read and add to, or fewer SMs would be busy at
                        the end; listed where that is another number

Tiles of a head read the same queries and add to the same dQ. They start together, but drift apart where tiles before
them took unequally long, and then each brings the queries for itself: of 16 heads an H100's memory cannot bring that.

Measured facts. NVIDIA H100, torch 2.11, triton 3.6.0, bf16; "cached" over the other, single launches back to back, the
median of 4 shuffled rounds (benchmarks/results/h100/backward_sections.txt)
  heads in turns          30 long or notable shapes, over 16 heads: 12 0.965 by geometric mean, 8 0.956, 4 0.944, 2
                          0.951, 1 0.959, 33 1.148. 4 x 32/8 heads of 8k, causal: 4 heads 0.71; D64 full 16k 0.80; but
                          few tiles at the end cost as much: 32/8 heads of 2k, causal, 4 heads 1.14
  two speeds              23 x 8/2 heads of 5,314: 16 heads 0.95 to 1.41 of their own median, 4 heads 0.91 to 0.99
  48 random shapes        order "any": last sections of 1, 1.25, 1.5, 2 tiles an SM 0.981, 0.971, 0.970 (0.72 to 1.11),
                          0.980; "fixed", 16 MiB: of 2 0.972 (0.60 to 1.13), but head dim 64 up to 1.13
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Reason
from registry.plugins.gluon_fa3.backward import traits
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.toolbox.sections import section_of

SHARE_A_HEAD = 8  # blocks
SECTION = 32 << 20  # bytes of Q, dO and dQ's sums that a section of heads may take: what stays in a 50 MB L2 cache
CACHED = {False: 16 << 20, True: 64 << 20}  # where each tile follows the one before it, they stay together for longer
TILES_AN_SM = {False: 1.5, True: 2.0}  # of the last section, where tiles are unlike
PREFERENCE = {"order": 1.5, "sections": 1.0, "stages": 0.9}
"""Configs go by the sum of these: for a fixed order, for sections that are not "cached" where those are others, and for
fewer stages."""


def head_bytes(problem: Any, queries: int) -> int:
    """What the tiles of a head read and add to besides their own, of `queries` in all query heads that share it."""
    return max(queries, 1) * (6 * padded(problem.head_dim) + 2 * padded(problem.head_dim_v))


def shared_section(problem: Any, key_blocks: int, of_a_head: int, ordered: bool) -> int:
    """With an eighth of the SMs, some blocks work on one head at a time. In a fixed order they wait for each other, so
    that short heads are better more at once: a quarter, or what fits the cache."""
    sm_count = problem.target.sm_count
    shared = max(sm_count // SHARE_A_HEAD, 1)
    if not ordered:
        return int(shared)
    return int(max(shared, min(sm_count * SHARE_A_HEAD // max(key_blocks, 1), sm_count // 4), SECTION // of_a_head))


def cached_section(problem: Any, heads: int, key_blocks: int, of_a_head: int, ordered: bool) -> int:
    """What fits the cache; where tiles are unlike, so many heads that the last section keeps all SMs busy."""
    left, right = window_bounds(problem.causal, problem.window)
    least = 2
    if (left < UNLIMITED) != (right < UNLIMITED):
        least = -int(-TILES_AN_SM[ordered] * problem.target.sm_count // max(key_blocks, 1))
    return section_of(heads, max(CACHED[ordered] // of_a_head, least), key_blocks, problem.target.sm_count)


def heads_in_turns(problem: Any, config: Mapping[str, Any], parts: int) -> int:
    """Of a section of dense tensors, counted as parts of heads."""
    key_blocks, heads = -(-problem.seqlen_k // config["BLOCK_N"]), problem.batch * problem.heads_kv * parts
    of_a_head = head_bytes(problem, problem.heads_q // problem.heads_kv // parts * problem.seqlen_q)
    ordered = config["order"] == "fixed"
    if config.get("sections") == "cached":
        return cached_section(problem, heads, key_blocks, of_a_head, ordered)
    return min(shared_section(problem, key_blocks, of_a_head, ordered), heads)


def configs(problem: Any) -> list[dict[str, Any]]:
    """Those of packed sequences, and with "cached" sections where these are others; the better first."""
    made = traits.configs(problem)
    others = {}  # by order: whether
    for config in made:
        if config["method"] == "sums" and config["order"] not in others:
            parts = traits.parts_of(problem, config)
            cached = {**config, "sections": "cached"}
            others[config["order"]] = heads_in_turns(problem, cached, parts) != heads_in_turns(problem, config, parts)
    most = max(config["stages"] for config in made)
    made += [{**config, "sections": "cached"} for config in made if others.get(config["order"])]

    def preference(config: dict[str, Any]) -> float:
        less = {"order": config["order"] == "fixed", "stages": config["stages"] < most}
        less["sections"] = "sections" not in config and others.get(config["order"], False)
        return sum(PREFERENCE[name] for name, is_so in less.items() if is_so)

    return sorted(made, key=preference)


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets."""
    yield from traits.rule(problem, config)
    allowed = (None, "cached") if config.get("method") == "sums" else (None,)
    if config.get("sections") not in allowed:
        yield Reason("config", "sections", config["sections"], "cached, or none" if len(allowed) > 1 else "none")
