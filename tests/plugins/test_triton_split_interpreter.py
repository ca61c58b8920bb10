"""triton_split under Triton's interpreter, against the float64 oracle: no GPU needed.

As test_triton_fa2_interpreter.py, this file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
from again import INTERPRETED
from features import drawn, plain, tried

FEATURES = {
    "b": [2, 1, 3],
    "hq hk": [(4, 2), (1, 1), (4, 1), (3, 3), (6, 3), (20, 5)],
    "s": [1, 2, 5, 17],
    "sk": [70, 1, 16, 33, 150, 300],
    "d": [16, 24, 64],
    "dv": [16, 40],
    "causal": [False, True],
    "window": [None, None, (9, 0), (12, 3)],
    "softcap": [0.0, 2.0],
    "scale": [0.3],
    "dtype": [torch.float16],
    "order": ["bhsd", "bshd", "odd"],
    "m": [16, 32],
    "n": [16, 32],
    "programs": [5, 1, 4, 11, 40],
    "least": [1, 2, 3],
}
BASE = plain(FEATURES)
CORNERS = [
    dict(),
    dict(s=3, causal=True, order="bshd"),
    dict(b=1, hq=8, hk=1, sk=200, programs=40),  # one tile for all programs
    dict(b=3, hk=1, hq=1, sk=240, programs=20),  # equal tiles: each program gets a third of one
    dict(b=3, hk=1, hq=1, sk=490, programs=14),  # a half, and a block less where a tile begins
    dict(s=3, hq=16, hk=2, sk=90, causal=True, programs=16),  # two tiles a head
    dict(hq=7, hk=7, sk=100, programs=15),  # heads of one line
    dict(hq=6, hk=6, sk=50, programs=13),  # of several
    dict(b=5, sk=40, programs=1),  # tiles that nobody shares
    dict(sk=33, programs=40, least=3),
    dict(s=5, window=(7, 2), sk=300, order="odd"),
    dict(s=40, window=(9, 0), causal=True, sk=60, m=32),
    dict(s=20, sk=7, hk=4, causal=True),  # rows that see no key
    dict(s=3, sk=1),
    dict(scale=-0.3, s=2),
    dict(scale=0.0, s=2, causal=True),
    dict(scale=-0.3, softcap=2.0, sk=33),
    dict(d=24, dv=40, order="broadcast"),
    dict(dtype=torch.float32, s=2, causal=True),
]


def made(c: dict) -> list[torch.Tensor]:
    """q, k and v; beyond an odd order's columns there is NaN."""
    torch.manual_seed(0)

    def tensor(heads: int, rows: int, columns: int) -> torch.Tensor:
        if c["order"] == "broadcast":
            return torch.randn(1, heads, rows, columns).to(c["dtype"]).expand(c["b"], -1, -1, -1)
        if c["order"] == "odd":
            wide = torch.full((c["b"], rows, heads, columns + 5), float("nan"), dtype=c["dtype"])
            wide[..., :columns] = torch.randn(*wide.shape[:3], columns)
            return wide.transpose(1, 2)[..., :columns]
        dense = torch.randn(c["b"], rows, heads, columns).to(c["dtype"]).transpose(1, 2)
        return dense.contiguous() if c["order"] == "bhsd" else dense

    return [tensor(c["hq"], c["s"], c["d"]), tensor(c["hk"], c["sk"], c["d"]), tensor(c["hk"], c["sk"], c["dv"])]


if INTERPRETED:
    from interpreter import check

    @tried([*CORNERS, *drawn(FEATURES, 8, seed=3)])
    def test_forward(changes):
        from registry import Target, attention
        from registry.plugins.triton_varlen import dense_host

        c = {**BASE, **changes}
        q, k, v = made(c)
        features = {name: c[name] for name in ("causal", "window", "softcap", "scale")}
        expected, expected_lse = attention.reference(q, k, v, **features, return_lse=True)
        config = dict(BLOCK_M=c["m"], BLOCK_N=c["n"], num_warps=4, num_stages=1, PER_SM=c["programs"], LEAST=c["least"])
        assert Target.of(q.device).sm_count == 1, "PER_SM says how many programs there are"
        out, lse = dense_host.FORWARD.run(q, k, v, config=config, return_lse=True, **features)
        check(out, lse, expected, expected_lse, c["dtype"], of_lse=1e-3)
