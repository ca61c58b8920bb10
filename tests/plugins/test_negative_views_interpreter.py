"""Lazily negated views (`z.conj().imag`), whose memory holds the other sign: kernels, by Triton's interpreter, read it.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    import interpreter  # noqa: F401  (which mends it)

    import registry
    from registry.contract.target import interpreting

    H100 = registry.Target.named("H100")
    CU = torch.tensor([0, 5, 16], dtype=torch.int32)
    PACKED = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 11, "max_seqlen_k": 11}
    HEADS, ROWS = (1, 2, 16, 32), (16, 2, 32)

    def negated(x):
        """The same values, by a view of memory that holds their negatives."""
        view = torch._neg_view(-x)
        assert view.is_neg() and torch.equal(view, x)
        return view

    def halves(**shapes):
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}

    def float8(**shapes):
        return {name: x.to(torch.float8_e4m3fn) for name, x in halves(**shapes).items()}

    def attention(**given):
        return registry.attention(**given, return_lse=True)

    def packed(**given):
        return registry.attention_varlen(**given, return_lse=True, **PACKED)

    def saved(call, **given):
        """What the gradients take, of a forward by torch's own operations."""
        out, lse = call(**given)
        return {"grad_out": halves(g=out.shape)["g"], **given, "out": out, "lse": lse, "grad_lse": lse.cos()}

    LENT = {"sinks": (2,), "alibi_slopes": (2,)}
    OF_A_PRODUCT = halves(a=(32, 64), b=(64, 32), bias=(32,))
    OF_GROUPS = halves(a=(32, 64), b=(2, 64, 32), bias=(2, 32))
    ENDS = {"offs": torch.tensor([9, 32], dtype=torch.int32)}
    QKV, QKV_PACKED = halves(q=HEADS, k=HEADS, v=HEADS), halves(q=ROWS, k=ROWS, v=ROWS, **LENT)
    QKV_PACKED["alibi_slopes"] = QKV_PACKED["alibi_slopes"].float()
    SCALES = {"scale_a": torch.rand(32) + 0.5, "scale_b": torch.rand(32) + 0.5}
    CACHED = halves(q=(2, 2, 32)) | {n: torch.randint(-99, 99, (2, 16, 2, 32)).to(torch.int8) for n in "kv"}
    CACHED |= {"k_scale": torch.rand(2), "v_scale": torch.rand(2)}
    STEP = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 16}
    STEP["seqused_k"] = torch.tensor([9, 16], dtype=torch.int32)

    CALLS = {
        "triton_fa2": (attention, QKV),
        "triton_split": (attention, QKV),
        "triton_varlen": (packed, QKV_PACKED | {"out": torch.zeros(ROWS).half()}),
        "triton_varlen_split": (lambda **x: registry.attention_varlen(**x, **STEP), CACHED),
        "triton_matmul": (registry.matmul, OF_A_PRODUCT | {"out": torch.zeros(32, 32).half()}),
        "triton_gemv": (registry.matmul, halves(a=(1, 64), b=(64, 32), bias=(32,))),
        "triton_grouped": (
            lambda **x: registry.grouped_mm(**x, **ENDS),
            OF_GROUPS | {"out": torch.zeros(32, 32).half()},
        ),
        "triton_matmul, scales": (registry.matmul, float8(a=(32, 64), b=(64, 32)) | SCALES),
        "triton_fa2_backward": (registry.attention.backward, saved(attention, **QKV)),
        "triton_varlen_backward": (
            lambda **x: registry.attention_varlen.backward(**x, **PACKED),
            saved(packed, **QKV_PACKED),
        ),
    }
    # Of 8 bits torch negates nothing, so nobody has such views.
    EACH = [(name, which) for name, (_, given) in CALLS.items() for which, x in given.items() if x.element_size() > 1]

    @pytest.mark.parametrize("name, which", EACH)
    def test_a_negated_view_is_what_it_says(name, which):
        """Cold, and where plans and guards of the same call on plain tensors are warm."""
        call, given = CALLS[name]
        with interpreting(H100), registry.use(name.partition(",")[0]), registry.record() as ran:
            wanted = call(**given)
            wanted = wanted.clone() if isinstance(wanted, torch.Tensor) else [x.clone() for x in wanted]
            for _ in range(2):
                view = negated(given[which])
                found = call(**given | {which: view})
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
                if which == "out" and "grad_out" not in given:
                    one = found if isinstance(found, torch.Tensor) else found[0]
                    assert one is view and view.is_neg()
                torch.testing.assert_close(call(**given), wanted, rtol=0, atol=0, equal_nan=True)
        (variants,) = ran.counts.values()
        assert list(variants.values()) == [5]

    def test_a_negated_gradient():
        leaves = [x.clone().requires_grad_() for x in QKV.values()]
        with interpreting(H100), registry.use("triton_fa2", "triton_fa2_backward"):
            out = registry.attention(*leaves)
            grad = halves(g=out.shape)["g"]
            wanted = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            assert torch.autograd.grad(out, leaves, -grad, retain_graph=True)[0].allclose(-wanted[0])
            found = torch.autograd.grad(out, leaves, negated(grad))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    def test_negated_lengths_of_a_schedule():
        given = {n: x for n, x in QKV_PACKED.items() if n in "qkv"}
        ends = PACKED | {"cu_seqlens_q": negated(CU), "cu_seqlens_k": negated(CU)}
        with interpreting(H100), registry.use("triton_varlen"):
            plan = registry.attention_varlen.schedule(**given, **ends)
            found = registry.attention_varlen(**given, **ends, plan=plan)
            torch.testing.assert_close(found, registry.attention_varlen(**given, **PACKED), rtol=0, atol=0)
