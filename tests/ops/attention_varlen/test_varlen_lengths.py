"""Lengths that lie: an error at once on a CPU; held to their bounds on a GPU, which complains."""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED
from ragged import batch

import registry
from registry.ops.attention_varlen import lengths

if not INTERPRETED:
    LIES = [
        ("packed", {"cu_seqlens_q": [0, 3, 3, 10, 11, 14]}, "cu_seqlens_q"),
        ("packed", {"cu_seqlens_q": [1, 3, 3, 10, 11, 13]}, "cu_seqlens_q"),
        ("packed", {"cu_seqlens_q": [0, 5, 3, 10, 11, 13]}, "cu_seqlens_q"),
        ("packed", {"cu_seqlens_k": [0, 5, 9, 9, 18, 19]}, "cu_seqlens_k"),
        ("packed", {"cu_seqlens_k": [0, -5, 9, 9, 18, 20]}, "cu_seqlens_k"),
        ("packed", {"max_seqlen_q": 6}, "max_seqlen_q"),
        ("packed", {"max_seqlen_k": 8}, "max_seqlen_k"),
        ("cache", {"seqused_k": [5, 4, 0, 12, 2]}, "seqused_k"),
        ("cache", {"seqused_k": [5, -4, 0, 9, 2]}, "seqused_k"),
        ("cache", {"max_seqlen_k": 8}, "max_seqlen_k"),
        ("paged", {"seqused_k": [5, 4, 0, 13, 2]}, "seqused_k"),
    ]

    @pytest.mark.parametrize("layout, lie, name", LIES)
    def test_an_error_at_once_on_a_cpu(layout, lie, name):
        qkv, how = batch(layout)
        registry.attention_varlen(*qkv, **how)  # a warm call must look as well
        how |= {n: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for n, v in lie.items()}
        with pytest.raises(registry.InvalidArgument) as raised:
            registry.attention_varlen(*qkv, **how)
        assert raised.value.argument == name

    @pytest.mark.parametrize("page", [-1, 17])
    def test_a_page_that_is_not_there(page):
        qkv, how = batch("paged")
        how["block_table"][3, 2] = page
        with pytest.raises(registry.InvalidArgument, match=f"block_table: got page {page} in sequence 3"):
            registry.attention_varlen(*qkv, **how)

    def test_entries_of_a_block_table_that_nobody_needs_may_be_anything(values=(-1, 10**9)):
        qkv, how = batch("paged")
        expected = registry.attention_varlen(*qkv, **how)
        for value in (-1, 10**9):
            how["block_table"][2] = value  # a sequence without keys
            torch.testing.assert_close(registry.attention_varlen(*qkv, **how), expected)

    @pytest.mark.parametrize(("pages", "page"), [(0, 4), (3, 0)])
    @pytest.mark.parametrize("how", [{}, {"softcap": 1.0}], ids=str)
    def test_without_pages_nothing_is_seen(pages, page, how):
        (q, k, _), given = batch("paged", queries=(2,), keys=(3,))
        given |= {"seqused_k": torch.zeros(1, dtype=torch.int32), **how}
        kv = k.new_empty(pages, page, *k.shape[2:])
        out, lse = registry.attention_varlen(q, kv, kv, **given, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()
        want = registry.attention_varlen.reference(q, kv, kv, **given, return_lse=True)
        torch.testing.assert_close((out, lse.double()), want)

    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("target", ["A100", "H100", "B200"])
    def test_the_kernel_compiles(target, packed):
        resources = pytest.importorskip("compiled").resources

        from registry.ops.attention_varlen import bounds
        from registry.toolbox.builds import Build
        from registry.toolbox.launch import StandIn

        index, word = StandIn((99,), "int32"), StandIn((1,), "int32")
        pointers = ["cu_q", "cu_k", "used", "table", "held_q", "held_k", "held_used", "held_table"]
        sizes = [
            "batch",
            "rows_q",
            "rows_k",
            "most",
            "longest_q",
            "longest_k",
            "pages",
            "page",
            "width",
            "table_stride",
        ]
        arguments = {**dict.fromkeys(pointers, index), "word": word, **dict.fromkeys(sizes, 77)}
        constants = {"PACKED": packed, "PAGED": not packed, "BLOCK": bounds.BLOCK}
        arch = registry.Target.named(target)
        build = Build.of(bounds._hold, arguments, constants=constants, options={"num_warps": 4}, arch=arch)
        found = resources(build, arch)
        assert found.spill_stores <= 4 and found.spill_loads <= 4, "one register: ptxas 13.1 parks one for B200"

else:
    import interpreter  # noqa: F401 (it mends Triton's)

    BEYOND = 3000
    """More sequences than a block of the kernel looks at."""

    @pytest.fixture(autouse=True)
    def no_complaints_left():
        lengths.LENGTHS.taken()

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32)

    def bits():
        word = lengths.LENGTHS.word(torch.device("cpu"))
        found = int(word)
        word.zero_()
        return found

    def held(rows_q, k, **given):
        from registry.ops.attention_varlen.bounds import within

        found = within(torch.zeros(rows_q, 1, 8), k, **given)
        assert all(one is None or one.data_ptr() % 16 == 0 for one in found.values()), "launches would be slow"
        return found

    @pytest.mark.parametrize(
        "q, k, bits_set",
        [
            ((0, 3, 3, 10), (0, 5, 9, 12), 0),
            ((0, 7, 3, 10), (0, 5, 9, 12), lengths.BAD_CU_SEQLENS_Q),
            ((0, 7, 7, 99), (0, 5, 9, 12), lengths.BAD_CU_SEQLENS_Q | lengths.ABOVE_MAX_Q),
            ((0, 3, 3, 9), (0, 5, 9, 12), lengths.BAD_CU_SEQLENS_Q),
            ((0, 3, 3, 10), (-4, 1, 6, 12), lengths.BAD_CU_SEQLENS_K | lengths.ABOVE_MAX_K),
            ((0, 8, 8, 10), (0, 5, 9, 12), lengths.ABOVE_MAX_Q),
        ],
    )
    def test_packed(q, k, bits_set):
        found = held(
            10, torch.zeros(12, 1, 8), cu_seqlens_q=i32(*q), cu_seqlens_k=i32(*k), max_seqlen_q=7, max_seqlen_k=5
        )
        for name, given, rows in (("cu_seqlens_q", q, 10), ("cu_seqlens_k", k, 12)):
            held_starts, reached = found[name].tolist(), 0
            for value in given:
                reached = max(reached, min(max(value, 0), rows))
                assert held_starts.pop(0) == reached
        assert bits() == bits_set and found["seqused_k"] is found["block_table"] is None

    def test_more_sequences_than_a_block():
        starts = torch.arange(BEYOND + 1, dtype=torch.int32)
        starts[2000] = 7
        k = torch.zeros(BEYOND, 1, 8)
        found = held(BEYOND, k, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=2, max_seqlen_k=1)
        assert bits() == lengths.BAD_CU_SEQLENS_Q | lengths.BAD_CU_SEQLENS_K | lengths.ABOVE_MAX_Q | lengths.ABOVE_MAX_K
        torch.testing.assert_close(found["cu_seqlens_q"], torch.cummax(starts, 0).values)

    def test_pages():
        pages, table = torch.zeros(6, 4, 1, 8), torch.tensor([[9, 9, 9], [1, -2, 77], [5, 0, 99]], dtype=torch.int32)
        given = dict(cu_seqlens_q=i32(0, 1, 2, 3), max_seqlen_q=1, max_seqlen_k=12)
        found = held(3, pages, **given, seqused_k=i32(0, 4, 8), block_table=table)
        assert found["block_table"].tolist() == [[5, 5, 5], [1, 0, 5], [5, 0, 5]]
        assert bits() == 0  # what is out of bounds is nobody's
        found = held(3, pages, **given, seqused_k=i32(-3, 13, 9), block_table=table)
        assert found["seqused_k"].tolist() == [0, 12, 9]
        assert bits() == lengths.BAD_SEQUSED_K | lengths.ABOVE_MAX_K | lengths.BAD_TABLE

    def test_a_cache():
        given = dict(cu_seqlens_q=i32(0, 1, 2), max_seqlen_q=1, max_seqlen_k=7)
        found = held(2, torch.zeros(2, 9, 1, 8), **given, seqused_k=i32(7, 8))
        assert found["seqused_k"].tolist() == [7, 8] and bits() == lengths.ABOVE_MAX_K

    def test_check_raises_once():
        held(9, torch.zeros(9, 1, 8), cu_seqlens_q=i32(0, 10), cu_seqlens_k=i32(0, 9), max_seqlen_q=9, max_seqlen_k=9)
        with pytest.raises(registry.DeviceComplaint, match="cu_seqlens_q does not rise from 0"):
            registry.check()
        registry.check()
