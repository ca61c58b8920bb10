"""Compiled graphs call what is beneath the torch ops, and all that holds for the ops holds for these calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import registry
from registry import doctor
from registry.dispatch import compiled_calls, traced

pytestmark = pytest.mark.slow(2, together="inductor")


def attend(q, k, v, *, scale, causal, config):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal), None


def attend_with_lse(q, k, v, *, scale, causal, return_lse, config):
    return registry.attention(q, k, v, scale=scale, causal=causal, return_lse=True, variant="torch_math")


@pytest.fixture
def qkv():
    torch._dynamo.reset()
    return torch.randn(3, 1, 2, 16, 8)


def compiled(**how):
    return torch.compile(lambda q, k, v: registry.attention(q * 2, k, v, causal=True, **how) + 1, fullgraph=True)


def wanted(q, k, v):
    return registry.attention(q * 2, k, v, causal=True) + 1


def code_of(function, *tensors):
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(function, *tensors)
    return result, "\n".join(code)


@torch.no_grad()
def test_a_graph_calls_what_is_beneath_the_op(declare, qkv, monkeypatch):
    declare("test.kernel", run=attend, causal=True)
    function = compiled(variant="test.kernel")
    found, code = code_of(function, *qkv)
    assert "torch.ops.registry.in_graphs['attention " in code and "torch.ops.registry.attention.default(" not in code
    for _ in range(2):  # torch watches the first, and what is wanted gets its guard when it comes again
        torch.testing.assert_close(found, wanted(*qkv))
    function(*qkv)
    asked = []
    by_facts = registry.attention.plans.by_facts
    monkeypatch.setattr(registry.attention.plans, "by_facts", lambda *a, **k: asked.append(a) or by_facts(*a, **k))
    for _ in range(3):
        torch.testing.assert_close(function(*qkv), wanted(*qkv))
    assert not asked  # the plan is known
    apart = [torch.randn(1 + x.numel())[1:].view(x.shape) for x in qkv]
    torch.testing.assert_close(function(*apart), wanted(*apart))
    assert not torch.compiler.is_compiling()


@torch.no_grad()
def test_it_sees_blocks_and_what_changes(declare, qkv):
    declare("test.kernel", run=attend, causal=True)
    function = compiled(variant="test.kernel")
    for _ in range(3):
        function(*qkv)
    with registry.record() as ran:
        function(*qkv)
    assert ran.counts == {"attention": {"test.kernel": 1}}
    calls = []

    def another(q, k, v, **how):
        calls.append(how)
        return attend(q, k, v, **how)

    registry.unregister("test.kernel")
    with pytest.raises(registry.UnknownVariant):
        function(*qkv)
    declare("test.kernel", run=another, causal=True, deterministic=True)
    torch.testing.assert_close(function(*qkv), wanted(*qkv))
    assert len(calls) == 1
    torch.testing.assert_close(function(*qkv), wanted(*qkv))
    torch.use_deterministic_algorithms(True)  # a plan of its own: what is legal may be another
    try:
        torch.testing.assert_close(function(*qkv), wanted(*qkv))
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_who_watches_sees_the_op(declare, qkv):
    declare("test.kernel", run=attend, causal=True)
    function = compiled(variant="test.kernel")
    function(*qkv)
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    call = torch.ops.registry.in_graphs["attention"]
    given = (*qkv, True, 0.3, -1, -1, 0.0, False, "test.kernel")
    with Watching():
        call(*given)
    assert torch.ops.registry.attention.default in seen
    with FlopCounterMode(display=False) as counter:
        call(*given)
    assert counter.get_total_flops() > 0
    with torch.profiler.profile() as profile:
        function(*qkv)
    assert any(event.key == "registry::attention" for event in profile.key_averages())


def test_a_step_goes_there_both_ways(declare, qkv):
    declare("test.kernel", run=attend_with_lse, causal=True, lse=True)
    leaves = [x.clone().requires_grad_() for x in qkv]

    def step(q, k, v):
        return (registry.attention(q, k, v, causal=True, variant="test.kernel") ** 2).sum()

    def gradients():
        return torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves)

    found, code = code_of(gradients)
    assert "in_graphs['attention " in code and "in_graphs['attention_backward " in code
    expected = torch.autograd.grad(step(*leaves), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_sizes_that_are_not_known(declare, qkv):
    declare("test.kernel", run=attend, causal=True)
    function = torch.compile(compiled(variant="test.kernel"), dynamic=True, fullgraph=True)
    _, code = code_of(function, *qkv)
    assert "in_graphs['attention'](" in code
    for length in (5, 9, 13, 5):
        tensors = torch.randn(3, 1, 2, length, 8)
        torch.testing.assert_close(function(*tensors), wanted(*tensors))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(6, 7), (3, 6, 7)])
def test_products(declare, shape):
    torch._dynamo.reset()

    def run(a, b, *, bias, config):
        return a @ b if bias is None else a @ b + bias

    layouts = ("nn", "nt", "tn", "tt", "strided")
    declare("test.product", op="matmul", run=run, layouts=layouts, bias=True, batched=True)
    a, b, bias = torch.randn(*shape, 8), torch.randn(8, 5), torch.randn(5)
    function = torch.compile(
        lambda a, b, bias: (
            registry.matmul(a, b, variant="test.product"),
            registry.matmul(a, b, bias=bias, variant="test.product"),
        ),
        fullgraph=True,
    )
    for _ in range(3):
        for found, expected in zip(function(a, b, bias), (a @ b, a @ b + bias), strict=True):
            torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_on_request_graphs_call_the_ops(declare, qkv, monkeypatch):
    monkeypatch.setenv(compiled_calls.VARIABLE, "op")
    declare("test.kernel", run=attend, causal=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, code = code_of(compiled(variant="test.kernel"), *qkv)
    assert "torch.ops.registry.attention.default(" in code and "in_graphs" not in code
    torch.testing.assert_close(found, wanted(*qkv))
    calls = compiled_calls._Calls()  # of graphs that another process wrote
    assert calls["attention 12345678"] is torch.ops.registry.attention.default


@pytest.mark.parametrize(("value", "taken"), [("", True), ("op", False), ("Op", True), ("0", True)])
def test_a_request_that_there_is_not_is_a_notice_which_doctor_has(monkeypatch, value, taken):
    monkeypatch.setenv(compiled_calls.VARIABLE, value)
    monkeypatch.setattr(doctor, "lint_tables", lambda tables: [])  # takes seconds
    said = f"REGISTRY_COMPILED_CALLS: got {value!r}; allowed: op, or nothing, for which this is taken"
    assert compiled_calls.wanted() == taken
    assert (said in doctor.examine()["notices"]) == (value not in ("", "op"))


@torch.no_grad()
def test_an_inductor_of_another_form_writes_the_ops(declare, qkv, monkeypatch):
    from torch._inductor.codegen import custom_extern_kernel_codegen as told

    monkeypatch.setattr(told, "CUSTOM_EXTERN_KERNEL_CODEGEN", {})
    with pytest.raises(NotImplementedError):
        compiled_calls.lend()
    monkeypatch.setattr(traced, "_lent", False)
    declare("test.kernel", run=attend, causal=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.testing.assert_close(compiled(variant="test.kernel")(*qkv), wanted(*qkv))
    assert any("by torch's dispatcher" in notice for notice in registry.notices.counts())
