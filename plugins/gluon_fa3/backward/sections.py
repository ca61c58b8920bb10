"""How many heads' tiles take turns, and with that what of their queries stays in the L2 cache.

Tiles go by sections of heads: inside one, all heads' first tiles come before their second ones. Tiles of a head read
the same queries and add to the same dQ. They start together, but drift apart where tiles before them took unequally
long, and then each brings the queries for itself: of 16 heads an H100's memory cannot bring that. With few heads more
blocks work on each, and what is left to the end may be too few tiles for all SMs.

Measured facts. NVIDIA H100, torch 2.11, triton 3.6.0, bf16; ratios of times, single launches back to back, the median
of 4 shuffled rounds (benchmarks/results/h100/sections.json)
  heads in turns          30 long or notable shapes, over 16 heads: 12 0.965 by geometric mean, 8 0.956, 4 0.944, 2
                          0.951, 1 0.959, 33 1.148. 4 x 32/8 heads of 8k, causal: 4 heads 0.71; D64 full 16k 0.80; but
                          few tiles at the end cost as much: 32/8 heads of 2k, causal, 4 heads 1.14
  two speeds              23 x 8/2 heads of 5,314: 16 heads 0.95 to 1.41 of their own median, 4 heads 0.91 to 0.99
  48 random shapes        over 16 heads, with what remains at the end shared out otherwise than today: order "any",
                          last sections of 1, 1.25, 1.5, 2 tiles an SM 0.981, 0.971, 0.970, 0.980; as it is today, on
                          the 42 of them on which one of these has as many heads, 0.970 (0.72 to 1.11). "fixed", of
                          16 MiB and 2 tiles 0.972 (0.60 to 1.13, at head dim 64)
"""

from __future__ import annotations

from typing import Any

from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.toolbox.sections import section_of

HELD = {False: 16 << 20, True: 64 << 20}  # bytes of a section; in a fixed order, where tiles follow each other closely
SHARE_A_HEAD = 8  # blocks
SECTION = 32 << 20


def head_bytes(problem: Any, queries: int) -> int:
    """What the tiles of a head read and add to besides their own: Q, dO and dQ's sums of `queries`."""
    return max(queries, 1) * (6 * padded(problem.head_dim) + 2 * padded(problem.head_dim_v))


def heads_in_turns(problem: Any, heads: int, key_blocks: int, of_a_head: int, ordered: bool) -> int:
    """What the cache holds; where tiles are unlike, at least so many heads that the last section has a tile an SM."""
    sms, least = problem.target.sm_count, 2
    left, right = window_bounds(problem.causal, problem.window)
    if (left < UNLIMITED) != (right < UNLIMITED):
        least = -(-sms // max(key_blocks, 1))
    return section_of(heads, max(HELD[ordered] // of_a_head, least), key_blocks, sms)


def packed_heads_in_turns(problem: Any, key_blocks: int, of_a_head: int, ordered: bool) -> int:
    """Of sequences end to end. With an eighth of the SMs, some blocks work on one head at a time. In a fixed order they
    wait for each other, so that short heads are better more at once: a quarter, or what fits the cache."""
    sms = problem.target.sm_count
    shared = max(sms // SHARE_A_HEAD, 1)
    if not ordered:
        return int(shared)
    return int(max(shared, min(sms * SHARE_A_HEAD // max(key_blocks, 1), sms // 4), SECTION // of_a_head))
