"""Triton's interpreter, mended as the conformance kit mends it: to be imported where TRITON_INTERPRET=1."""

from typing import Any

import torch

from registry.ops.parts.products import default_out_dtype
from registry.testing import interpreted

assert not interpreted.mend()
ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1.0))


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: torch.Tensor,
    wanted_lse: torch.Tensor,
    dtype: torch.dtype,
    of_lse: float = 1e-4,
) -> None:
    """What attention gave, of sequences or packed ones; rows that see no key are 0, and -inf in the log-sum-exp."""
    seen = torch.isfinite(wanted_lse)
    assert out.dtype == dtype and out.shape == wanted.shape and lse.dtype == torch.float32
    assert error(out, wanted) < ALLOWED[dtype], f"{error(out, wanted):.1e}"
    assert torch.equal(torch.isneginf(lse), ~seen)
    assert not seen.any() or (lse - wanted_lse)[seen].abs().max() < of_lse
    assert (out[~(seen.T if out.dim() == 3 else seen)] == 0).all()


OF_PRODUCTS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.int32: 0.0}


def matrix(rows: int, columns: int, letter: str, dtype: torch.dtype = torch.float16, batch: Any = ()) -> torch.Tensor:
    """Of a layout's letter: as it is written, or transposed."""
    shape = (*batch, rows, columns) if letter == "n" else (*batch, columns, rows)
    x = (torch.randint(-9, 9, shape) if dtype == torch.int8 else torch.randn(shape)).to(dtype)
    return x if letter == "n" else x.mT


def check_product(
    run: Any, op: Any, a: torch.Tensor, b: torch.Tensor, out: Any = None, out_dtype: Any = None, **given: Any
) -> torch.Tensor:
    """What `run` gives, held against the op's definition in float64; `out` is poisoned first, operands stay."""
    kind = out_dtype or default_out_dtype(a.dtype)
    wanted = op.reference(a, b, **given)
    out = torch.empty(wanted.shape, dtype=kind) if out is None else out
    out.fill_(float("nan") if kind.is_floating_point else -(2**31))
    before = a.clone(), b.clone()
    assert run(a, b, out=out, out_dtype=kind, **given) is out
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])
    off = (out.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert off <= OF_PRODUCTS[kind], f"relative error {off:.2e}"
    return out


def gradient_config(rows: int, keys: int, split: bool, stages: int = 2) -> dict[str, Any]:
    """Of both passes of attention's gradients: tiles of so many queries and keys in the one, turned in the other."""
    query = {"QUERY_M": rows, "QUERY_N": keys, "query_warps": 4, "query_stages": stages}
    return query | {"KEY_M": keys, "KEY_N": rows, "key_warps": 4, "key_stages": stages, "KEY_SPLIT": split}
