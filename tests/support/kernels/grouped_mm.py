"""Products of groups of rows, in torch: right, and small enough to be broken in every way that a kernel is."""

import torch
from claims import claimed

from registry import Requires, Variant

KEPT = {}
ACTIVATIONS = {"": lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}


def grouped(a, b, *, offs, rows, bias, scale_a, scale_b, activation, gated, config):
    count = a.shape[0] if rows is None else rows.shape[0]
    columns = b.shape[2] // 2 if gated else b.shape[2]
    out = torch.empty(count, columns, dtype=a.dtype)
    start = 0
    for group in range(b.shape[0]):
        end = min(max(int(offs[group]), start), count)
        for first in range(start, end, config["BLOCK"]):
            block = slice(first, min(first + config["BLOCK"], end))
            at = block if rows is None else rows[block].long().clamp(0, a.shape[0] - 1)
            acc = a[at].float() @ b[group].float()
            if scale_a is not None:
                acc = acc * scale_a[at, None] * scale_b[group]
            if bias is not None:
                acc = acc + bias[group]
            if gated:
                gate, up = acc[:, :columns], acc[:, columns:]
                acc = ACTIVATIONS[activation](gate) * up
            else:
                acc = ACTIVATIONS[activation](acc)
            out[block] = acc.to(out.dtype)
        start = end
    out[start:] = 0
    return out


VARIANT = Variant(
    "test.groups",
    op="grouped_mm",
    run=grouped,
    requires=Requires(
        dtypes=("float32", "bfloat16"),
        layouts=("nn", "nt", "strided"),
        forms=("rows",),
        activations=("relu", "silu"),
        scaling=("rowwise",),
        **claimed("gather bias gated"),
    ),
    configs=[{"BLOCK": 64}, {"BLOCK": 16}],
)
__all__ = ["KEPT", "VARIANT"]
