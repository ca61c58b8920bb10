"""Compiled graphs hold torch's own operations where those are chosen, and are traced again when that may change."""

import pytest
import torch
from test_compiled_calls import code_of
from torch._dynamo import testing

import registry
from registry.dispatch import traced

pytestmark = pytest.mark.slow(2, together="inductor")


@torch.no_grad()
def test_a_product_in_a_graph():
    a, b = torch.randn(2, 24, 24)
    compiled = torch.compile(lambda a, b: registry.matmul(a, b) + 1, fullgraph=True)
    result, code = code_of(compiled, a, b)
    torch.testing.assert_close(result, a @ b + 1)
    assert "extern_kernels.mm" in code or "extern_kernels.addmm" in code
    assert "torch.ops.registry" not in code
    with registry.record() as ran:  # what is watched must be seen
        compiled(a, b)
    assert ran.counts == {"matmul": {"torch_matmul": 1}}
    with pytest.raises(registry.IllegalVariant), registry.use("triton_matmul"):
        compiled(a, b)
    assert traced.choice is not None
    torch.testing.assert_close(compiled(a, b), a @ b + 1)


@torch.no_grad()
def test_attention_in_a_graph(declare):
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    compiled = torch.compile(lambda q, k, v: registry.attention(q, k, v, causal=True) * 2, fullgraph=True)
    result, code = code_of(compiled, q, k, v)
    torch.testing.assert_close(result, registry.attention(q, k, v, causal=True) * 2)
    assert "torch.ops.registry" not in code and "_scaled_dot_product_flash_attention_for_cpu" in code
    calls = []

    def run(q, k, v, *, causal, scale, config):
        calls.append(scale)
        return torch.zeros_like(q), None

    declare("test.first", run=run, causal=True, arch=("cpu",))
    decision = registry.attention.explain(q, k, v, causal=True)
    found = compiled(q, k, v)  # a variant has come: what the graph had settled is settled again
    assert bool(calls) == (decision.variant == "test.first")
    if not calls:
        torch.testing.assert_close(found, result)


def test_a_step_in_a_graph():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    compiled = torch.compile(lambda a, b: registry.matmul(a, b).square().sum(), fullgraph=True)
    found = torch.autograd.grad(compiled(a, b), (a, b))
    expected = torch.autograd.grad((a @ b).square().sum(), (a, b))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_graphs_stay_good_where_nothing_has_changed(declare):
    """A tracer gives a function up that it was asked for eight times; a server may read its tables again each hour."""
    counter = testing.CompileCounter()
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(lambda q: registry.attention(q, q, q) * 2, backend=counter, fullgraph=True, dynamic=False)
    for _ in range(10):
        compiled(q)
        registry.reload_tables()
        registry.forget_plans()
    assert counter.frame_count == 1
    for traced_then in (2, 3):  # the second has the name of the first, and may do otherwise
        declare("test.here")
        compiled(q)
        assert counter.frame_count == traced_then
        registry.unregister("test.here")
        compiled(q)
        assert counter.frame_count == traced_then
