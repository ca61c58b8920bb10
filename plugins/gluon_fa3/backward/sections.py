"""How many heads' tiles take turns, and with that what of their queries stays in the L2 cache.

Tiles go by sections of heads: inside one, all heads' first tiles come before their second ones. Tiles of a head read
the same queries and add to the same dQ. They start together, but drift apart where tiles before them took unequally
long, and then each brings the queries for itself: of 16 heads an H100's memory cannot bring that. With few heads more
blocks work on each, and what is left to the end may be too few tiles for all SMs.

Measured facts. NVIDIA H100, torch 2.11, triton 3.6.0, bf16; ratios of times to those of 16 heads (where tiles wait for
each other: 16 to 33), single launches back to back, the median of 3 or 4 shuffled rounds (sections.json; the way of it
is benchmarks/head_sections.py)
  tiles alike             29 shapes, long and random: 1, 2, 3, 4, 8, 33 heads 0.945, 0.946, 0.940, 0.943, 0.963, 1.15 by
                          geometric mean, 4 heads 0.72 to 1.02; D64 16k 0.77 to 0.81 with 1 to 12
  unlike                  49 shapes: last sections of 0.75, 1, 1.5 tiles an SM 0.979, 0.957 (0.71 to 1.04), 0.961; 4 x
                          32/8 heads of 8k, causal, 0.71; all of 16k 0.94 to 1.05 with any number from 1 to 16
  two speeds              23 x 8/2 heads of 5,314: 16 heads 0.95 to 1.41 of their own median, 4 heads 0.91 to 0.99
  as many as the cache    16 MiB of what a head's tiles read and add to: the same for long heads; for short ones, many
  holds                   heads: 64 of 469 1.12, 400 of 160 1.09, for the tiles of one no longer run at the same time
  in a fixed order        16 MiB 0.975 (48 shapes), but up to 1.16 at head dim 64; 64 MiB 1.25 for 640 heads of 287.
                          What stands here was not measured by itself
  packed sequences        20 batches: 0.97 (0.86 to 1.02), in a fixed order 0.99 (0.87 to 1.02)
  many heads share keys   36 causal shapes on an H200, to what was launched before (shared_keys.json): 12 and more
                          heads to a key head 0.92 (0.82 to 1.03), 7 to 11 0.97 (0.85 to 1.06), 5 and 6 0.97. The best
                          division and number of each shape: 0.88, 0.93, 0.95
"""

from __future__ import annotations

from typing import Any

from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds
from registry.toolbox.sections import section_of

ALIKE = 4
HELD = 32 << 20  # bytes of Q, dO and dQ's sums that stay in a 50 MB L2 cache
SHARED = 8  # blocks of a head, at least
TURNS = 8
WALKED = 36 << 20  # bytes of them that running tiles of a causal mask walk over, and that still cost nothing
MANY = 2  # tiles an SM: of fewer most start together, and have no time to drift apart


def unlike(problem: Any) -> bool:
    """Whether a mask lets some tiles see more queries than others, which then drift apart."""
    left, right = window_bounds(problem.causal, problem.window)
    return (left < UNLIMITED) != (right < UNLIMITED)


def _row_bytes(problem: Any) -> int:
    return 6 * padded(problem.head_dim) + 2 * padded(problem.head_dim_v)


def ask_memory(problem: Any, heads: int, key_blocks: int, queries: int) -> bool:
    """Whether the tiles that run at a time walk over more than the cache holds, where they drift apart. The mean tile
    sees half of its head's queries. It is a matter of how many heads share keys and not of lengths, for long heads have
    as many tiles more."""
    sms = problem.target.sm_count
    if heads * key_blocks < MANY * sms or not unlike(problem):
        return False
    return sms / key_blocks * queries * _row_bytes(problem) / 2 > WALKED


def heads_in_turns(problem: Any, heads: int, key_blocks: int, queries: int, ordered: bool) -> int:
    """Few; where tiles are unlike, so many that their tiles are one for each SM. `queries` are those that see a key, of
    all heads that share it. In a fixed order tiles follow each other closely: then more, as far as what they read and
    add to fits the cache, and up to three times that where some blocks share a head."""
    sms = max(problem.target.sm_count, SHARED)
    if key_blocks <= 1 or heads * key_blocks <= sms:  # all start at once, or by heads: in any order
        return heads if ordered else min(heads, sms // SHARED)
    differ = unlike(problem)
    least = max(-(-sms // max(key_blocks, 1)), 2) if differ else ALIKE
    if ordered:
        of_a_head = max(queries, 1) * _row_bytes(problem)
        least = max(HELD // of_a_head, min(3 * HELD // of_a_head, sms // SHARED), least)
    elif ask_memory(problem, heads, key_blocks, queries):
        least = min(least, TURNS)
    return section_of(heads, least, key_blocks, sms) if differ else min(least, heads)
