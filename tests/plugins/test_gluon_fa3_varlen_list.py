"""The list of row blocks that gluon_fa3_varlen makes of a step's lengths, under Triton's interpreter.

This file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from again import INTERPRETED, run_interpreted

from registry.ops.attention_varlen.lengths import ABOVE_MAX_K, ABOVE_MAX_Q, BAD_CU_SEQLENS_K, BAD_CU_SEQLENS_Q

BLOCK_M = 128
UNTOUCHED = -7


def listed(cu_q, cu_k, total_q, total_k, most=(1 << 20, 1 << 20), of_keys=False, last_first=True):
    """(entries, the bits that were complained of); everything beyond the entries is untouched."""
    import interpreter  # noqa: F401

    from registry.plugins.gluon_fa3.varlen.tile_list import WORDS, list_row_blocks

    batch = len(cu_q) - 1
    room = total_q // BLOCK_M + batch
    found, word = torch.full((room + 2, WORDS.value), UNTOUCHED, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    q, k = (torch.tensor(starts, dtype=torch.int32) for starts in (cu_q, cu_k))
    sizes = (batch, total_q, total_k, *most, room)
    how = {"ROWS": BLOCK_M, "OTHERS": 64, "OF_KEYS": of_keys, "LAST_FIRST": last_first, "CHUNK": 32, "EARLY": False}
    list_row_blocks[(batch,)](q, k, found, word, *sizes, **how)
    count = int(found[0, 0])
    assert count <= room and found[max(count, 1) + 1 :].eq(UNTOUCHED).all()
    return found[1 : count + 1, :5].tolist(), int(word)


def expected(queries, keys):
    q_ends, k_ends = (list(itertools.accumulate(lengths)) for lengths in (queries, keys))
    order = sorted(range(len(queries)), key=lambda b: -keys[b])
    return [
        [m, q_ends[b], queries[b], keys[b], k_ends[b]]
        for b in order
        for m in reversed(range(-(-queries[b] // BLOCK_M)))
    ]


if INTERPRETED:

    @pytest.mark.parametrize("seed", range(4))
    def test_longest_first_whatever_the_lengths(seed):
        draw = random.Random(seed)
        queries = [draw.choice((0, 1, 127, 128, 129, 700)) for _ in range(draw.choice((1, 5, 40)))]
        keys = [draw.choice((0, 5, 64, 900)) for _ in queries]
        cu_q, cu_k = ([0, *itertools.accumulate(lengths)] for lengths in (queries, keys))
        found, wrong = listed(cu_q, cu_k, sum(queries), sum(keys))
        assert found == expected(queries, keys) and not wrong

    def test_no_queries_at_all_leave_a_tile_without_rows():
        found, wrong = listed([0, 0, 0], [0, 4, 9], 0, 9)
        assert found == [] and not wrong

    @pytest.mark.parametrize(
        "cu_q, cu_k, most, bits",
        [
            ([0, 300, 200, 331], [0, 4, 5, 9], 400, BAD_CU_SEQLENS_Q),
            ([0, 10, 20, 330], [0, 4, 5, 9], 400, BAD_CU_SEQLENS_Q),
            ([0, 10, 20, 331], [0, 4, 5, 900], 1000, BAD_CU_SEQLENS_K),
            ([0, 10, 20, 331], [-1, 4, 5, 9], 400, BAD_CU_SEQLENS_K),
            ([0, 331, 0, 331], [0, 9, 0, 9], 400, BAD_CU_SEQLENS_Q | BAD_CU_SEQLENS_K),
            ([0, 10, 20, 331], [0, 0, 0, 9], 5, ABOVE_MAX_Q | ABOVE_MAX_K),
        ],
    )
    def test_lengths_that_lie_name_nothing_that_is_not_there(cu_q, cu_k, most, bits):
        found, wrong = listed(cu_q, cu_k, 331, 9, (most, most))
        assert wrong == bits
        for m, q_end, queries, keys, k_end in found:
            assert 0 <= m * BLOCK_M < queries <= q_end <= 331 and 0 <= keys <= k_end <= 9

else:

    def test_under_the_interpreter():
        assert " passed" in run_interpreted(__file__)
