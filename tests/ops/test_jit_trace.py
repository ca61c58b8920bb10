"""What torch.jit.trace makes of a call: the op stands in the graph, whatever was called before."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import registry
from registry.compat.flash_attn import flash_attn_with_kvcache
from registry.integrations import sdpa
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
    assert str(traced.inlined_graph).count("registry::") == 1
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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("given", [("key_lengths",), ("sinks",), ("key_lengths", "sinks")])
def test_ragged_batches_and_sinks_are_traced_for_all_sizes(given, layout):
    """Their longest sequences are sizes, which are tensors to the tracer and integers to the op."""

    class Attends(torch.nn.Module):
        def forward(self, x, *others):
            ragged = dict(zip(given, others, strict=True))
            return registry.attention(x, x, x, causal=True, layout=layout, return_lse=True, **ragged)

    def drawn(lengths, seqlen):
        shape = (len(lengths), 4, seqlen, 8) if layout == "bhsd" else (len(lengths), seqlen, 4, 8)
        by_name = {"key_lengths": torch.tensor(lengths), "sinks": torch.randn(4, requires_grad=True)}
        return torch.randn(shape, requires_grad=True), *(by_name[name] for name in given)

    file = io.BytesIO()
    traced = torch.jit.trace(Attends(), drawn([5, 16], 16))
    assert str(traced.inlined_graph).count("registry::") == 1
    torch.jit.save(traced, file)
    for call in (traced, torch.jit.load(io.BytesIO(file.getvalue()))):
        other = drawn([24, 0, 7], 24)
        found, expected = call(*other), Attends()(*other)
        torch.testing.assert_close(found, expected)
        followed = [one for one in other if one.requires_grad]
        grads = [torch.autograd.grad(out.sum(), followed) for out, _ in (found, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_the_longest_sequence_may_be_a_size():
    def call(x, starts):
        length = x.shape[0]
        return registry.attention_varlen(
            x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length, max_seqlen_k=length
        )

    traced = torch.jit.trace(call, (torch.randn(16, 4, 8), STARTS))
    x, starts = torch.randn(40, 4, 8), torch.tensor([0, 38, 40], dtype=torch.int32)
    torch.testing.assert_close(traced(x, starts), call(x, starts))


SIZED = {
    "scale": lambda t, n: registry.attention(t, t, t, scale=t.shape[-1] ** -0.5),
    "window": lambda t, n: registry.attention(t, t, t, window=(t.shape[2] // 4, 0), softcap=t.shape[-1] * 2.0),
    "cache": lambda t, n: flash_attn_with_kvcache(*[t.transpose(1, 2)] * 3, cache_seqlens=n.to(torch.int32)),
    "door": lambda t, n: sdpa.attention(t, t, t, scale=t.shape[-1] ** -0.5),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("what", SIZED)
@pytest.mark.parametrize("grad", [False, True])
def test_numbers_that_are_worked_out_from_sizes(what, grad):
    """Sizes are tensors there, our own ones too."""
    grad = grad and what != "cache"
    call, lengths = SIZED[what], torch.tensor([3, 16])
    traced = torch.jit.trace(call, (torch.randn(2, 4, 16, 8, requires_grad=grad), lengths))
    assert str(traced.inlined_graph).count("registry::") == 1
    other, lengths = torch.randn(2, 4, 16, 8, requires_grad=grad), torch.tensor([9, 2])
    torch.testing.assert_close(traced(other, lengths), call(other, lengths))
    if grad:
        expected = torch.autograd.grad(call(other, lengths).sum(), other)
        torch.testing.assert_close(torch.autograd.grad(traced(other, lengths).sum(), other), expected)


def test_a_tensor_is_no_number_elsewhere():
    q = torch.randn(2, 4, 16, 8)
    for name in ("scale", "window", "softcap"):
        with pytest.raises(registry.InvalidArgument, match=name):
            registry.attention(q, q, q, **{name: torch.tensor(2)})
