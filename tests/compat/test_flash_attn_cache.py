"""FlashAttention's call over a cache, dense, indexed or paged: what is in it, what is written into it."""

from __future__ import annotations

import pytest
import torch
from flash_masks import HEADS, KV_HEADS, B, D, close, even, ours, packed
from ragged import by_hand, starts

import registry
from registry.compat.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("seeded")


class Cached:
    """A cache in one of the forms that there are, and its keys and values as plain lists of rows."""

    def __init__(self, form: str) -> None:
        self.lengths = [5, 0, 7]
        self.given = {}
        if form == "dense":
            self.k, self.v = torch.randn(2, B, 12, KV_HEADS, D)
            self.at = [[(b, i) for i in range(12)] for b in range(B)]
        elif form == "indexed":
            self.k, self.v = torch.randn(2, 6, 12, KV_HEADS, D)
            self.given["cache_batch_idx"] = torch.tensor([4, 0, 3], dtype=torch.int32)
            self.at = [[(b, i) for i in range(12)] for b in (4, 0, 3)]
        else:
            self.k, self.v = torch.randn(2, 14, 4, KV_HEADS, D)
            table = torch.randperm(14)[:9].view(3, 3).to(torch.int32)
            self.given["block_table" if form == "paged" else "page_table"] = table
            self.at = [[(int(table[b, i // 4]), i % 4) for i in range(12)] for b in range(B)]

    def by_hand(self, q, k, v, **how):
        """(out, lse, k, v) after the new rows were put behind the old ones."""
        caches = self.k.clone(), self.v.clone()
        for b, length in enumerate(self.lengths):
            for i in range(k.shape[1] if k is not None else 0):
                for cache, new in zip(caches, (k, v), strict=True):
                    cache[self.at[b][length + i]] = new[b, i]
        new = k.shape[1] if k is not None else 0
        rows = [at for b, length in enumerate(self.lengths) for at in self.at[b][: length + new]]
        flat = [torch.stack([cache[at] for at in rows]) for cache in caches]
        ends = starts([length + new for length in self.lengths])
        out, lse = by_hand(packed(q), *flat, cu_seqlens_q=even(B, q.shape[1]), cu_seqlens_k=ends, **how)
        return out.view_as(q), lse.unflatten(1, (B, q.shape[1])).transpose(0, 1), *caches


FORMS = ["dense", "indexed", "paged", "paged as FlashAttention 3 says it"]


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (3, 0), "causal": True, "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_cache_is_written_and_attended_to(form, new, mask):
    cache, q = Cached(form), torch.randn(B, max(new, 1), HEADS, D)
    k, v = torch.randn(2, B, new, KV_HEADS, D) if new else (None, None)
    slopes, sinks = torch.rand(HEADS), torch.randn(HEADS)
    want, want_lse, want_k, want_v = cache.by_hand(q, k, v, **ours(mask), alibi_slopes=slopes, sinks=sinks)
    seqlens = torch.tensor(cache.lengths, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        cache_seqlens=seqlens,
        **cache.given,
        **mask,
        alibi_slopes=slopes,
        s_aux=sinks,
        return_softmax_lse=True,
    )
    close(out, want)
    close(lse, want_lse)
    assert torch.equal(cache.k, want_k) and torch.equal(cache.v, want_v)
    assert seqlens.tolist() == cache.lengths


def test_a_full_cache_and_one_length_for_all():
    q, (k, v) = torch.randn(B, 2, HEADS, D), torch.randn(2, B, 6, KV_HEADS, D)
    for seqlens, used in ((None, 6), (4, 4)):
        lengths = {"cu_seqlens_q": even(B, 2), "cu_seqlens_k": even(B, used)}
        want, _ = by_hand(packed(q), packed(k[:, :used]), packed(v[:, :used]), **lengths, causal=True)
        close(packed(flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, causal=True)), want)


def turned(x, position, interleaved):
    """One head's row [D] at a position: pairs are turned by position / 10000^(2 i / R), as rotary embeddings are."""
    half, found = 4, x.clone().double()
    for i in range(half):
        angle = torch.tensor(position / 10000 ** (i / half), dtype=torch.float64)
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        found[one] = x[one] * angle.cos() - x[two] * angle.sin()
        found[two] = x[one] * angle.sin() + x[two] * angle.cos()
    return found.float()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotary(causal, interleaved):
    """Eight of 16 dimensions are turned; queries of a call without a mask all stand where the first new key does."""
    cache, q = Cached("dense"), torch.randn(B, 3, HEADS, D)
    k, v = torch.randn(2, B, 3, KV_HEADS, D)
    angles = torch.arange(20)[:, None] / 10000 ** (torch.arange(4) / 4)
    right_q, right_k = q.clone(), k.clone()
    for b, length in enumerate(cache.lengths):
        for i in range(3):
            for x, right, at in ((q, right_q, length + (i if causal else 0)), (k, right_k, length + i)):
                for h in range(x.shape[2]):
                    right[b, i, h] = turned(x[b, i, h], at, interleaved)
    want, _, want_k, _ = cache.by_hand(right_q, right_k, v, causal=causal)
    out = flash_attn_with_kvcache(
        q,
        cache.k,
        cache.v,
        k,
        v,
        angles.cos(),
        angles.sin(),
        torch.tensor(cache.lengths, dtype=torch.int32),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    close(out, want)
    torch.testing.assert_close(cache.k, want_k, rtol=1e-5, atol=1e-5)


def test_rotary_of_float64_is_as_exact_as_the_rest():
    q, k, v = (torch.randn(1, 1, HEADS, D, dtype=torch.float64) for _ in range(3))
    cache = torch.zeros(2, 1, 4, HEADS, D, dtype=torch.float64)
    angles = torch.arange(20, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(4, dtype=torch.float64) / 4)
    flash_attn_with_kvcache(q, *cache, k, v, angles.cos(), angles.sin(), 3, rotary_interleaved=False)
    one, two, rest = k[0, 0].split((4, 4, D - 8), dim=-1)
    cos, sin = angles[3].cos(), angles[3].sin()
    expected = torch.cat((one * cos - two * sin, one * sin + two * cos, rest), dim=-1)
    torch.testing.assert_close(cache[0, 0, 3], expected, rtol=1e-14, atol=1e-14)


def test_a_cache_has_no_gradient_and_takes_parameters():
    q, (k, v) = torch.randn(B, 1, HEADS, D, requires_grad=True), torch.randn(2, B, 6, KV_HEADS, D)
    assert not flash_attn_with_kvcache(q, k, v).requires_grad


@pytest.mark.parametrize(
    "given, name",
    [
        (dict(k=torch.zeros(B, 1, KV_HEADS, D)), "v"),
        (dict(k=torch.zeros(B, 1, KV_HEADS, D), v=torch.zeros(B, 1, KV_HEADS, D)), "cache_seqlens"),
        (dict(k=torch.zeros(B, 1, 1, D), v=torch.zeros(B, 1, KV_HEADS, D), cache_seqlens=3), "k"),
        (dict(k=torch.zeros(B, 2, KV_HEADS, D), v=torch.zeros(B, 2, KV_HEADS, D), cache_seqlens=5), "cache_seqlens"),
        (dict(cache_seqlens=torch.zeros(B)), "cache_seqlens"),
        (dict(cache_seqlens=7), "cache_seqlens"),
        (dict(rotary_cos=torch.zeros(9, 4)), "rotary_sin"),
        (dict(rotary_cos=torch.zeros(9, 4), rotary_sin=torch.zeros(9, 4)), "rotary_cos"),
        (dict(cache_leftpad=torch.zeros(B, dtype=torch.int32)), "cache_leftpad"),
        (dict(k_descale=torch.ones(B, KV_HEADS)), "k_descale"),
        (dict(cache_seqlens=True), "cache_seqlens"),
        (dict(cache_seqlens=2**63), "cache_seqlens"),
        (dict(cache_seqlens=torch.tensor([-1, 0, 3], dtype=torch.int32)), "cache_seqlens"),
        (dict(cache_batch_idx=torch.tensor([0, 3, 1], dtype=torch.int32)), "cache_batch_idx"),
        (dict(cache_batch_idx=[0, 1, 2]), "cache_batch_idx"),
        (dict(block_table=torch.zeros(B, dtype=torch.int32)), "block_table"),
        (dict(page_table=torch.zeros(B, 2)), "page_table"),
        (dict(v_cache=torch.zeros(B, 5, KV_HEADS, D)), "v_cache"),
        (dict(k_cache=torch.zeros(B, 6, KV_HEADS, D, dtype=torch.float64)), "v_cache"),
        (dict(return_softmax_lse=1), "return_softmax_lse"),
    ],
)
def test_errors_of_a_cache_name_the_argument(given, name):
    q, (k, v) = torch.randn(B, 1, HEADS, D), torch.randn(2, B, 6, KV_HEADS, D)
    with pytest.raises(registry.InvalidArgument) as raised:
        flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v} | given)
    assert raised.value.argument == name and raised.value.allowed


def test_pages_that_are_not_there_are_not_written_to():
    """A negative one would be one from the end."""
    (q, k, v), pages = torch.randn(3, 1, 1, 2, D), torch.zeros(2, 3, 4, 2, D)
    lengths = torch.tensor([2], dtype=torch.int32)
    for page in (-1, 3):
        table = torch.tensor([[page]], dtype=torch.int32)
        with pytest.raises(registry.InvalidArgument, match="block_table"):
            flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table)
    assert not pages.any()


def test_caches_that_share_memory_are_written_to_where_neither_spoils_the_other():
    (q, k, v), apart = torch.randn(3, B, 1, 2, D), torch.zeros(2, B, 6, 2, D)
    expected = flash_attn_with_kvcache(q, *apart, k, v, cache_seqlens=3)
    for dim in range(1, 5):  # side by side in one tensor: whole caches, positions, heads, columns
        both = torch.zeros(2, B, 6, 2, D).movedim(0, dim).contiguous().movedim(dim, 0)
        torch.testing.assert_close(flash_attn_with_kvcache(q, *both, k, v, cache_seqlens=3), expected)
    wide, one = torch.zeros(B, 6, 2, D + 4), torch.zeros(B, 6, 2, D)
    for k_cache, v_cache in ((one, one), (wide[..., :D], wide[..., 4:])):
        with pytest.raises(registry.InvalidArgument, match="v_cache: got .* in k_cache's memory; allowed: memory of"):
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
    assert not one.any() and not wide.any()
    with pytest.raises(registry.InvalidArgument, match="v_cache"):
        flash_attn_with_kvcache(q, one, torch.from_dlpack(one), k, v, cache_seqlens=3)
    expected = flash_attn_with_kvcache(q, *apart, k, k, cache_seqlens=3)
    torch.testing.assert_close(flash_attn_with_kvcache(q, one, one, k, k, cache_seqlens=3), expected)


LATE = [
    (dict(s_aux=torch.zeros(3)), "s_aux"),
    (dict(alibi_slopes=torch.zeros(3)), "alibi_slopes"),
    (dict(k_descale=torch.ones(1)), "k_descale"),
    (dict(q=torch.zeros(1, 1, 3, D)), "k_cache"),
    (dict(q=torch.zeros(1, 1, 2, D, dtype=torch.float64)), "k_cache"),
    (dict(softmax_scale=float("nan")), "softmax_scale"),
    (dict(block_table=torch.tensor([[-1, 1]], dtype=torch.int32)), "block_table"),
]


def written_to(pages, function=flash_attn_with_kvcache, **given):
    new, table = torch.ones(1, 1, 2, D), torch.tensor([[0, 1]], dtype=torch.int32)
    lengths = torch.tensor([5], dtype=torch.int32)
    call = {"q": new, "k": new, "v": new, "cache_seqlens": lengths, "block_table": table} | given
    return function(k_cache=pages, v_cache=pages, **call)


@pytest.mark.parametrize("given, name", LATE, ids=[str(n) for n in range(len(LATE))])
def test_a_call_that_is_refused_has_written_nothing(given, name):
    """Nor where it would have read what is not there."""
    pages = torch.zeros(3, 4, 2, D)
    with pytest.raises(registry.InvalidArgument) as raised:
        written_to(pages, **given)
    assert raised.value.argument == name and not pages.any()


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    "shared",
    [
        lambda flat: flat[:24].view(1, 6, 2, 2).expand(B, -1, -1, -1),
        lambda flat: flat[:12].view(B, 1, 2, 2).expand(-1, 6, -1, -1),
        lambda flat: flat.as_strided((B, 6, 2, 2), (8, 4, 2, 1)),
    ],
    ids=["of sequences", "of positions", "windows"],
)
def test_a_cache_whose_entries_share_memory_is_read_and_not_written_to(which, shared):
    flat = torch.zeros(B * 6 * 2 * 2)
    (q, k, v), given = torch.ones(3, B, 1, 2, 2), dict.fromkeys(("k_cache", "v_cache"), torch.zeros(B, 6, 2, 2))
    given[which] = shared(flat)
    flash_attn_with_kvcache(q, **given)
    with pytest.raises(registry.InvalidArgument, match="entries that share no memory") as raised:
        flash_attn_with_kvcache(q, **given, k=k, v=v, cache_seqlens=3)
    assert raised.value.argument == which
    assert not flat.any() and not any(cache.any() for cache in given.values())


@pytest.mark.parametrize("moved", ["q", "k", "v"])
def test_what_comes_from_the_cache_is_read_before_it_is_written_to(moved):
    caches = dict(zip(("k_cache", "v_cache"), torch.randn(2, B, 6, 2, 2), strict=True))
    new = dict(zip("qkv", torch.randn(3, B, 2, 2, 2), strict=True))
    new[moved] = caches["k_cache"] if moved == "q" else caches[f"{moved}_cache"][:, 2:4]
    before = [{name: tensor.clone() for name, tensor in given.items()} for given in (new, caches)]
    want = flash_attn_with_kvcache(**before[0], **before[1], cache_seqlens=3)
    torch.testing.assert_close(flash_attn_with_kvcache(**new, **caches, cache_seqlens=3), want)
    assert all(torch.equal(caches[name], before[1][name]) for name in caches)


def test_a_call_that_no_variant_may_run_has_written_nothing():
    pages = torch.zeros(3, 4, 2, D)
    with pytest.raises(registry.IllegalVariant), registry.use("torch_varlen_flash"):
        written_to(pages)
    with torch.autocast("cpu"), pytest.raises(registry.InvalidArgument):  # there no plan is kept
        written_to(pages, s_aux=torch.zeros(3))
    assert not pages.any()
    written_to(pages)
    assert pages[1, 1].all() and pages.count_nonzero() == 2 * D


@pytest.mark.slow(4, together="inductor")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_graph_writes_too_and_not_where_it_is_refused():
    pages = torch.zeros(3, 4, 2, D)
    for full in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=full)
        for given, name in LATE[:-1]:
            with pytest.raises(Exception, match=rf"\b{name}\b"):
                written_to(pages, compiled, **given)
        for given in (
            {"cache_seqlens": torch.tensor([8], dtype=torch.int32)},
            {"block_table": torch.tensor([[0, -1]], dtype=torch.int32)},
        ):
            with pytest.raises(RuntimeError, match="out of bounds"):
                written_to(pages, compiled, **given)
        assert not pages.any()
    ours = torch.zeros_like(pages)
    torch.testing.assert_close(written_to(pages, compiled), written_to(ours))
    torch.testing.assert_close(pages, ours)


def test_positions_without_a_rotation_are_refused():
    (q, k, v), cache = torch.randn(3, B, 1, 2, D), torch.zeros(2, B, 6, 2, D)
    rotary = {"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)}
    with pytest.raises(registry.InvalidArgument, match="rotary_cos has"):
        flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=4, **rotary)
