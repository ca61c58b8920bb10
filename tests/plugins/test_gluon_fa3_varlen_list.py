"""What gluon_fa3_varlen lists of a step's lengths, and how it adds parts up, under Triton's interpreter.

This file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
import torch
from again import INTERPRETED

from registry.ops.attention_varlen.lengths import (
    ABOVE_MAX_K,
    ABOVE_MAX_Q,
    BAD_CU_SEQLENS_K,
    BAD_CU_SEQLENS_Q,
    BAD_SEQUSED_K,
    BAD_TABLE,
)
from registry.plugins.gluon_fa3.varlen.configs import LEAST_BLOCKS, MOST_MORE

ROWS, OTHERS = 128, 64
N_KEYS, PLACES = 128, 33
MORE = MOST_MORE * PLACES
UNTOUCHED = -7


def listed(cu_rows, cu_others, total, total_others, most=(1 << 20, 1 << 20), of_keys=False, last_first=True, own=0):
    """(entries, the bits that were complained of); everything beyond the entries is untouched."""
    batch = len(cu_rows) - 1
    room = total // ROWS + batch
    found, word = torch.full((room + 2, WORDS.value), UNTOUCHED, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    starts = [torch.tensor(cu_seqlens, dtype=torch.int32) for cu_seqlens in (cu_rows, cu_others)]
    how = {"ROWS": ROWS, "OTHERS": OTHERS, "OWN": own, "OF_KEYS": of_keys, "LAST_FIRST": last_first}
    how |= {"CHUNK": 32, "EARLY": False}
    list_row_blocks[(batch,)](*starts, found, word, batch, total, total_others, *most, room, **how)
    count = int(found[0, 0])
    assert count <= room and found[count + 1 :].eq(UNTOUCHED).all()
    return found[1 : count + 1, :6].tolist(), int(word)


def listed_of_caches(cu_q, used, total, slots, most=(1 << 20, 1 << 20), table=None, page=0, pages=0):
    """The same of the list whose keys lie in a cache of `slots` keys each, or on pages."""
    batch = len(used)
    room = total // ROWS + batch
    found, word = torch.full((room + 2, WORDS.value), UNTOUCHED, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lengths = [torch.tensor(one, dtype=torch.int32) for one in (cu_q, used, table or [[0]])]
    numbers = (batch, total, slots, *most, room, lengths[2].stride(0), pages, slots + 5)
    how = {"ROWS": ROWS, "PAGE": page, "CHUNK": 32, "EARLY": False}
    list_cached_row_blocks[(batch,)](*lengths, found, word, *numbers, **how)
    count = int(found[0, 0])
    assert count <= room and found[count + 1 :].eq(UNTOUCHED).all()
    return found[1 : count + 1, :5].tolist(), int(word)


def shared(rows, keys, layout, total=None):
    """(entries, words of each token, complaints) of keys shared out among PLACES row blocks of all heads at once."""
    batch, page = len(rows), 16 if layout == "paged" else 0
    total = sum(rows) if total is None else total
    room = total // ROWS + batch + MORE
    start = (room + 1) * WORDS.value
    found = torch.full((start + total * TOKEN_WORDS.value,), UNTOUCHED, dtype=torch.int32)
    word = torch.zeros(1, dtype=torch.int32)
    lengths = [0, *itertools.accumulate(keys)] if layout == "packed" else keys
    tensors = [torch.tensor(one, dtype=torch.int32) for one in ([0, *itertools.accumulate(rows)], lengths)]
    table = torch.zeros(batch, 600, dtype=torch.int32)
    of_keys = sum(keys) if layout == "packed" else 9600
    numbers = (batch, total, of_keys, 1 << 20, 1 << 20, room, PLACES, total + ROWS * MORE, 1 << 29, 600, 1, 9600)
    how = {"ROWS": ROWS, "N": N_KEYS, "PACKED": layout == "packed", "PAGE": page, "CHUNK": 32}
    how |= {"BESIDE": 3.0, "EARLY": False}
    list_shares[(batch,)](*tensors, table, found, word, *numbers, **how)
    entries = found[:start].view(-1, WORDS.value)
    count = int(entries[0, 0])
    assert count <= room and entries[count + 1 :].eq(UNTOUCHED).all()
    return entries[1 : count + 1].tolist(), found[start:].view(total, TOKEN_WORDS.value).tolist(), int(word)


def span(tiles):
    """When the last of PLACES is done, if each takes the next tile when it is through with one."""
    until = [0] * PLACES
    for tile in tiles:
        heapq.heapreplace(until, until[0] + tile)
    return max(until)


def best_span(sequences):
    """The same by the best length of a share; of each sequence its blocks of keys, and of rows."""
    found = []
    for length in range(LEAST_BLOCKS, max(LEAST_BLOCKS, *(keys for keys, _ in sequences)) + 1):
        counts = [(keys, blocks, max(-(-keys // length), 1)) for keys, blocks in sorted(sequences, reverse=True)]
        found.append(span([-(-keys // n) + 3 for keys, blocks, n in counts for _ in range(blocks * n)]))
    return min(found)


def expected(rows, others, last_first, own=0):
    starts, ends = ([0, *itertools.accumulate(others)], list(itertools.accumulate(rows)))
    found = []
    for b in sorted(range(len(rows)), key=lambda b: -others[b]):
        blocks = range(-(-rows[b] // ROWS))
        for m in reversed(blocks) if last_first else blocks:
            first = (ends[b] - rows[b]) // own if own else starts[b] // OTHERS
            found.append([m, ends[b], rows[b], others[b], starts[b + 1], first + b])
    return found


def drawn(seed):
    draw = random.Random(seed)
    rows = [draw.choice((0, 1, 127, 128, 129, 700)) for _ in range(draw.choice((1, 5, 40)))]
    return rows, [draw.choice((0, 5, 64, 900)) for _ in rows]


if INTERPRETED:
    import interpreter  # noqa: F401
    import triton
    import triton.language as tl

    from registry.plugins.gluon_fa3.traits import PADDING
    from registry.plugins.gluon_fa3.varlen.cached_list import list_cached_row_blocks
    from registry.plugins.gluon_fa3.varlen.parts import add_parts
    from registry.plugins.gluon_fa3.varlen.share_list import TOKEN_WORDS, list_shares
    from registry.plugins.gluon_fa3.varlen.tile_list import WORDS, find_block, list_row_blocks

    @triton.jit
    def find_all(cu_seqlens, found, batch, total, ROWS: tl.constexpr):
        block = tl.program_id(0)
        m, begin, length, _ = find_block(block, cu_seqlens, batch, total, ROWS, 32)
        tl.store(found + block * 3, m)
        tl.store(found + block * 3 + 1, begin)
        tl.store(found + block * 3 + 2, length)

    @pytest.mark.parametrize("seed, last_first, own", [*itertools.product(range(4), (False, True), (0, 64))])
    def test_longest_first_whatever_the_lengths(seed, last_first, own):
        rows, others = drawn(seed)
        starts = ([0, *itertools.accumulate(lengths)] for lengths in (rows, others))
        found, wrong = listed(*starts, sum(rows), sum(others), last_first=last_first, own=own)
        assert found == expected(rows, others, last_first, own) and not wrong

    def test_no_rows_at_all_are_no_tile():
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
        for of_keys in (False, True):
            cu_rows, cu_others, total, others = (cu_k, cu_q, 9, 331) if of_keys else (cu_q, cu_k, 331, 9)
            found, wrong = listed(cu_rows, cu_others, total, others, (most, most), of_keys)
            assert wrong == bits
            for m, end, rows, other_rows, other_end, first_block in found:
                assert 0 <= m * ROWS < rows <= end <= total and 0 <= other_rows <= other_end <= others
                blocks = max(-(-other_rows // OTHERS), 1)
                assert 0 <= first_block <= others // OTHERS + len(cu_q) - 1 - blocks, "within the workspaces"

    @pytest.mark.parametrize("seed", range(4))
    def test_every_block_of_a_workspace_knows_its_sequence(seed):
        rows, _ = drawn(seed)
        starts = [0, *itertools.accumulate(rows)]
        blocks = sum(rows) // ROWS + len(rows)
        found = torch.full((blocks, 3), UNTOUCHED, dtype=torch.int32)
        find_all[(blocks,)](torch.tensor(starts, dtype=torch.int32), found, len(rows), sum(rows), ROWS=ROWS)
        seen = [(begin, m) for m, begin, length in found.tolist() if m * ROWS < length]
        wanted = [(starts[b], m) for b, length in enumerate(rows) for m in range(-(-length // ROWS))]
        assert sorted(seen) == sorted(wanted), "each block of rows once"
        for b, length in enumerate(rows):
            first = starts[b] // ROWS + b
            if length:
                assert found[first].tolist() == [0, starts[b], length]

    @pytest.mark.parametrize("seed, page", [*itertools.product(range(4), (0, 16))])
    def test_of_a_cache_or_of_pages(seed, page):
        rows, keys = drawn(seed)
        table = [[3] * 60 for _ in rows]
        found, wrong = listed_of_caches(
            [0, *itertools.accumulate(rows)], keys, sum(rows), 960, (700, 900), table, page, 4
        )
        wanted = []
        for m, end, queries, seen, _, number in expected(rows, keys, True, own=1 << 30):
            wanted.append([m, end, queries, seen, number if page else number * 965 + seen])
        assert found == wanted and not wrong

    @pytest.mark.parametrize(
        "cu_q, used, page, bits",
        [
            ([0, 9, 9, 331], [3, 900, 4], 0, BAD_SEQUSED_K),
            ([0, 9, 9, 331], [3, -1, 4], 16, BAD_SEQUSED_K),
            ([0, 9, 9, 331], [3, 60, 4], 0, ABOVE_MAX_K),
            ([0, 9, 400, 331], [3, 5, 4], 16, BAD_CU_SEQLENS_Q),
            ([0, 9, 9, 331], [3, 33, 4], 16, BAD_TABLE),
        ],
    )
    def test_a_cache_of_lies_names_nothing_that_is_not_there(cu_q, used, page, bits):
        table = [[0] * 5, [0, 1, 9, 9, 9], [0, -5, 0, 0, 0]]  # of 33 keys the third page is needed, of 4 the first
        found, wrong = listed_of_caches(cu_q, used, 331, 80, (331, 59), table, page, 4)
        assert wrong & bits and wrong & ~(bits | ABOVE_MAX_Q | ABOVE_MAX_K) == 0
        for m, end, queries, keys, place in found:
            assert 0 <= m * ROWS < queries <= end <= 331 and 0 <= keys <= 80
            assert 0 <= place < 3 if page else keys <= place <= 2 * 85 + 80

    @pytest.mark.parametrize("seed, layout", [*itertools.product(range(6), ("packed", "cache", "paged"))])
    def test_shares_hold_every_block_of_keys_once_and_fill_places(seed, layout):
        draw = random.Random(seed)
        rows = [draw.choice((0, 1, 40, 129)) for _ in range(draw.choice((1, 5, 40)))]
        keys = [draw.choice((0, 5, 640, 640, 9000)) for _ in rows]
        entries, tokens, wrong = shared(rows, keys, layout)
        blocks = {b: -(-n // ROWS) for b, n in enumerate(rows)}
        ends = [*itertools.accumulate(rows)]
        of = {}
        for m, end, queries, seen, _, _, word, part in entries:
            share, shares = word & 0xFFFF, word >> 16
            of.setdefault((end, queries, seen, m, shares), []).append((share, part))
        assert len(of) == sum(blocks.values()) and not wrong
        taken = set()
        for (end, queries, _, m, shares), found in of.items():
            assert sorted(share for share, _ in found) == [*range(shares)], "each share once"
            for share, part in found:
                first, apart = part - share * queries, queries
                for own in range(m * ROWS, min(m * ROWS + ROWS, queries)):
                    assert tokens[end - queries + own][:3] == [first + own, shares, apart]
                    assert first + own + share * apart not in taken
                    taken.add(first + own + share * apart)
        assert len(taken) == sum(rows) + sum(
            (shares - 1) * (min(m * ROWS + ROWS, queries) - m * ROWS) for (_, queries, _, m, shares) in of
        )
        assert max(taken, default=0) < sum(rows) + ROWS * MORE
        assert len(entries) <= sum(blocks.values()) + MORE and ends[-1] == len(tokens)
        found = [3 - (-seen // N_KEYS) // (word >> 16) for _, _, _, seen, _, _, word, _ in entries]
        alone = [(-(-keys[b] // N_KEYS), blocks[b]) for b in blocks]
        assert span(found) <= 1.3 * best_span(alone), "SMs are done at about the same time"

    def test_shares_of_lengths_that_lie_stay_within_the_memory_of_parts():
        entries, _, wrong = shared([300, 300, 300, 0], [9000, 640, 9000, 5], "cache", total=310)
        assert wrong & BAD_CU_SEQLENS_Q
        for _, end, queries, _, _, _, word, part in entries:
            assert queries <= end <= 310 and part >= 0 and part + queries <= 310 + ROWS * MORE
            assert (word & 0xFFFF) < (word >> 16)

    @pytest.mark.parametrize("sinks", [None, (0.5, -math.inf, math.inf), (-1e4, 300.0, -1e30)])
    @pytest.mark.parametrize("shares", [1, 5, 19])
    def test_parts_add_up_by_their_weights(shares, sinks):
        """A share that saw no key has no weight, and a row of which none did is 0, or all its sink's."""
        heads, tokens, width, columns = 3, 4, 24, 20
        room, rows = 3, shares * tokens + 2  # two that nobody has
        parts = torch.full((heads, rows, width + PADDING), torch.nan)
        own = parts[:, : shares * tokens].view(heads, shares, tokens, width + PADDING)
        own.normal_()
        logarithms = torch.randn(heads, shares, tokens) * 20
        logarithms[0, 1:, 0] = logarithms[1, :, 2] = -float("inf")
        own[..., width] = logarithms
        listed = torch.full(((room + 1) * WORDS.value + tokens * TOKEN_WORDS.value,), UNTOUCHED, dtype=torch.int32)
        words = listed[(room + 1) * WORDS.value :].view(tokens, TOKEN_WORDS.value)
        words[:, 0], words[:, 1], words[:, 2] = torch.arange(tokens), shares, tokens
        out, lse = torch.full((tokens, heads, columns), torch.nan), torch.full((heads, tokens), torch.nan)
        how = {"WIDTH": width, "BLOCK": 32, "PADDING": PADDING, "LSE": True, "TOGETHER": 8}
        numbers = (tokens, room, rows, out.stride(0), out.stride(1), columns)
        own_sinks = None if sinks is None else torch.tensor(sinks)
        add_parts[(tokens, heads)](parts, listed, out, lse, *numbers, own_sinks, **how, SINKS=sinks is not None)
        powers = logarithms.double() * math.log(2)
        if sinks is not None:  # a share more, without values
            powers = torch.cat([powers, own_sinks.double()[:, None, None].expand(heads, 1, tokens)], 1)
        weights = torch.softmax(powers, 1)[:, :shares]
        weights[torch.isposinf(torch.tensor(sinks or [0.0] * heads))] = 0.0
        weights = weights.nan_to_num()
        expected = (weights[..., None] * own[..., :columns].double()).sum(1).transpose(0, 1)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        found = torch.logsumexp(powers, 1)
        torch.testing.assert_close(lse.double(), found, atol=1e-4, rtol=1e-5)
