"""The torch ops: torch.compile, functorch, fake tensors, subclasses, modes and autocast."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import registry
from registry.ops import tensors
from registry.ops.attention import op as attention_op
from registry.ops.matmul import op as matmul_op


def qkv(*shape, grad=False):
    return tuple(torch.randn(*(shape or (2, 4, 6, 16)), requires_grad=grad) for _ in range(3))


@pytest.fixture
def op_calls(monkeypatch):
    """How often calls went through the torch op rather than straight to a kernel."""
    calls = []
    for module, name in ((attention_op, "through_torch"), (matmul_op, "through_torch")):
        real = getattr(module, name)

        def spy(*args, real=real):
            calls.append(args)
            return real(*args)

        monkeypatch.setattr(module, name, spy)
    return calls


# --- torch.compile: what each op promises of it, and of opcheck, is in the conformance kit ---------------------------


@pytest.mark.slow(2, together="inductor")
def test_compile_trains():
    torch._dynamo.reset()

    def loss(q, k, v):
        out, lse = registry.attention(q, k, v, causal=True, return_lse=True, layout="bshd", window=(3, 0))
        return (out**2).sum() + lse.sum()

    tensors = qkv(2, 6, 4, 16, grad=True)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compile_keeps_the_asked_variant():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: registry.attention(q, k, v, variant="torch_math"), fullgraph=True, backend="aot_eager"
    )
    with registry.record() as recorder:
        compiled(*qkv())
    assert recorder.counts == {"attention": {"torch_math": 1}}


def counting(function):
    """A compiled function, and how often it was traced."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("how", [{}, {"gated": True}, {"out": True}], ids=str)
@pytest.mark.parametrize(
    "a",
    [torch.randn(3, 2, 4).transpose(0, 1), torch.randn(2, 5, 4)[:, :3], torch.randn(1, 3, 4).expand(2, 3, 4)],
    ids=["transposed", "a slice", "expanded"],
)
def test_rows_that_no_stride_walks_are_traced(a, how):
    b, given = torch.randn(4, 6), dict(how)
    wanted = registry.matmul(a, b, gated="gated" in how)
    if "out" in how:
        given["out"] = torch.empty_like(wanted)
    compiled, _ = counting(lambda a, b: registry.matmul(a, b, **given))
    torch.testing.assert_close(compiled(a, b), wanted)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(a), mode.from_tensor(b)
        assert registry.matmul(*fakes, gated="gated" in how).shape == wanted.shape


INTO = {
    "matmul": lambda rows, out: registry.matmul(rows, torch.ones(4, 6), out=out),
    "gated": lambda rows, out: registry.matmul(rows, torch.ones(4, 12), gated=True, out=out),
    "grouped_mm": lambda rows, out: registry.grouped_mm(rows[None], torch.ones(1, 4, 6), out=out[None])[0],
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("op", INTO)
def test_an_out_of_any_size_is_written_to_by_a_graph(op, strided):
    compiled, counter = counting(INTO[op])
    for rows in (5, 6, 7):
        a, out = torch.randn(rows, 4), torch.empty(rows, 8)[:, :6] if strided else torch.empty(rows, 6)
        compiled(a, out)
        torch.testing.assert_close(out, INTO[op](a, torch.empty(rows, 6)))
    assert counter.frame_count == 2


def test_windows_share_a_graph():
    compiled, counter = counting(lambda q, left: registry.attention(q, q, q, window=(left, 0)))
    q = torch.randn(1, 2, 12, 16)
    for left in (3, 4, 5, 6, 7, 8):
        torch.testing.assert_close(compiled(q, left), registry.attention(q, q, q, window=(left, 0)))
    assert counter.frame_count == 2


def test_a_graph_remembers_the_use_block_in_it():
    def within(q):
        with registry.use("torch_math"):
            found = registry.attention(q, q, q)
            with registry.use("torch_cpu"):
                found = registry.attention(found, q, q)
        return registry.attention(found, q, q, variant="torch_math")

    compiled, _ = counting(within)
    for _ in range(2):
        with registry.record() as recorder:
            compiled(torch.randn(1, 2, 6, 16))
        assert recorder.counts == {"attention": {"torch_math": 2, "torch_cpu": 1}}


def test_an_exported_program_remembers_the_use_block_in_it():
    class Within(torch.nn.Module):
        def forward(self, q):
            with registry.use("torch_math"):
                return registry.attention(q, q, q)

    q = torch.randn(1, 2, 6, 16)
    for strict in (False, True):
        program = torch.export.export(Within(), (q,), strict=strict).module()
        with registry.record() as recorder:
            program(q)
        assert recorder.counts == {"attention": {"torch_math": 1}}


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (lambda: registry.use("torch_math_backward"), "around the whole training step"),
        (lambda: registry.use("torch_math", config={"BLOCK": 1}), "around the call"),
        (lambda: registry.use("nobody.knows"), "nobody.knows"),
        (lambda: registry.prefer("torch_math"), "around the call"),
        (lambda: registry.record(), "around the call"),
    ],
)
def test_what_a_graph_cannot_remember_is_refused(block, match):
    def within(q):
        with block():
            return registry.attention(q, q, q)

    compiled, _ = counting(within)
    with pytest.raises(Exception, match=match):
        compiled(torch.randn(1, 2, 6, 16))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_variant_of_the_backward_holds_around_the_whole_step(backend):
    """Around the forward alone it holds only where autograd runs eagerly: a compiled backward is called on its own."""
    torch._dynamo.reset()

    def loss(q, k, v):
        return registry.attention(q, k, v, causal=True).square().sum()

    step = loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend)
    tensors = qkv(grad=True)
    step(*tensors).backward()  # a graph that was made without the block asks again
    with registry.record() as whole, registry.use("torch_math_backward"):
        step(*tensors).backward()
    with registry.record() as forward:
        with registry.use("torch_math_backward"):
            value = step(*tensors)
        value.backward()
    assert set(whole.counts["attention_backward"]) == {"torch_math_backward"}
    kept = backend != "aot_eager"
    assert (set(forward.counts["attention_backward"]) == {"torch_math_backward"}) == kept


@pytest.mark.slow(2, together="inductor")
def test_compile_matmul_trains():
    torch._dynamo.reset()

    def loss(a, b, bias):
        return registry.matmul(a, b, bias=bias, activation="gelu").sum()

    inputs = [torch.randn(*s, requires_grad=True) for s in ((2, 3, 4), (4, 5), (5,))]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, dynamic=True)(*inputs), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# --- who sees the op ----------------------------------------------------------------------------------------------


def test_plain_eager_calls_do_not_pay_for_the_op(op_calls):
    registry.attention(*qkv())
    registry.attention(*qkv(grad=True)).sum().backward()
    registry.matmul(torch.ones(2, 2), torch.ones(2, 2))
    assert op_calls == []


def test_fake_and_meta_tensors_take_the_op(op_calls):
    with FakeTensorMode():
        q, k, v = qkv()
        out, lse = registry.attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.dtype is torch.float32
        assert registry.matmul(torch.empty(3, 4), torch.empty(4, 5)).shape == (3, 5)
    meta = torch.empty(1, 2, 3, 8, device="meta")
    assert registry.attention(meta, meta, meta).device.type == "meta"
    assert len(op_calls) == 3


def test_explain_takes_fake_and_meta_tensors():
    h100 = registry.Target.named("H100")
    meta = torch.empty(1, 16, 4096, 128, device="meta", dtype=torch.bfloat16)
    decision = registry.attention.explain(meta, meta, meta, target=h100)
    with FakeTensorMode():
        fake = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
        assert registry.attention.explain(fake, fake, fake, target=h100).variant == decision.variant
    with pytest.raises(registry.InvalidArgument, match="target"):
        registry.attention.explain(meta, meta, meta)


class Wrapped(torch.Tensor):
    """A subclass that counts the operators it sees."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        unwrap = lambda x: x.inner if isinstance(x, cls) else x  # noqa: E731
        out = func(*map(unwrap, args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})
        return tuple(map(cls, out)) if isinstance(out, tuple) else cls(out) if isinstance(out, torch.Tensor) else out


def test_subclasses_see_the_op():
    Wrapped.seen.clear()
    q, k, v = map(Wrapped, qkv())
    out = registry.attention(q, k, v)
    assert isinstance(out, Wrapped) and "registry.attention.default" in Wrapped.seen
    assert isinstance(registry.matmul(q, k.transpose(-1, -2)), Wrapped)
    assert "registry.matmul.default" in Wrapped.seen


def test_the_backward_beneath_a_mode_keeps_the_scope_of_the_forward():
    q, k, v = qkv(grad=True)
    with torch.device("cpu"), registry.record() as recorder, registry.use("torch_math", "torch_math_backward"):
        out = registry.attention(q, k, v)
    out.sum().backward()
    assert recorder.counts == {"attention": {"torch_math": 1}, "attention_backward": {"torch_math_backward": 1}}


def test_functorch_grad_and_vmap():
    q, k, v = qkv(3, 2, 4, 6, 16)
    per_sample = torch.func.vmap(lambda q, k, v: registry.attention(q, k, v, causal=True))(q, k, v)
    expected = torch.stack([registry.attention(*x, causal=True) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(per_sample, expected)
    unmapped = torch.func.vmap(lambda q: registry.attention(q, k[0], v[0]))(q)
    torch.testing.assert_close(unmapped, torch.stack([registry.attention(x, k[0], v[0]) for x in q]))
    found = torch.func.grad(lambda q: registry.attention(q, k[0], v[0]).sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    registry.attention(leaf, k[0], v[0]).sum().backward()
    torch.testing.assert_close(found, leaf.grad)


def test_autocast_casts_as_torch_does():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert registry.attention(q, k, v).dtype is torch.bfloat16
        assert registry.attention.explain(q, k, v).problem.dtype == "bfloat16"
        a, b = torch.randn(3, 4), torch.randn(4, 5)
        assert registry.matmul(a, b).dtype is torch.matmul(a, b).dtype is torch.bfloat16
        double = q.double()
        assert registry.attention(double, double, double).dtype is torch.float64
    assert registry.attention(q, k, v).dtype is torch.float32


@pytest.mark.parametrize(("weights", "cast"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_sinks_of_the_other_half_go_with_autocast(weights, cast):
    q, k, v = (one.to(weights) for one in qkv())
    sinks = torch.randn(q.shape[1], dtype=weights, requires_grad=True)
    with torch.autocast("cpu", dtype=cast):
        out = registry.attention(q, k, v, sinks=sinks)
        assert registry.attention.explain(q, k, v, sinks=sinks).problem.dtype == str(cast).removeprefix("torch.")
    out.float().sum().backward()
    assert out.dtype is cast and sinks.grad.dtype is weights and sinks.grad.any()
    wanted = registry.attention.reference(q, k, v, sinks=sinks)
    torch.testing.assert_close(out.double(), wanted, rtol=0.05, atol=0.05)


def test_autocast_brings_operands_together():
    """As a norm in float32 before one of them makes them differ."""
    q, k, v = qkv(grad=True)
    a, b, offs = torch.randn(6, 8), torch.randn(2, 8, 5), torch.tensor([2, 6], dtype=torch.int32)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    packed: dict = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 6, "max_seqlen_k": 6}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = registry.attention(q, k.bfloat16(), v)
        assert torch.equal(out, registry.attention(q, k, v)) and out.dtype is torch.bfloat16
        assert registry.attention.explain(q, k.half(), v).problem.dtype == "bfloat16"
        out.float().sum().backward()
        assert registry.matmul(a, b[0].bfloat16()).dtype is torch.bfloat16
        assert registry.matmul.explain(a, b[0].bfloat16()).problem.dtype == "bfloat16"
        assert registry.grouped_mm(a.bfloat16(), b, offs=offs).dtype is torch.bfloat16
        tokens = torch.randn(6, 2, 16)
        assert registry.attention_varlen(tokens, tokens.bfloat16(), tokens, **packed).dtype is torch.bfloat16
        with pytest.raises(registry.InvalidArgument, match="k: got dtype float64"):
            registry.attention(q, k.double(), v)
        with pytest.raises(registry.InvalidArgument, match="q: got list"):
            registry.attention([1.0], k, v)
    assert q.grad is not None and q.grad.dtype is torch.float32


def test_parameters_are_plain():
    assert tensors.plain(torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("place", [0, 1])
def test_lazily_negated_views_are_not_plain(place):
    """Their memory holds the other sign, which torch's dispatcher knows and kernels do not."""
    given = [torch.ones(2), torch.ones(2)]
    given[place] = torch.complex(given[0], given[1]).conj().imag
    assert not tensors.plain(*given) and tensors.plain(*(x.resolve_neg() for x in given))


def test_checkpointing_recomputes_the_same():
    q, k, v = qkv(grad=True)
    out = torch.utils.checkpoint.checkpoint(registry.attention, q, k, v, use_reentrant=False)
    out.sum().backward()
    again = [x.detach().requires_grad_() for x in (q, k, v)]
    registry.attention(*again).sum().backward()
    torch.testing.assert_close(q.grad, again[0].grad)


def test_autocast_around_a_backward_leaves_its_operands_alone():
    """They are what the forward saved, of whatever dtype that was."""
    q, k, v = qkv(grad=True)
    out, lse = registry.attention(q, k, v, return_lse=True)
    (wanted,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        asked = registry.attention.backward.explain(torch.ones_like(out), q, k, v, out, lse, scale=0.25)
        (found,) = torch.autograd.grad(out.sum(), q)
    assert asked.problem.dtype == "float32"
    torch.testing.assert_close(found, wanted)


def test_explain_refuses_the_problem_of_another_op():
    q = torch.randn(1, 2, 8, 16)
    problem, _ = registry.attention.problem_of(q, q, q)
    with pytest.raises(registry.InvalidArgument, match="problem: got one of attention; allowed: one of matmul"):
        registry.matmul.explain(problem)


def test_explain_inside_of_vmap_says_what_it_cannot_see():
    q = torch.randn(2, 1, 2, 4, 8)
    with pytest.raises(registry.InvalidArgument, match=r"q.*torch\.func\.vmap"):
        torch.func.vmap(lambda one: registry.attention.explain(one, one, one))(q)
