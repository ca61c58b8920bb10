"""Claims that nothing can use: the kit says which, and what stands in their way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from mutants import original

import registry
from registry import Design, Requires, Variant
from registry.testing import Report, check_variant, checks_for

VARLEN: dict[str, Any] = dict(
    arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), kv_layouts=("cache",), causal=True, lse=True, ieee=True
)


def of(op: str, run: Any = None, **claims: Any) -> Variant:
    def never(*tensors: Any, **given: Any) -> Any:
        raise AssertionError("nobody calls this")

    return Variant("test.claims", op=op, run=run or never, requires=Requires(**claims), design=Design(dsl="torch"))


def said(variant: Variant) -> str:
    """What the check of the claims complains of."""
    report = check_variant(variant, only=lambda name: name == "every claim can be used")
    (case,) = report.cases
    return case.detail


def test_plain_dtypes_of_keys_are_paired_with_no_scales() -> None:
    """float32 keys of float32 queries have none; those of 8 bits have one of each kind that is claimed."""
    kernel = original("attention_varlen")
    claims = {**VARLEN, "kv_dtypes": ("float32", "int8"), "kv_scales": ("tensor",)}
    variant = of("attention_varlen", run=kernel.run, **claims)
    variant = dataclasses.replace(variant, configs=({"BLOCK_M": 64},))
    names = [check.name for check in checks_for(variant)]
    assert any("int8 by tensor" in name for name in names)
    assert not any("float32 by tensor" in name for name in names)
    assert not said(variant)


@pytest.mark.parametrize(
    ("claims", "claim", "why"),
    [
        ({"kv_dtypes": ("int8",)}, "kv_dtypes", "no kv_scales are claimed"),
        ({"kv_scales": ("tensor",)}, "kv_scales", "which no kv_dtypes claim"),
        ({"kv_scales": ("tensor",), "kv_dtypes": ("float32",)}, "kv_scales", "which no kv_dtypes claim"),
        ({"page_size": (16, 64)}, "page_size", "paged is not among kv_layouts"),
    ],
)
def test_claims_that_need_another_claim(claims: dict[str, Any], claim: str, why: str) -> None:
    found = said(of("attention_varlen", **VARLEN | claims))
    assert f"no call can make use of {claim}: " in found and why in found
    assert not said(of("attention_varlen", **VARLEN))


def test_claims_of_no_gradient() -> None:
    claims = {**VARLEN, "kv_layouts": ("packed", "cache"), "out": True}
    found = said(of("attention_varlen_backward", **claims))
    assert "no call can make use of kv_layouts" in found and "no call can make use of out" in found


def test_what_refuses_is_said() -> None:
    """Of the gradients of attention: each call has an LSE, and who does not claim it is never asked."""
    found = said(of("attention_backward", arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), layouts=("bhsd",)))
    assert "no legal problem found for lse=True: most were refused for lse: got True, allowed off" in found
    assert "no legal problem found at all" in found


def test_what_the_op_takes_from_nobody_is_said() -> None:
    """A bias where a and b have two dimensions."""
    claims: dict[str, Any] = dict(arch=("cpu",), dtypes=("float32",), layouts=("nn",), forms=("inner",), ieee=True)
    assert "no legal problem found for bias=plain: the op takes no such call" in said(
        of("grouped_mm", bias=True, **claims)
    )


# --- results of no claimed dtype ----------------------------------------------------------------------------------


def int8(a: Any, b: Any, *, config: Any) -> Any:
    return a.int() @ b.int()


def float8(a: Any, b: Any, *, config: Any) -> Any:
    return (a.float() @ b.float()).bfloat16()


def float8_groups(a: Any, b: Any, *, config: Any, offs: Any) -> Any:
    out, start = torch.zeros(a.shape[0], b.shape[2], dtype=torch.bfloat16), 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = float8(a[start:end], b[group], config=config)
        start = end
    return out


DEFAULTS = {
    "int8": of("matmul", int8, arch=("cpu",), dtypes=("int8",), layouts=("nn",)),
    "float8": of("matmul", float8, arch=("cpu",), dtypes=("float8_e4m3fn",), layouts=("nn",), promoted=True),
    "groups": of(
        "grouped_mm",
        float8_groups,
        arch=("cpu",),
        dtypes=("float8_e4m3fn",),
        layouts=("nn",),
        forms=("rows",),
        promoted=True,
    ),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_without_a_claim_results_are_what_operands_have_by_default(kind: str) -> None:
    report: Report = check_variant(DEFAULTS[kind], repeat=3)
    assert report.passed, str(report)
    assert any(case.error is not None for case in report.cases)


def test_other_results_are_refused_without_a_claim() -> None:
    registry.register(DEFAULTS["int8"])
    a, b = (torch.ones(4, 4, dtype=torch.int8) for _ in range(2))
    try:
        with registry.use("test.claims"):
            assert registry.matmul(a, b).dtype is torch.int32
            with pytest.raises(registry.IllegalVariant, match="out_dtype: got float32, allowed int32"):
                registry.matmul(a, b, out_dtype=torch.float32)
    finally:
        registry.unregister("test.claims")
