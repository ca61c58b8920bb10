"""Who writes to `out` past torch, as kernels do, is seen by autograd all the same."""

from __future__ import annotations

import pytest
import torch

import registry
from registry import Requires, Variant

LENGTHS = torch.tensor([0, 3, 6], dtype=torch.int32)
HEADS = torch.randn(6, 2, 8)
CALLS = {
    "matmul": ((torch.randn(6, 4), torch.randn(4, 5)), {}),
    "grouped_mm": ((torch.randn(6, 4), torch.randn(2, 4, 5)), {"offs": LENGTHS[1:]}),
    "attention_varlen": (
        (HEADS, HEADS, HEADS),
        {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "max_seqlen_q": 3, "max_seqlen_k": 3},
    ),
}
CLAIMS = {
    "matmul": {"layouts": ("nn",)},
    "grouped_mm": {"layouts": ("nn",), "forms": ("rows",)},
    "attention_varlen": {"head_dim": (8, 8), "kv_layouts": ("packed",)},
}


@pytest.fixture(params=CALLS)
def op(request):
    """An op with a variant whose result comes into `out` without a word to torch."""
    one = getattr(registry, request.param)
    operands, given = CALLS[request.param]

    def run(*tensors, config, out, **more):
        found = one.reference(*operands, **given).float()
        if out is not None:
            out.numpy()[...] = found.numpy()
            found = out
        return (found, None) if request.param == "attention_varlen" else found

    requires = Requires(arch=("cpu",), dtypes=("float32",), out=True, ieee=True, **CLAIMS[request.param])
    registry.register(Variant("acme.past", op=request.param, run=run, requires=requires))
    yield one
    registry.unregister("acme.past")


@pytest.mark.parametrize("times", [1, 2], ids=["first", "again"])
def test_who_has_saved_out_is_told(op, times):
    operands, given = CALLS[op.name]
    wanted = op.reference(*operands, **given).float()
    for _ in range(times):
        out, weight = torch.randn(wanted.shape), torch.randn(wanted.shape, requires_grad=True)
        loss = (out * weight).sum()
        op(*operands, **given, out=out, variant="acme.past")
        torch.testing.assert_close(out, wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        op(*operands, **given, out=torch.empty(wanted.shape), variant="acme.past")
