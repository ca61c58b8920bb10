"""Each error names the argument, what it got and what is allowed, and is the same cold and warm."""

from __future__ import annotations

import pytest
import torch
from ragged import batch

import registry

varlen = registry.attention_varlen


def call_with(changes, function=varlen):
    """A good call but for these arguments: values, or functions of the good ones."""
    (q, k, v), how = batch(dtype=torch.float32)
    named = {"q": q, "k": k, "v": v} | how
    named |= {name: change(named[name]) if callable(change) else change for name, change in changes.items()}
    return function(named.pop("q"), named.pop("k"), named.pop("v"), **named)


CASES = {
    "no dimension in v": ("v", dict(v=lambda v: v[..., :0])),
    "q": dict(q=lambda q: q[None]),
    "k": dict(k=lambda k: k[..., :4]),
    "v": dict(v=lambda v: v[:-1]),
    "q of int8": ("q", dict(q=lambda q: q.to(torch.int8))),
    "k of another float": ("k", dict(k=lambda k: k.half(), v=lambda v: v.half())),
    "heads": ("k", dict(q=lambda q: q[:, :3])),
    "cu_seqlens_q": dict(cu_seqlens_q=lambda t: t.long()),
    "cu_seqlens_k": dict(cu_seqlens_k=lambda t: t[:-1]),
    "both": ("seqused_k", dict(seqused_k=torch.ones(5, dtype=torch.int32))),
    "no lengths": ("cu_seqlens_k", dict(cu_seqlens_k=None)),
    "a table for packed k": ("block_table", dict(block_table=torch.zeros(5, 2, dtype=torch.int32))),
    "max_seqlen_q": dict(max_seqlen_q=True),
    "max_seqlen_k": dict(max_seqlen_k=-1),
    "max_seqlen_k as a float": ("max_seqlen_k", dict(max_seqlen_k=9.0)),
    "sinks": dict(sinks=torch.zeros(3)),
    "alibi_slopes": dict(alibi_slopes=torch.zeros(4, dtype=torch.float64)),
    "slopes with a gradient": ("alibi_slopes", dict(alibi_slopes=torch.zeros(4, requires_grad=True))),
    "k_scale": dict(k_scale=torch.ones(1)),
    "causal": dict(causal=1),
    "window": dict(window=(-3, 2)),
    "softcap": dict(softcap=-1.0),
    "scale": dict(scale=float("nan")),
    "out": dict(out=torch.zeros(3)),
    "return_lse": dict(return_lse=1),
    "variant": dict(variant=3),
}


GRADIENTS = {
    "grad_out": [None, torch.ones(1, 4, 8), torch.ones(13, 4, 8, dtype=torch.float64), torch.ones(8)],
    "out": [None, torch.ones(13, 4, 4)],
    "lse": [None, torch.ones(4, 1), torch.ones(4, 13, dtype=torch.float64)],
    "grad_lse": [torch.ones(13, 4)],
    "scale": [float("nan"), "1"],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_name_refuse_what_the_forward_did_not_save(name):
    (q, k, v), how = batch(dtype=torch.float32)
    out, lse = varlen(q, k, v, **how, return_lse=True)
    good = {"grad_out": torch.ones_like(out), "out": out, "lse": lse, "scale": 0.3} | how
    for bad in GRADIENTS[name]:
        for call in (varlen.backward, varlen.backward.explain):
            given = good | {name: bad}
            with pytest.raises(registry.InvalidArgument) as raised:
                call(given.pop("grad_out"), q, k, v, given.pop("out"), given.pop("lse"), **given)
            assert raised.value.argument == name


def test_the_reference_takes_no_argument_that_is_none():
    (q, k, v), how = batch()
    with pytest.raises(TypeError, match="sink"):
        varlen.reference(q, k, v, **how, sink=torch.zeros(4))
    with pytest.raises(registry.InvalidArgument, match="max_seqlen_q"):
        varlen.reference(q, k, v, **how | {"max_seqlen_q": None})


@pytest.mark.parametrize("case", CASES)
def test_errors_name_the_argument(case):
    name, changes = CASES[case] if isinstance(CASES[case], tuple) else (case, CASES[case])
    for _ in ("cold", "warm"):
        with pytest.raises(registry.InvalidArgument) as raised:
            call_with(changes)
        assert raised.value.argument == name and raised.value.allowed
        with pytest.raises(registry.InvalidArgument) as checked:
            call_with(changes, varlen.check)
        assert str(checked.value) == str(raised.value)
        call_with({})


@pytest.mark.parametrize(
    "scales, name",
    [
        ({}, "k_scale"),
        ({"k_scale": torch.ones(1)}, "v_scale"),
        ({"k_scale": torch.ones(1), "v_scale": torch.ones(2)}, "v_scale"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, "k_scale"),
    ],
)
def test_a_quantised_cache_wants_its_scales(scales, name):
    (q, k, v), how = batch("cache", dtype=torch.float32)
    k, v = (torch.nan_to_num(t).to(torch.int8) for t in (k, v))
    with pytest.raises(registry.InvalidArgument) as raised:
        varlen(q, k, v, **how, **scales)
    assert raised.value.argument == name


@pytest.mark.parametrize("name", ["q", "k", "v", "buffer"])
def test_out_may_overlap_an_input(name):
    """By way of a temporary, whether a plan is kept or not: which memory is shared is no fact of a plan."""
    (q, k, v), how = batch(queries=(2, 3), keys=(2, 3), dtype=torch.float32)
    buffer = torch.cat((q, torch.zeros_like(q)))
    given = {"q": buffer[: q.shape[0]], "k": k.repeat_interleave(q.shape[1] // k.shape[1], 1)}
    given["v"] = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    want = varlen(**{n: t.clone() for n, t in given.items()}, **how)
    for warm in (False, True):
        registry.forget_plans()
        mine = {n: t.clone() for n, t in given.items()}
        mine["q"] = (memory := buffer.clone())[: q.shape[0]]
        if warm:
            varlen(**mine, **how, out=torch.empty_like(want))
        out = memory[1 : 1 + q.shape[0]] if name == "buffer" else mine[name]
        assert varlen(**mine, **how, out=out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize("wrong", ["q", "k", "v", "sinks", "alibi_slopes", "k_scale", "out"])
def test_beside_an_out_that_overlaps_a_mistake_is_named_as_explain_does(wrong):
    q, k = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    given = {"q": q, "k": k, "v": k, "out": q}
    given |= {
        "q": {"q": q[None]},
        "k": dict.fromkeys("kv", torch.randn(8, 3, 16)),
        "v": {"v": None},
        "out": {"out": q[:, :, :8]},
    }.get(wrong, {wrong: [1.0] * 4})
    how = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 3, 8]).int())
    for call in (varlen, varlen.explain):
        with pytest.raises(registry.InvalidArgument) as raised:
            call(**given, **how, max_seqlen_q=5, max_seqlen_k=5)
        assert raised.value.argument == wrong


def test_an_out_that_overlaps_is_of_the_dtype_that_autocast_makes():
    memory = torch.randn(8, 4, 16)
    how = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 3, 8]).int())
    how |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
    with torch.autocast("cpu", torch.bfloat16):
        want = varlen(memory, memory, memory, **how)
        with pytest.raises(registry.InvalidArgument, match="out: got .* float32; allowed: .* bfloat16"):
            varlen(memory, memory, memory, **how, out=memory)
        out = memory.view(torch.bfloat16)[:, :, :16]
        assert varlen(memory, memory, memory, **how, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_k", "k_scale", "v_scale"])
def test_out_may_overlap_what_is_no_operand(name):
    q, caches = torch.randn(6, 4, 16), torch.randint(-100, 100, (2, 3, 8, 2, 16), dtype=torch.int8)
    how = {"cu_seqlens_q": torch.tensor([0, 2, 4, 6]).int(), "seqused_k": torch.tensor([8, 5, 3]).int()}
    how |= dict.fromkeys(("k_scale", "v_scale"), torch.full((2,), 0.01)) | {"max_seqlen_q": 2, "max_seqlen_k": 8}
    out, want = torch.empty(6, 4, 16), varlen(q, *caches, **how)
    inside = out.view(how[name].dtype).view(-1)[100 : 100 + how[name].numel()]
    how[name] = inside.copy_(how[name])
    assert varlen(q, *caches, **how, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["alibi_slopes", "k_scale", "v_scale", "out"])
def test_what_has_no_gradient_is_refused_whether_a_plan_is_kept_or_not(name):
    q, (k, v) = torch.randn(6, 4, 16), torch.randint(-100, 100, (2, 6, 2, 16), dtype=torch.int8)
    how = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 2, 6]).int())
    how |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2), "max_seqlen_q": 4, "max_seqlen_k": 4}
    how |= {"alibi_slopes": torch.rand(4), "out": torch.empty(6, 4, 16)}
    followed = how | {name: how[name].clone().requires_grad_()}
    for _ in range(2):
        with pytest.raises(registry.InvalidArgument, match="a tensor that requires grad") as raised:
            varlen(q, k, v, **followed)
        assert raised.value.argument == name
        with torch.no_grad():
            varlen(q, k, v, **followed)
        varlen(q, k, v, **how)


def test_out_is_not_followed_by_autograd():
    (q, k, v), how = batch(dtype=torch.float32)
    for out in (torch.empty_like(q), q.detach()):
        with pytest.raises(registry.InvalidArgument, match="require grad"):
            varlen(q.requires_grad_(), k, v, **how, out=out)


def test_a_variant_is_handed_what_it_claims_and_nothing_else(declare):
    seen = {}

    def run(q, k, v, **given):
        seen.update(given)
        return torch.zeros_like(q), None

    for layouts in (("packed",), ("cache",), ("packed", "paged")):
        seen.clear()
        kinds = {"page_size": (1, 64)} if "paged" in layouts else {}
        name = f"test.seen_{layouts[-1]}"
        declare(name, op="attention_varlen", run=run, gqa=True, kv_layouts=layouts, **kinds)
        qkv, how = batch(layouts[0], dtype=torch.float32)
        varlen(*qkv, **how, variant=name)
        wanted = {"scale", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "config"}
        wanted |= {"cu_seqlens_k"} if "packed" in layouts else set()
        wanted |= {"seqused_k"} if "cache" in layouts or "paged" in layouts else set()
        wanted |= {"block_table"} if "paged" in layouts else set()
        assert set(seen) == wanted


def test_a_check_launches_nothing_and_raises_what_the_call_would(declare):
    """Where a plan is found, and where none is kept, as under autocast."""
    declare("test.never", op="attention_varlen", run=lambda *_, **__: pytest.fail("launched"), kv_layouts=("cache",))
    qkv, how = batch("cache", heads=(2, 2), dtype=torch.float32)
    longer = how | {"seqused_k": how["seqused_k"] + qkv[1].shape[1]}
    for _ in ("cold", "warm"):
        varlen.check(*qkv, **how, variant="test.never")
        varlen.check(*qkv, **how, variant="test.never", scale=-2)
        with torch.autocast("cpu", torch.bfloat16):
            varlen.check(*qkv, **how)
        with pytest.raises(registry.InvalidArgument) as raised:
            varlen(*qkv, **longer)
        with pytest.raises(registry.InvalidArgument) as checked:
            varlen.check(*qkv, **longer)
        assert str(checked.value) == str(raised.value)
        with pytest.raises(registry.IllegalVariant, match="causal"):
            varlen.check(*qkv, **how, causal=True, variant="test.never")


def test_unknown_keywords_are_refused():
    qkv, how = batch()
    for function in (varlen.explain, varlen.check):
        with pytest.raises(TypeError):
            function(*qkv, **how, key_padding=True)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    (q, k, v), how = batch(dtype=torch.float32)
    expected = varlen(q, k, v, **how, window=(2, 1))
    longest = {name: numpy.int64(how[name]) for name in ("max_seqlen_q", "max_seqlen_k")}
    torch.testing.assert_close(varlen(q, k, v, **how | longest, window=tuple(map(numpy.int32, (2, 1)))), expected)
    for function in (varlen, varlen.explain):
        with pytest.raises(registry.InvalidArgument, match="max_seqlen_q: got 1; allowed: at least"):
            function(q, k, v, **how | {"max_seqlen_q": numpy.int64(1)})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_graph_may_work_out_how_long_the_longest_is(backend):
    (q, k, v), how = batch(dtype=torch.float32)

    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, **others):
        most = [int((starts[1:] - starts[:-1]).max().item()) for starts in (cu_seqlens_q, cu_seqlens_k)]
        others |= dict(zip(("max_seqlen_q", "max_seqlen_k"), most, strict=True))
        return varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **others)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q, k, v, **how), varlen(q, k, v, **how))
