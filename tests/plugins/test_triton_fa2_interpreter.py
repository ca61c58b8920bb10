"""triton_fa2 under Triton's interpreter, forward and backward, against the float64 oracle: no GPU needed.

Interpreting and compiling cannot share a process (a kernel is bound to one of them on import), so this file runs itself
once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

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

    @tried([*CORNERS, *drawn(FEATURES, 12, seed=0)])
    def test_against_the_oracle(changes):
        from registry.ops.attention.oracle import reference
        from registry.plugins import triton_fa2

        torch.manual_seed(0)
        c = {**BASE, **changes}
        q = tensor(c["order"], c["b"], c["h"], c["sq"], c["d"], c["dtype"])
        k = tensor(c["order"], c["b"], c["hk"], c["sk"], c["d"], c["dtype"])
        v = tensor(c["order"], c["b"], c["hk"], c["sk"], c["dv"], c["dtype"])
        before = [t.clone() for t in (q, k, v)]
        what = dict(causal=c["causal"], window=c["window"], softcap=c["softcap"], scale=c["scale"])
        config = dict(BLOCK_M=c["m"], BLOCK_N=c["n"], num_warps=4, num_stages=c["stages"])
        out, lse = triton_fa2.host.FORWARD.run(q, k, v, config=config, return_lse=True, **what)
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        expected, expected_lse = reference(*leaves, **what)
        check(out, lse, expected.detach(), expected_lse.detach(), c["dtype"])

        if max(c["d"], c["dv"]) > 256:
            return
        grad_out = tensor(c["order"], *out.shape, c["dtype"])
        grad_lse = torch.randn_like(lse) if c["dlse"] else None
        config = gradient_config(c["m"], c["n"], c["split"])
        found = triton_fa2.host.BACKWARD.run(grad_out, q, k, v, out, lse, config=config, grad_lse=grad_lse, **what)
        total = (expected * grad_out.double()).sum()
        if grad_lse is not None:
            total = total + (expected_lse.nan_to_num(neginf=0.0) * grad_lse.double()).sum()
        for name, got, wanted in zip("qkv", found, torch.autograd.grad(total, leaves), strict=True):
            assert torch.isfinite(got).all(), f"d{name}"
            assert error(got, wanted) < 3 * ALLOWED[c["dtype"]], f"d{name}: {error(got, wanted):.1e}"
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True)), "an input was modified"
