"""torch.matmul as a variant: cuBLAS on a GPU, the vendor's BLAS on a CPU. Does everything, so it is always there."""

from __future__ import annotations

import functools

import torch

from registry import Design, Requires, Variant, hookimpl

ACTIVATIONS = {"": None, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CUBLAS_FP8_MULTIPLE = 16
INT_MM_MIN_ROWS, INT_MM_MULTIPLE = 16, 8


def _int8_product(a, b):
    """int32 results. cuBLAS wants some sizes and strides; elsewhere float64 holds every sum exactly."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == 2 and a.is_cuda and m > INT_MM_MIN_ROWS and k % INT_MM_MULTIPLE == 0 and n % INT_MM_MULTIPLE == 0:
        odd = b.storage_offset() % INT_MM_MULTIPLE or max(b.stride()) % INT_MM_MULTIPLE
        return torch._int_mm(a.contiguous(), b.contiguous() if odd else b)
    return torch.matmul(a.double(), b.double()).to(torch.int32)


def _fp8_product(a, b, scale_a, scale_b, out_dtype):
    """cuBLAS' scaled product where its rules are met, else through float32. Returns the scaled product."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    fits = a.dim() == 2 and a.is_cuda and k % CUBLAS_FP8_MULTIPLE == 0 and n % CUBLAS_FP8_MULTIPLE == 0
    fits = fits and a.stride(-1) == 1 and b.stride(-2) == 1 and not (a.dtype == b.dtype == torch.float8_e5m2)
    rowwise = scale_a is not None and scale_a.dim() == 1
    if fits and out_dtype in (torch.bfloat16, torch.float16) and not (rowwise and out_dtype != torch.bfloat16):
        one = torch.ones((), device=a.device) if scale_a is None else None
        sa, sb = (one, one) if one is not None else (scale_a, scale_b)
        if rowwise:
            sa, sb = sa.reshape(m, 1), sb.reshape(1, n)
        return torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=out_dtype)
    return _scaled(torch.matmul(a.float(), b.float()), scale_a, scale_b)


def _scaled(product, scale_a, scale_b):
    if scale_a is None:
        return product
    wide = torch.promote_types(product.dtype, scale_a.dtype)  # a float64 product keeps its accuracy
    return product * (scale_a.reshape(-1, 1).to(wide) * scale_b)


def _product(a, b, bias, out_dtype):
    """(product, whether the bias is in it) of floating operands; a bias is fused where torch does that."""
    if out_dtype != a.dtype and a.dtype.itemsize <= out_dtype.itemsize:
        if a.is_cuda and a.dim() == 2 and out_dtype is torch.float32:
            return torch.mm(a, b, out_dtype=out_dtype), False
        wide = torch.promote_types(out_dtype, torch.float32)
        return torch.matmul(a.to(wide), b.to(wide)), False
    if bias is not None and a.dim() == 2 and bias.dtype == a.dtype == out_dtype:
        return torch.addmm(bias, a, b), True
    return torch.matmul(a, b), False


def matmul(a, b, *, bias, activation, out_dtype, scale_a, scale_b, out, config):
    plain = bias is None and not activation and scale_a is None
    if out is not None and plain and a.dtype == out_dtype and a.dtype not in FP8:
        return torch.matmul(a, b, out=out)
    fused_bias = False
    if a.dtype is torch.int8:
        result = _int8_product(a, b)
        if not plain and out_dtype.is_floating_point:
            result = result.to(torch.promote_types(out_dtype, torch.float32))
        result = _scaled(result, scale_a, scale_b)
    elif a.dtype in FP8:
        result = _fp8_product(a, b, scale_a, scale_b, out_dtype)
    else:
        result, fused_bias = _product(a, b, bias if scale_a is None else None, out_dtype)
        result = _scaled(result, scale_a, scale_b)
    if bias is not None and not fused_bias:
        result = result + bias.to(result.dtype)
    if activation:
        result = ACTIVATIONS[activation](result)
    result = result.to(out_dtype)
    return result if out is None else out.copy_(result)


def _plain(a, b, **_):
    return torch.matmul(a, b)


_plain.bare = torch.matmul


def prepare(problem, config):
    """Where nothing is fused or converted the launch is torch.matmul and nothing around it."""
    plain = not (problem.bias or problem.activation or problem.scaling or problem.out)
    if plain and problem.dtype == problem.out_dtype == problem.dtype_b:
        return _plain
    return functools.partial(matmul, activation=problem.activation, config=config)


@hookimpl
def registry_variants():
    requires = Requires(
        arch=("any",),
        dtypes=("float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2"),
        dtypes_b=("float8_e4m3fn", "float8_e5m2"),
        promoted=True,
        out_dtypes=("float16", "bfloat16", "float32", "float64", "int32"),
        layouts=("nn", "nt", "tn", "tt", "strided"),
        batched=True,
        bias=True,
        activations=("relu", "gelu", "silu"),
        scaling=("scalar", "rowwise"),
        out=True,
        ieee=True,
        deterministic=True,
    )
    return [
        Variant(
            "torch_matmul",
            op="matmul",
            run=matmul,
            prepare=prepare,
            requires=requires,
            design=Design(dsl="cublas"),
            traceable=True,
            summary="torch.matmul: cuBLAS, or the CPU's BLAS",
        )
    ]
