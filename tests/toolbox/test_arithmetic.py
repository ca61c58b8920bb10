"""registry.toolbox.arithmetic under Triton's interpreter: no GPU needed. Runs itself once more, in that process."""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

SIZE = 4096
EDGES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 13.0, -13.0, 100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")])

if INTERPRETED:
    import triton
    import triton.language as tl

    from registry.toolbox.arithmetic import activate, to_tf32

    @triton.jit
    def _activated(x_ptr, out_ptr, NAME: tl.constexpr, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(out_ptr + at, activate(tl.load(x_ptr + at), NAME))

    @triton.jit
    def _rounded(x_ptr, out_ptr, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(out_ptr + at, to_tf32(tl.load(x_ptr + at)))

    def activated(x, name):
        out = torch.full_like(x, float("nan"))
        _activated[(1,)](x, out, name, len(x))
        return out

    def exact_gelu(x):
        """By mathematics, limits included: what torch makes of infinity differs from one vendor's CPU to another's."""
        exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
        return torch.where(x == -torch.inf, 0.0, exact)

    @pytest.mark.parametrize("name", ["", "relu", "gelu", "silu"])
    def test_activations_are_exact_to_the_last_bits(name):
        """Against float64, never against what torch makes of it in float32: that differs from one CPU to another."""
        function = {
            "": lambda x: x,
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "silu": torch.nn.functional.silu,
        }
        x = torch.randn(SIZE) * 3
        error = (activated(x, name) - function[name](x.double())).abs()
        assert (error <= 2**-19 * x.double().abs()).all()  # float32 has 24 bits

    @pytest.mark.parametrize("name", ["relu", "gelu"])
    def test_activations_at_the_edges(name):
        x = torch.cat([EDGES, torch.zeros(16 - len(EDGES))])
        found = activated(x, name)
        expected = torch.relu(x) if name == "relu" else exact_gelu(x).float()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-37, equal_nan=True)

    def test_gelu_keeps_the_digits_of_small_results():
        """1 + erf(x) would cancel them."""
        x = torch.linspace(-7, -1, SIZE)
        exact = exact_gelu(x)
        assert ((activated(x, "gelu") - exact).abs() / exact.abs()).max() < 2e-5

    def test_beyond_next_to_nothing_is_left_of_gelu():
        x = torch.linspace(-14, -7, SIZE)
        found = activated(x, "gelu")
        assert (found - exact_gelu(x)).abs().max() < 1e-15 and (found.diff() <= 0).all()

    def test_tf32_is_rounded_to_the_nearest():
        x = torch.cat([torch.randn(SIZE - 16), EDGES, torch.zeros(16 - len(EDGES))])
        found = torch.empty_like(x)
        _rounded[(1,)](x, found, len(x))
        finite = x.isfinite()
        assert not (found.view(torch.int32)[finite] & 0x1FFF).any()
        assert torch.equal(found[~finite].isnan(), x[~finite].isnan()) and found[x.isinf()].isinf().all()
        relative = ((found - x)[finite] / x[finite].where(x[finite] != 0, torch.ones(()))).double()
        assert relative.abs().max() <= 2**-11 and relative.mean().abs() < 2e-5  # cutting off: 2^-10, and all one way
