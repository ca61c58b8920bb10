"""Prompts over pages on a real GPU: what no launch of the kit looks at."""

from __future__ import annotations

import pytest
import torch

import registry
from registry.errors import RegistryError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm90 GPU"
    ),
]
NAME, DIM, PAGE = "gluon_fa3_cached", 128, 16
KEYS, QUERIES = (1000, 0, 1, 517, 999), (300, 1, 0, 199, 277)


def numbers(*of):
    return torch.tensor(of, dtype=torch.int32, device="cuda")


def by(name, *tensors, **given):
    with registry.use(name):
        return registry.attention_varlen(*tensors, **given, causal=True)


@pytest.fixture
def step():
    """q, k and v, and lengths: of keys that are used nothing is NaN, and of the rest of the pages everything."""
    torch.manual_seed(0)
    width = -(-max(KEYS) // PAGE)
    k, v = (torch.full((len(KEYS) * width + 3, PAGE, 2, DIM), float("nan"), device="cuda").bfloat16() for _ in "kv")
    table = torch.randperm(k.shape[0], device="cuda")[: len(KEYS) * width].view(len(KEYS), width).int()
    for keys, pages in zip(KEYS, table.tolist(), strict=True):
        for first in range(0, keys, PAGE):
            for t in (k, v):
                t[pages[first // PAGE], : keys - first] = torch.randn_like(t[0, : keys - first])
    q = torch.randn(sum(QUERIES), 8, DIM, device="cuda").bfloat16()
    starts = numbers(0, *torch.tensor(QUERIES).cumsum(0).tolist())
    lengths = dict(cu_seqlens_q=starts, seqused_k=numbers(*KEYS), block_table=table)
    return (q, k, v), lengths | dict(max_seqlen_q=max(QUERIES), max_seqlen_k=max(KEYS))


def test_layers_share_a_list(step):
    tensors, lengths = step
    with registry.use(NAME):
        plan = registry.attention_varlen.schedule(*tensors, **lengths, causal=True)
    found = by(NAME, *tensors, **lengths, plan=plan)
    assert torch.equal(found, by(NAME, *tensors, **lengths)) and not found.isnan().any()
    torch.testing.assert_close(found, by("triton_varlen", *tensors, **lengths), atol=2e-2, rtol=2e-2)


def test_pages_with_heads_first_and_with_values_between_them(step):
    (q, k, v), lengths = step
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    between = torch.stack([k, v], 1).unbind(1)
    expected = by(NAME, q, k, v, **lengths)
    for pages in (heads_first, between):
        assert torch.equal(by(NAME, q, *pages, **lengths), expected)


def test_fewer_tiles_than_blocks_of_heads_that_no_section_divides():
    """24 key heads of 4,096 keys take turns in sections of 16: blocks beyond the last tile once looked behind it."""
    pages = torch.randn(400, 64, 24, DIM, device="cuda").bfloat16()
    table = torch.randperm(400, device="cuda")[:64].view(1, 64).int()
    q = torch.randn(250, 48, DIM, device="cuda").bfloat16()
    both = dict(cu_seqlens_q=numbers(0, 250), max_seqlen_q=250, max_seqlen_k=4096)
    freed = torch.full((1 << 26,), 0x7F7F7F7F, device="cuda", dtype=torch.int32)  # what such an entry would say
    del freed
    found = by(NAME, q, pages, pages, **both, seqused_k=numbers(4096), block_table=table)
    rows = pages[table[0].long()].flatten(0, 1)
    packed = by("gluon_fa3_varlen", q, rows, rows, **both, cu_seqlens_k=numbers(0, 4096))
    torch.testing.assert_close(found, packed, atol=2e-2, rtol=2e-2)  # by another config, perhaps


@pytest.mark.parametrize("layout", ["paged", "cache", "packed"])
@pytest.mark.parametrize("keys", [(40_000, 300, 0, 700, 2900), (9000,), (100, 20_000, 19_999)])
def test_one_long_sequence_among_short_ones_is_shared_out(keys, layout):
    """By its config, whatever the table says; queries without keys are zeros, and sums of weights come out."""
    queries, width = [33, 1, 5, 0, 40][: len(keys)], -(-max(keys) // 64)
    q = torch.randn(sum(queries), 10, DIM, device="cuda").bfloat16()
    pages = torch.full((len(keys) * width, 64, 2, DIM), float("nan"), device="cuda").bfloat16()
    table = torch.randperm(pages.shape[0], device="cuda").view(len(keys), width).int()
    for own, used in zip(table.tolist(), keys, strict=True):
        for first in range(0, used, 64):
            pages[own[first // 64], : used - first].normal_()
    rows = [pages[own.long()].flatten(0, 1)[:used] for own, used in zip(table, keys, strict=True)]
    starts = numbers(0, *torch.tensor(queries).cumsum(0).tolist())
    given = dict(cu_seqlens_q=starts, max_seqlen_q=max(queries), max_seqlen_k=max(keys), causal=True, return_lse=True)
    if layout == "packed":
        k = torch.cat(rows)
        given |= dict(cu_seqlens_k=numbers(0, *torch.tensor(keys).cumsum(0).tolist()))
    elif layout == "cache":
        k = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan"))
        given |= dict(seqused_k=numbers(*keys))
    else:
        k = pages
        given |= dict(seqused_k=numbers(*keys), block_table=table)
    with registry.use("triton_varlen"):
        expected, expected_lse = registry.attention_varlen(q, k, k, **given)
    name = "gluon_fa3_varlen" if layout == "packed" else NAME
    problem = registry.attention_varlen.explain(q, k, k, **given).problem
    shared = [config for config in registry.variants()[name].configs(problem) if config.get("shared_out")]
    assert shared
    for config in shared:
        with registry.use(name, config=config):
            found, lse = registry.attention_varlen(q, k, k, **given)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4)
        with registry.use(name, config=config):
            assert torch.equal(found, registry.attention_varlen(q, k, k, **given)[0])


@pytest.mark.parametrize("lie", ["block_table", "seqused_k"])
def test_what_is_not_there_is_complained_of(step, lie):
    tensors, lengths = step
    wrong = lengths[lie].clone()
    wrong[3] = 99_999
    by(NAME, *tensors, **lengths | {lie: wrong})
    with pytest.raises(RegistryError, match=lie):
        registry.check()
