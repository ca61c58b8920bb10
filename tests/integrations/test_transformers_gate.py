"""The gate of a fused MLP that trains: its kernels by Triton's interpreter. Runs itself once more, interpreted."""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    import interpreter  # noqa: F401 (it mends Triton's)

    from registry.integrations.transformers import gate as kernels

    @pytest.mark.parametrize("activation", ["silu", "relu"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_is_right_and_so_are_its_gradients(activation, dtype):
        gate, up, grad = (torch.randn(3, 1000).to(dtype) * 3 for _ in range(3))
        gate[0, :4] = torch.tensor([0.0, float("nan"), -90.0, 90.0])
        gate, up = gate.requires_grad_(), up.requires_grad_()
        ours = kernels.gated(gate, up, activation)
        found = (ours, *torch.autograd.grad(ours, (gate, up), grad))
        wide = [one.detach().double().requires_grad_() for one in (gate, up)]
        exact = kernels._TORCHS[activation](wide[0]) * wide[1]
        wanted = (exact, *torch.autograd.grad(exact, wide, grad.double()))
        for one, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                one, want.to(dtype), equal_nan=True, rtol=2e-5 if dtype == torch.float32 else 8e-3, atol=1e-6
            )

    def test_second_derivatives_and_gradients_of_one_number():
        gate, up = (torch.randn(2, 5, requires_grad=True) for _ in range(2))
        kernels.gated(gate, up, "silu").sum().backward()  # an expanded gradient
        torch.testing.assert_close(up.grad, torch.nn.functional.silu(gate))

        def curvature(function):
            (first,) = torch.autograd.grad(function(gate, up).square().sum(), gate, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (gate, up))

        ours = curvature(lambda g, u: kernels.gated(g, u, "silu"))
        torch.testing.assert_close(ours, curvature(lambda g, u: torch.nn.functional.silu(g) * u), rtol=1e-4, atol=1e-5)

    def test_nothing_to_do():
        nothing = torch.empty(0, 4, requires_grad=True)
        kernels.gated(nothing, nothing, "silu").sum().backward()
        assert nothing.grad.shape == (0, 4)
