"""triton_varlen under Triton's interpreter, forward, split and backward, against the float64 oracle: no GPU needed.

As test_triton_fa2_interpreter.py, this file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
Pages that no sequence uses, and the rest of a sequence's last page, hold NaN; tables name pages in random order, and
behind a sequence's last page none that there is.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED
from features import drawn, plain, tried

QUERIES, KEYS = (3, 0, 18, 1), (20, 5, 37, 0)
FEATURES = {
    "queries keys": [(QUERIES, KEYS), ((0, 1), (16, 7)), ((1, 17, 2), (40, 0, 7)), ((1, 2, 0, 1), (33, 40, 1, 7))],
    "hq hk": [(4, 2), (1, 1), (4, 1), (6, 2), (3, 3)],
    "d": [16, 24, 32],
    "dv": [16, 32],
    "kv": ["paged", "cache", "packed"],
    "page": [16, 1, 3, 64],
    "causal": [False, True],
    "window": [None, None, (9, None), (None, 5), (12, 3)],
    "softcap": [0.0, 0.0, 2.0],
    "sinks": [False, False, True],
    "alibi": [False, False, True],
    "kv_dtype": [None],
    "scales": [""],
    "dtype": [torch.float16, torch.float32],
    "scale": [0.3],
    "m": [16, 32],
    "n": [16, 32],
    "stages": [2],
    "programs": [5, 1, 7, 25],
    "least": [1, 2],
    "strided": [False],
    "split": [False, False, True],
    "dlse": [False, False, True],
}
BASE = plain(FEATURES)
CORNERS = [
    dict(),
    dict(kv="packed", causal=True),
    dict(kv="cache", causal=True, window=(7, 0)),
    dict(page=1, causal=True, hq=3, hk=1),
    dict(page=5, window=(5, 3)),
    dict(page=64, n=32, sinks=True, causal=True),
    dict(sinks=True, alibi=True, softcap=2.0, kv="packed"),
    dict(alibi=True, causal=True, window=(9, None), kv="cache", strided=True),
    dict(d=24, dv=40, hq=6, causal=True, strided=True),
    dict(kv_dtype=torch.int8, scales="tensor", causal=True),
    dict(kv_dtype=torch.int8, scales="head", kv="cache"),
    dict(kv_dtype=torch.int8, scales="token", page=4),
    dict(kv_dtype=torch.int8, scales="token", kv="packed", sinks=True),
    dict(kv_dtype=torch.float8_e4m3fn, scales="token", page=32, kv="cache"),
    dict(dtype=torch.float32, causal=True, stages=1),
    dict(queries=(1,) * 6, keys=(70, 1, 0, 33, 16, 64), hq=8, hk=1, programs=3),
    dict(queries=(1,) * 2, keys=(200, 3), hq=8, programs=40),
    dict(queries=(2, 1), keys=(150, 90), programs=40, least=3, causal=True),
    dict(queries=(1,) * 3, keys=(240,) * 3, programs=20),  # equal tiles: each program gets a third of one
    dict(queries=(1,) * 3, keys=(490,) * 3, programs=14),  # a half, and a block less where a tile begins
    dict(queries=(3,) * 2, keys=(90,) * 2, hq=16, programs=16, causal=True),  # two tiles a sequence
]
PACKED_CORNERS = [
    dict(),
    dict(causal=True, hq=3, hk=1),
    dict(causal=True, window=(7, 0), n=32),
    dict(window=(5, 3), m=32),
    dict(sinks=True, causal=True, dlse=True),
    dict(sinks=True, alibi=True, softcap=2.0),
    dict(d=24, dv=40, causal=True, split=True, strided=True),
    dict(dtype=torch.float32, dlse=True, softcap=1.0),
    dict(queries=(40, 1), keys=(40, 33), causal=True, hq=8, hk=1),
]


def made(c: dict) -> tuple[list[torch.Tensor], dict]:
    """([q, k, v], what else a call takes)."""
    torch.manual_seed(0)
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (c["queries"], c["keys"])]
    given: dict = {"cu_seqlens_q": starts[0], "max_seqlen_q": max(c["queries"]), "max_seqlen_k": max(c["keys"])}
    batch = len(c["keys"])
    if c["kv"] == "packed":
        leading, used = (int(starts[1][-1]),), None
        given["cu_seqlens_k"] = starts[1]
    else:
        given["seqused_k"] = torch.tensor(c["keys"]).int()
        if c["kv"] == "cache":
            leading = (batch, max(c["keys"]) + 3)
            used = torch.arange(leading[1]) < given["seqused_k"][:, None]
        else:
            width = -(-max(c["keys"]) // c["page"]) + 1
            leading = (batch * width + 3, c["page"])
            table = torch.randperm(leading[0])[: batch * width].int().view(batch, width)
            used = torch.zeros(leading, dtype=torch.bool)
            for b, length in enumerate(c["keys"]):
                at = torch.arange(length)
                used[table[b].long()[at // c["page"]], at % c["page"]] = True
                table[b, -(-length // c["page"]) :] = 10**6
            given["block_table"] = table

    def tensor(*shape: int) -> torch.Tensor:
        wide = torch.randn(*shape[:-1], shape[-1] + 8 * c["strided"])[..., : shape[-1]]
        return wide if c["strided"] else wide.contiguous()

    q = tensor(int(starts[0][-1]), c["hq"], c["d"]).to(c["dtype"])
    cached = []
    for width in (c["d"], c["dv"]):
        x = tensor(*leading, c["hk"], width)
        if c["kv_dtype"] is not None:
            x = (20 * x).clamp(-127, 127).to(c["kv_dtype"])
        else:
            x = x.to(c["dtype"])
            if used is not None:
                x[~used] = float("nan")
        cached.append(x)
    if c["scales"]:
        shape = {"tensor": (1,), "head": (c["hk"],), "token": (*leading, c["hk"])}[c["scales"]]
        given |= {"k_scale": torch.rand(shape) / 10 + 0.01, "v_scale": torch.rand(shape) / 10 + 0.01}
    if c["sinks"]:
        given["sinks"] = torch.randn(c["hq"]) * 2
    if c["alibi"]:
        given["alibi_slopes"] = torch.rand(c["hq"]) / 5
    return [q, *cached], given


def features(c: dict) -> dict:
    return {name: c[name] for name in ("causal", "window", "softcap", "scale")}


if INTERPRETED:
    from interpreter import ALLOWED, check, error, gradient_config

    @tried([*CORNERS, *drawn(FEATURES, 6, seed=1)])
    def test_forward(changes, monkeypatch):
        from registry import attention_varlen
        from registry.ops.attention_varlen.lengths import LENGTHS
        from registry.plugins.triton_varlen import host

        monkeypatch.setattr(host, "FEW", (2,))  # sequences are looked at in more than one go
        monkeypatch.setattr(host, "MANY", 4)
        c = {**BASE, **changes}
        tensors, given = made(c)
        before = [t.clone() for t in tensors]
        expected = attention_varlen.reference(*tensors, **given, **features(c), return_lse=True)
        config = dict(BLOCK_M=c["m"], BLOCK_N=c["n"], num_warps=4, num_stages=c["stages"])
        found = host.PREFILL.run(*tensors, config=config, return_lse=True, **given, **features(c))
        check(*found, *expected, c["dtype"])
        config |= {"PER_SM": c["programs"], "LEAST": c["least"]}
        out = torch.empty_like(expected[0], dtype=c["dtype"]).fill_(float("nan"))
        split, lse = host.SPLIT.run(*tensors, config=config, return_lse=True, out=out, **given, **features(c))
        assert split is out
        check(split, lse, *expected, c["dtype"])
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor.float().nan_to_num(9e9), was.float().nan_to_num(9e9)), "an input was modified"
        assert not LENGTHS.taken()

    @tried([*PACKED_CORNERS, *drawn({**FEATURES, "kv": ["packed"]}, 3, seed=1)])
    def test_backward(changes):
        from registry import attention_varlen
        from registry.plugins.triton_varlen import host

        c = {**BASE, **changes, "kv": "packed"}
        tensors, given = made(c)
        leaves = [t.double().requires_grad_() for t in tensors]
        sinks = given.pop("sinks", None)
        wanted_sinks = {} if sinks is None else {"sinks": sinks.double().requires_grad_()}
        out, lse = attention_varlen.reference(*leaves, **given, **wanted_sinks, **features(c), return_lse=True)
        seen = torch.isfinite(lse)
        grad_out = torch.randn_like(out).to(c["dtype"])
        grad_lse = torch.randn_like(lse).float() if c["dlse"] else None
        total = (out * grad_out.double()).sum()
        if grad_lse is not None:
            total = total + (torch.where(seen, lse, 0.0) * grad_lse.double()).sum()
        wanted = torch.autograd.grad(total, [*leaves, *wanted_sinks.values()])
        config = gradient_config(c["m"], c["n"], c["split"])
        dtype = c["dtype"]
        found = host.BACKWARD.run(
            grad_out,
            *tensors,
            out.detach().to(dtype),
            lse.detach().float(),
            config=config,
            sinks=sinks,
            grad_lse=grad_lse,
            **given,
            **features(c),
        )
        for name, got, one in zip(("q", "k", "v", "sinks"), found, wanted, strict=False):
            assert torch.isfinite(got).all(), f"d{name}"
            allowed = 1e-5 if name == "sinks" else 3 * ALLOWED[dtype]  # a sink's does not show that `out` was rounded
            assert error(got, one) < allowed, f"d{name}: {error(got, one):.1e}"

    def test_a_sinks_gradient_shows_nothing_of_products_in_tf32():
        """It hangs on delta, which an output in float32 knows better than P and dP do."""
        from registry import attention_varlen
        from registry.ops.parts.memory import conditions
        from registry.plugins.triton_varlen import host

        c = {**BASE, "kv": "packed", "dtype": torch.float32, "sinks": True, "alibi": True, "softcap": 5.0, "d": 64}
        c |= {"window": (5, 3), "keys": QUERIES, "dv": 64}
        (q, k, v), given = made(c)
        q, sinks = 6 * q, given["sinks"]
        out, lse = attention_varlen.reference(q, k, v, **given, **features(c), return_lse=True)
        grad_out = torch.randn_like(out)
        share = torch.exp(sinks.double()[:, None] - lse)
        want = -(share * (out * grad_out).sum(-1).t()).sum(1)
        config = gradient_config(16, 16, False, stages=1)
        with conditions(ieee=False):
            *_, got = host.BACKWARD.run(
                grad_out.float(), q, k, v, out.float(), lse.float(), config=config, **given, **features(c)
            )
        assert error(got, want) < 3e-4, f"{error(got, want):.1e}"

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize("lie", ["used", "negative", "starts", "page", "maximum"])
    @pytest.mark.parametrize("kernel", ["PREFILL", "SPLIT"])
    def test_lengths_that_lie_stay_within_bounds_and_are_told(kernel, lie):
        from registry.ops.attention_varlen.lengths import LENGTHS
        from registry.plugins.triton_varlen import host

        c = {**BASE, "queries": (2, 1, 3), "keys": (90, 5, 20)}  # longer than what a maximum is rounded up to
        tensors, given = made(c)
        tensors = [torch.nan_to_num(t) for t in tensors]
        given["block_table"].clamp_(max=tensors[1].shape[0] - 1)
        told = {
            "used": "seqused_k",
            "negative": "seqused_k",
            "starts": "cu_seqlens_q",
            "page": "block_table",
            "maximum": "max_seqlen_k",
        }[lie]
        if lie == "used":
            given["seqused_k"][1] = 10**6
        elif lie == "negative":
            given["seqused_k"][1] = -5
        elif lie == "starts":
            given["cu_seqlens_q"][1] = 10**6
        elif lie == "page":
            given["block_table"][0, 0] = -(10**6)
        else:
            given["max_seqlen_k"] = 16
        config = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1, PER_SM=4, LEAST=1)
        out, _ = getattr(host, kernel).run(*tensors, config=config, scale=0.3, **given)
        assert torch.isfinite(out[0] if lie == "starts" else out).all()
        assert any(told in sentence for sentence in LENGTHS.taken())
