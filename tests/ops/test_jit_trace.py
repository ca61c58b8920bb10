"""What torch.jit.trace makes of a call: the op stands in the graph, whatever was called before."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import registry
from registry.ops.parts.cases import save_recorded

STARTS = torch.tensor([0, 5, 16], dtype=torch.int32)
VARLEN = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 11, "max_seqlen_k": 11}
CALLS = {
    "attention": (lambda t: registry.attention(t, t, t, causal=True), (2, 4, 16, 8)),
    "attention_varlen": (lambda t: registry.attention_varlen(t, t, t, **VARLEN), (16, 4, 8)),
    "matmul": (lambda t: registry.matmul(t, t), (16, 16)),
    "grouped_mm": (lambda t: registry.grouped_mm(t, t.expand(2, 16, 16), offs=STARTS[1:]), (16, 16)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_the_op_stands_in_the_graph(op, grad):
    call, shape = CALLS[op]
    given, other = torch.randn(shape, requires_grad=grad), torch.randn(shape, requires_grad=grad)
    for _ in range(20):  # the sixth one crashed
        call(given)
        traced = torch.jit.trace(call, given)
    assert str(traced.graph).count("registry::") == 1
    torch.testing.assert_close(traced(other), call(other))
    if grad:
        expected = torch.autograd.grad(call(other).sum(), other)
        torch.testing.assert_close(torch.autograd.grad(traced(other).sum(), other), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", CALLS)
def test_a_weight_that_is_no_input_is_refused_as_torch_refuses_it(op):
    """The tracer ends with the error, and going on without it ended the process."""
    call, shape = CALLS[op]
    weight = torch.nn.Parameter(torch.randn(shape))
    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
        torch.jit.trace(lambda x: call(weight) + x, torch.randn(()))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("op", ["matmul", "grouped_mm"])
def test_activations_of_weights_pass_the_tracers_own_check(op):
    """Which traces again, without gradients."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 16, 16))

        def forward(self, x):
            if op == "matmul":
                return registry.matmul(x, self.weight[0], activation="relu")
            return registry.grouped_mm(x, self.weight, offs=STARTS[1:], activation="relu")

    layer, x, other = Layer(), torch.randn(16, 16), torch.randn(16, 16)
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(other), layer(other))
    expected = torch.autograd.grad(layer(other).sum(), layer.weight)
    torch.testing.assert_close(torch.autograd.grad(traced(other).sum(), traced.weight), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_traced_module_is_saved_and_what_ran_in_it_too(tmp_path: Path):
    class Attends(torch.nn.Module):
        def forward(self, x):
            return registry.attention(x, x, x)

    x, file = torch.randn(2, 4, 16, 8), io.BytesIO()
    with registry.record() as ran:
        torch.jit.save(torch.jit.trace(Attends(), x), file)
    assert all(type(problem.batch) is int for problem in ran.problems)
    save_recorded(ran.problems, tmp_path / "ran.json")
    torch.testing.assert_close(torch.jit.load(io.BytesIO(file.getvalue()))(x), registry.attention(x, x, x))
