"""torch's grouped product as a variant where torch has a kernel for it, and a loop over the groups everywhere.

`torch_grouped_mm` is torch's CUTLASS kernel with what torch leaves out around it (around.py): offsets are put in order
first, for the kernel asserts on the device that they are, and rows beyond the last offset are zeroed after. Bias,
activation, gate and gather are torch operations of their own. `torch_loop` reads the offsets on the host: it waits for
the device, and no CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.grouped_mm.offsets import BAD_OFFSETS, OFFSETS
from registry.ops.grouped_mm.oracle import bounds, finish

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def grouped(a, b, *, offs, rows, bias, activation, gated, out_dtype, scale_a, scale_b, out, config):
    """By torch's own grouped product; what is around it in float32, rounded once."""
    from registry.plugins.torch_grouped.around import in_order, within, zero_behind  # triton: not for the loop

    if rows is not None:
        at = within(rows, a.shape[0])
        a, scale_a = a.index_select(0, at), None if scale_a is None else scale_a.index_select(0, at)
    if offs is not None:
        offs = in_order(offs, a.shape[0] if b.dim() == 3 else a.shape[1])
    if scale_a is None:
        result = torch._grouped_mm(a, b, offs)
    else:
        result = torch._scaled_grouped_mm(
            a, b, scale_a.contiguous(), scale_b.contiguous(), offs, out_dtype=torch.bfloat16
        )
    ragged = a.dim() == 2 and b.dim() == 3
    if bias is not None or activation or gated:
        if bias is not None and ragged:
            row = torch.arange(a.shape[0], device=a.device, dtype=torch.int32)
            of_row = torch.searchsorted(offs, row, right=True).clamp_(max=b.shape[0] - 1)
            result = result.float() + bias.index_select(0, of_row)
            bias = None
        result = finish(result.float(), bias, activation, gated)
    result = result.to(out_dtype)
    if ragged:
        zero_behind(result, offs)
    return result if out is None else out.copy_(result)


def _rule(problem, config) -> Iterable[Reason]:
    """What torch checks, and what its kernel asserts on the device, where it would end the process' CUDA context."""
    if bool(problem.scaling) != problem.dtype.startswith("float8"):
        allowed = "rowwise scales for fp8, and for it alone"
        yield Reason("scaling", "scaling", problem.scaling or "none", allowed, "pass scale_a and scale_b of ones")
    if problem.scaling and (problem.form == "inner" or problem.layout != "nt"):
        yield Reason("layout", "layout", problem.layout, "nt for fp8", "store b with its inner size contiguous")
    if problem.form == "inner" and problem.layout != "tn":
        allowed = "tn: groups of any size start at multiples of 16 bytes in no other"
        yield Reason("layout", "layout", problem.layout, allowed, "a.mT.contiguous().mT, and b contiguous")
    if problem.form == "rows" and problem.layout[0] == "t" and not problem.gather:
        allowed = (
            "n for a: where its rows are contiguous, groups of any size start at multiples of 16 bytes in no other"
        )
        yield Reason("layout", "layout", problem.layout, allowed, "a.contiguous()")
    columns, multiple = problem.n * (2 if problem.gated else 1), 16 if problem.scaling else 8
    if columns % multiple:
        fix = f"pad the columns of b to a multiple of {multiple}"
        yield Reason("multiple", "n", problem.n, f"columns of b in multiples of {multiple}", fix)
    if problem.k % multiple and (problem.scaling or problem.gather):
        fix = f"pad the inner size to a multiple of {multiple}"
        yield Reason("multiple", "k", problem.k, f"multiples of {multiple} in fp8 or with a gather", fix)
    for fact in problem.operands:
        if any(size > 1 and stride == 0 for size, stride in zip(fact.shape, fact.strides, strict=True)):
            fix = f"call .contiguous() on {fact.name}"
            yield Reason("stride", "stride", 0, "strides that are not 0", fix, fact.name)
        if fact.shape[-1] == 1 or fact.shape[-2] == 1:
            yield Reason("shape", "shape", fact.shape, "rows and columns of 2 and more", None, fact.name)


def loop(a, b, *, offs, rows, bias, activation, gated, out_dtype, scale_a, scale_b, out, config):
    """One product after the other, in float32 or wider, or in the operands' dtype where nothing follows."""
    if rows is not None:
        at = rows.long().clamp(0, a.shape[0] - 1)
        a, scale_a = a[at], None if scale_a is None else scale_a[at]
    plain = bias is None and not activation and not gated and scale_a is None and a.dtype == out_dtype
    if not plain or a.dtype in FP8:
        wide = torch.promote_types(
            torch.float32 if a.dtype in FP8 else a.dtype, torch.promote_types(out_dtype, torch.float32)
        )
        a, b = a.to(wide), b.to(wide)
    if offs is None:
        result = finish(torch.matmul(a, b), bias, activation, gated, scale_a, scale_b).to(out_dtype)
        return result if out is None else out.copy_(result)
    spans = bounds(offs, a.shape[0] if b.dim() == 3 else a.shape[1])
    if offs.tolist() != [end for _, end in spans]:
        OFFSETS.word(a.device).bitwise_or_(BAD_OFFSETS)
    columns = b.shape[-1] // 2 if gated else b.shape[-1]
    shape = (a.shape[0], columns) if b.dim() == 3 else (len(spans), a.shape[0], columns)
    result = a.new_empty(shape, dtype=out_dtype) if out is None else out
    for g, (start, end) in enumerate(spans):
        if b.dim() == 2:
            result[g] = a[:, start:end] @ b[start:end]
        elif start < end:
            added, scales = (None if one is None else one[g] for one in (bias, scale_b))
            of_rows = None if scale_a is None else scale_a[start:end]
            result[start:end] = finish(a[start:end] @ b[g], added, activation, gated, of_rows, scales)
    if b.dim() == 3:
        result[spans[-1][1] :] = 0
    return result


EPILOGUE = {
    "forms": ("rows", "batch", "inner"),
    "gather": True,
    "bias": True,
    "activations": ("relu", "gelu", "silu"),
    "gated": True,
    "scaling": ("rowwise",),
    "out": True,
}


@hookimpl
def registry_variants():
    theirs = Requires(
        arch=("sm90", "sm100"),
        dtypes=("bfloat16", "float8_e4m3fn"),
        promoted=True,
        out_dtypes=("bfloat16",),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        base_alignment=16,
        stride_alignment=16,
        deterministic=True,
        rule=_rule,
        **EPILOGUE,
    )
    everything = Requires(
        arch=("any",),
        dtypes=("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        promoted=True,
        out_dtypes=("float16", "bfloat16", "float32", "float64"),
        layouts=("nn", "nt", "tn", "tt", "strided"),
        ieee=True,
        deterministic=True,
        **EPILOGUE,
    )
    return [
        Variant(
            "torch_grouped_mm",
            op="grouped_mm",
            run=grouped,
            requires=theirs,
            design=Design(dsl="cutlass"),
            summary="torch's grouped_mm (CUTLASS), and torch operations around it",
        ),
        Variant(
            "torch_loop",
            op="grouped_mm",
            run=loop,
            requires=everything,
            waits=lambda problem: problem.form != "batch",
            design=Design(dsl="cublas"),
            summary="torch.matmul, group after group; reads the offsets on the host",
        ),
    ]
