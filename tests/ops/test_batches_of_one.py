"""Batches that turn out to hold one product: a shard's, that of an exported program, and those whose size is data."""

from __future__ import annotations

import pytest
import torch

import registry


def operands(batch, columns=8):
    return torch.randn(batch, 4, 6), torch.randn(batch, 6, columns)


def test_the_torch_op_gives_what_its_fake_says():
    a, b = operands(1)
    for _ in range(2):  # decided, and kept
        found = torch.ops.registry.matmul(a, b, None, "", torch.float32, None, None, None)
        torch.testing.assert_close(found, a @ b)
    bias, scale = torch.randn(8), torch.rand(8)
    scaled = torch.ops.registry.matmul(a, b, bias, "relu", torch.float32, torch.rand(4), scale, None)
    assert scaled.shape == (1, 4, 8)


@pytest.mark.parametrize("how", [{}, {"activation": "silu", "gated": True}], ids=["plain", "gated"])
def test_an_exported_product_takes_batches_of_any_size(how):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return registry.matmul(a, b, **how)

    any_size = {0: torch.export.Dim("batch")}
    program = torch.export.export(Product(), operands(3), dynamic_shapes=(any_size, any_size)).module()
    for batch in (1, 0, 2, 1):
        a, b = operands(batch)
        torch.testing.assert_close(program(a, b), registry.matmul(a, b, **how))


@pytest.mark.parametrize("chosen", [5, 1, 0])
def test_a_batch_whose_size_is_data_compiles_into_one_graph(chosen):
    torch._dynamo.reset()
    a, b = (tensor.double().requires_grad_() for tensor in operands(5))
    some = torch.arange(5) < chosen

    @torch.compile(backend="aot_eager", fullgraph=True)
    def product(a, b):
        return registry.matmul(a[some], b[some])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = product(a, b)
    wanted = a[some] @ b[some]
    torch.testing.assert_close(found, wanted)
    ours, torchs = (torch.autograd.grad(out.square().sum(), (a, b)) for out in (found, wanted))
    torch.testing.assert_close(ours, torchs)
