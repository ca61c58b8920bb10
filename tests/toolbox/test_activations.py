"""registry.toolbox.activations under Triton's interpreter: no GPU needed. Runs itself once more, in that process."""

from __future__ import annotations

import torch
from again import INTERPRETED

if INTERPRETED:
    import triton
    import triton.language as tl

    from registry.toolbox.activations import log2_tail

    @triton.jit
    def _tail(y_ptr, out_ptr, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(out_ptr + at, log2_tail(tl.load(y_ptr + at)))

    def tail(y):
        out = torch.full_like(y, float("nan"))
        _tail[(1,)](y, out, len(y))
        return torch.exp2(out.double())

    def exactly(y):
        return 0.5 * torch.special.erfc(y.double() * 0.5**0.5)

    def test_what_gelu_of_16_bits_takes_off():
        y = torch.linspace(0, 6.5, 4096)
        assert (tail(y) / exactly(y) - 1).abs().max() < 2e-5  # a float16 is rounded by 2**-11

    def test_beyond_nothing_is_left_of_it():
        y = torch.linspace(6.5, 14, 4096)  # where it is cut off
        found = tail(y)
        assert (y * (found - exactly(y))).abs().max() < 1e-10
        assert (found.diff() <= 0).all() and found[-1] < 1e-38
