"""A product over blocks, in torch: right, and small enough to be broken in every way that a kernel is."""

import random

import torch
from claims import claimed

from registry import Requires, Variant

CALLS = []
ACTIVATIONS = {"": lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def matmul(a, b, *, bias, scale_a, scale_b, out, out_dtype, activation, config):
    wide = torch.int32 if a.dtype is torch.int8 else torch.float32
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    result = torch.zeros(*a.shape[:-1], n, dtype=out_dtype) if out is None else out
    for row in range(0, m, config["BLOCK"]):
        for column in range(0, n, config["BLOCK"]):
            rows, columns = slice(row, min(row + config["BLOCK"], m)), slice(column, min(column + config["BLOCK"], n))
            acc = torch.zeros(*a.shape[:-2], rows.stop - row, columns.stop - column, dtype=wide)
            for first in range(0, k, config["BLOCK"]):
                inner = slice(first, min(first + config["BLOCK"], k))
                acc += a[..., rows, inner].to(wide) @ b[..., inner, columns].to(wide)
            if scale_a is not None or out_dtype.is_floating_point:
                acc = acc.float()
            if scale_a is not None:
                by_row = scale_a if scale_a.dim() == 0 else scale_a[rows, None]
                by_column = scale_b if scale_b.dim() == 0 else scale_b[columns]
                acc = acc * by_row * by_column
            if bias is not None:
                acc = acc + bias[columns]
            result[..., rows, columns] = ACTIVATIONS[activation](acc).to(out_dtype)
    return result


def prepare(problem, config):
    activation = problem.activation

    def launch(a, b, *, bias, scale_a, scale_b, out, out_dtype):
        given = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out": out, "out_dtype": out_dtype}
        return matmul(a, b, activation=activation, config=config, **given)

    return launch


VARIANT = Variant(
    "test.product",
    op="matmul",
    run=matmul,
    prepare=prepare,
    requires=Requires(
        dtypes=("float32", "bfloat16", "int8"),
        out_dtypes=("float32",),
        layouts=("nn", "nt", "tn", "tt"),
        activations=("relu", "gelu"),
        scaling=("scalar", "rowwise"),
        **claimed("batched bias out"),
    ),
    configs=[{"BLOCK": 128}, {"BLOCK": 96}],
)
__all__ = ["CALLS", "VARIANT", "random"]
