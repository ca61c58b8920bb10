"""triton_fa2 under Triton's interpreter, forward and backward, against the float64 oracle: no GPU needed.

Interpreting and compiling cannot share a process (a kernel is bound to one of them on import), so this file runs itself
once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED
from features import drawn, plain, tried

FEATURES = {
    "b": [1, 2],
    "h hk": [(2, 2), (1, 1), (2, 1), (4, 2), (3, 3)],
    "sq": [37, 1, 16, 21, 40],
    "sk": [37, 3, 16, 32, 45],
    "d": [16, 24, 32, 64],
    "dv": [16, 32],
    "causal": [False, True],
    "window": [None, None, (9, -1), (-1, 5), (12, 3)],
    "softcap": [0.0, 0.0, 2.0],
    "scale": [0.25, -0.2],
    "dtype": [torch.float32, torch.float16],
    "order": ["bhsd", "bshd", "odd"],
    "m": [16, 32],
    "n": [16, 32],
    "stages": [2],
    "split": [False, False, True],
    "dlse": [False, False, True],
}
BASE = plain(FEATURES)
CORNERS = [
    dict(),
    dict(causal=True, sq=48, sk=48),
    dict(causal=True, sq=40, sk=21),  # rows that see no key
    dict(causal=True, sq=20, sk=41, h=4, hk=2, dlse=True),
    dict(h=3, hk=1, b=2, causal=True, n=32, split=True),
    dict(causal=True, window=(1000, 0), sq=200, sk=20, softcap=5.0, m=32, n=32),  # a window far beyond the keys
    dict(causal=True, sq=40, sk=21, d=96, dv=32, dtype=torch.float16, stages=1),  # V is padded to K's swizzle
    dict(window=(7, 2), sq=33, sk=50),
    dict(window=(0, 0), sq=30, sk=19),
    dict(window=(5, -1), causal=True),
    dict(window=(-1, 4), sq=50, sk=21),
    dict(window=(100, 100)),  # reaches everything: the unmasked kernel
    dict(softcap=1.5, causal=True, scale=-0.4, dlse=True),
    dict(scale=-0.3),
    dict(scale=0.0, causal=True),
    dict(d=24, dv=40, order="bshd"),
    dict(d=40, dv=16, split=True, window=(9, 3)),
    dict(sq=1, sk=33, causal=True, h=4, hk=1),
    dict(sq=33, sk=1),
    dict(sq=1, sk=1),
    dict(order="columns"),
    dict(order="odd", dtype=torch.float16),
    dict(order="broadcast", b=2),
    dict(dtype=torch.float16, d=72, dv=72, causal=True, m=32, n=32),
    dict(dtype=torch.bfloat16, d=24, dv=24, causal=True, n=32),
    # Heads of two tiles, values shared out among programs (and no gradients).
    dict(dtype=torch.float16, d=320, dv=320, m=64, scale=0.05),
    dict(dtype=torch.float16, d=576, dv=512, hk=1, causal=True, m=64, sk=50, scale=-0.04),
    dict(dtype=torch.float16, d=264, dv=40, window=(7, 2), order="odd", stages=1, scale=0.06),
    dict(dtype=torch.float16, d=48, dv=400, m=64, order="bshd", stages=1),
]
WIDE_CORNERS = [
    dict(d=320, dv=264, scale=0.05),
    dict(d=320, dv=264, causal=True, sq=48, sk=48, scale=0.05, order="bshd"),
    dict(d=264, dv=512, causal=True, sq=70, sk=21, scale=-0.05, dlse=True),  # rows that see no key
    dict(d=264, dv=8, causal=True, sq=20, sk=75, h=4, hk=2, b=2, dtype=torch.bfloat16),
    dict(d=8, dv=264, window=(7, 2), sq=33, sk=50, h=3, hk=1),
    dict(d=264, dv=264, window=(5, -1), sq=90, sk=90, softcap=1.5, scale=0.08),
    dict(d=264, dv=264, window=(-1, 4), sq=50, sk=21, h=4, hk=1, dlse=True),
    dict(d=272, dv=264, window=(1000, 0), causal=True, sq=200, sk=20, softcap=5.0, scale=0.0),
    dict(d=264, dv=264, sq=1, sk=1),
    dict(d=576, dv=512, sq=17, sk=64, h=2, hk=1, causal=True, order="bshd", scale=0.04),
]


def tensor(order: str, b: int, h: int, s: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    if order == "bshd":
        return torch.randn(b, s, h, d).to(dtype).transpose(1, 2)
    if order == "columns":  # no unit inner stride
        return torch.randn(b, h, s, 2 * d).to(dtype)[..., ::2]
    if order == "odd":  # rows at odd offsets
        return torch.randn(b, h, s, d + 3).to(dtype)[..., :d]
    if order == "broadcast":
        return torch.randn(1, 1, s, d).to(dtype).expand(b, h, s, d)
    return torch.randn(b, h, s, d).to(dtype)


if INTERPRETED:
    from interpreter import ALLOWED, check, error, gradient_config

    def check_gradients(c, run, config, inputs, forward, what, wanted_forward, leaves):
        """What `run` gives of a drawn gradient, held against autograd through the oracle."""
        before = [t.clone() for t in inputs]
        grad_out = tensor(c["order"], *forward[0].shape, c["dtype"])
        grad_lse = torch.randn_like(forward[1]) if c["dlse"] else None
        found = run(grad_out, *inputs, *forward, config=config, grad_lse=grad_lse, **what)
        total = (wanted_forward[0] * grad_out.double()).sum()
        if grad_lse is not None:
            total = total + (wanted_forward[1].nan_to_num(neginf=0.0) * grad_lse.double()).sum()
        for name, got, wanted in zip("qkv", found, torch.autograd.grad(total, leaves), strict=True):
            assert torch.isfinite(got).all(), f"d{name}"
            assert error(got, wanted) < 3 * ALLOWED[c["dtype"]], f"d{name}: {error(got, wanted):.1e}"
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input was modified"

    def drawn_inputs(changes):
        """(the whole case, q k v, the keywords) of what a case changes."""
        torch.manual_seed(0)
        c = {**BASE, **changes}
        q = tensor(c["order"], c["b"], c["h"], c["sq"], c["d"], c["dtype"])
        k = tensor(c["order"], c["b"], c["hk"], c["sk"], c["d"], c["dtype"])
        v = tensor(c["order"], c["b"], c["hk"], c["sk"], c["dv"], c["dtype"])
        return c, (q, k, v), dict(causal=c["causal"], window=c["window"], softcap=c["softcap"], scale=c["scale"])

    @tried([*CORNERS, *drawn(FEATURES, 12, seed=0)])
    def test_against_the_oracle(changes):
        from registry.ops.attention.oracle import reference
        from registry.plugins import triton_fa2

        c, inputs, what = drawn_inputs(changes)
        config = dict(BLOCK_M=c["m"], BLOCK_N=c["n"], num_warps=4, num_stages=c["stages"])
        before = [t.clone() for t in inputs]
        out, lse = triton_fa2.host.FORWARD.run(*inputs, config=config, return_lse=True, **what)
        leaves = [t.double().requires_grad_() for t in inputs]
        expected, expected_lse = reference(*leaves, **what)
        check(out, lse, expected.detach(), expected_lse.detach(), c["dtype"])
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input was modified"
        if max(c["d"], c["dv"]) <= 256:
            config = gradient_config(c["m"], c["n"], c["split"])
            run = triton_fa2.host.BACKWARD.run
            check_gradients(c, run, config, inputs, (out, lse), what, (expected, expected_lse), leaves)

    @pytest.mark.parametrize("chunk", [1 << 30, 1], ids=["together", "one-by-one"])
    @tried(WIDE_CORNERS)
    def test_gradients_of_wide_heads(changes, chunk, monkeypatch):
        from registry.ops.attention.oracle import reference
        from registry.plugins.triton_fa2.stored import host

        monkeypatch.setattr(host, "CHUNK", chunk)
        c, inputs, what = drawn_inputs({"dtype": torch.float16, **changes})
        leaves = [t.double().requires_grad_() for t in inputs]
        wanted = reference(*leaves, **what)
        forward = wanted[0].detach().to(c["dtype"]), wanted[1].detach().float()
        config = dict(WEIGHTS_M=32, WEIGHTS_N=64, WEIGHTS_K=64, weights_warps=4, weights_stages=2)
        config |= dict(COLUMNS=128, INNER=32, product_warps=4, product_stages=2)
        torch.use_deterministic_algorithms(True)  # memory is NaN until it is written: what is hidden is not read
        try:
            check_gradients(c, host.TRITON.run, config, inputs, forward, what, wanted, leaves)
        finally:
            torch.use_deterministic_algorithms(False)
