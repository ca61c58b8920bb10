"""One group is one product: torch.matmul over all rows, and torch operations after it.

What a plain layer does, beside kernels that go by offsets: where it is the fastest, `registry.matmul(gated=True)` takes
a plain product. Rows behind the end of the group are multiplied, too, and zeroed then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.grouped_mm.offsets import BAD_OFFSETS, OFFSETS
from registry.ops.grouped_mm.oracle import bounds
from registry.ops.parts.products import activate


def product(a, b, *, offs, bias, activation, gated, out, config):
    result = torch.matmul(a, b[0]) if bias is None else torch.addmm(bias[0].to(a.dtype), a, b[0])
    if gated:
        gate, up = result.chunk(2, -1)
        result = activate(gate, activation) * up
    else:
        result = activate(result, activation)
    if result.is_cuda:
        from registry.plugins.torch_one_group.behind import zero_behind  # triton: not on a CPU

        zero_behind(result, offs)
    else:
        ((_, end),) = bounds(offs, len(result))
        if end != offs.item():
            OFFSETS.word(result.device).bitwise_or_(BAD_OFFSETS)
        result[end:] = 0
    return result if out is None else out.copy_(result)


def _one(problem, config) -> Iterable[Reason]:
    if problem.groups != 1:
        yield Reason("groups", "groups", problem.groups, "1")


@hookimpl
def registry_variants():
    requires = Requires(
        arch=("any",),
        dtypes=("float16", "bfloat16", "float32"),
        forms=("rows",),
        layouts=("nn", "nt", "tn", "tt"),
        bias=True,
        activations=("relu", "gelu", "silu"),
        gated=True,
        out=True,
        ieee=True,
        deterministic=True,
        rule=_one,
    )
    return [
        Variant(
            "torch_one_group",
            op="grouped_mm",
            run=product,
            requires=requires,
            design=Design(dsl="cublas"),
            summary="torch.matmul for one group, and torch operations after it",
        )
    ]
