"""What the author of a kernel for grouped products has to know."""

from __future__ import annotations

from registry.ops.parts.authors import Contract

BY_OP = {
    "grouped_mm": Contract(
        returns="`out`, the tensor that was given, or a new contiguous one of `out_dtype`: [M, N] for the form "
        "`rows`, [E, M, N] for the others",
        arguments={
            "a": "[T, K] (form `rows`), [E, M, K] (`batch`) or [M, T] (`inner`)",
            "b": "[E, K, N] (`rows` and `batch`; 2 N columns where it is gated), or [T, N] (`inner`)",
            "offs": "int32 [E] on the device: where each group ends, along the dimension that a and b call T. `None` "
            "for `batch`. Any stride (`Host(..., contiguous=)`); they may lie: see below",
            "rows": "`None`, or int32 or int64 [M] of any stride: rows of a that are multiplied in its place, clamped "
            "into it; they may be fewer or more than a has",
            "bias": "`None`, or [E, N] (2 N where it is gated) with any strides, 0 among them, and of any floating "
            "dtype, added to each row of its group",
            "activation": '`""`, or one of those claimed',
            "gated": "whether the result is `activation(first half of the columns) * second half`",
            "scale_a": "`None`, or float32 [T] or [E, M] with any strides, 0 among them: one for each row of a, "
            "gathered with it",
            "scale_b": "`None`, or float32 [E, N] (2 N where it is gated) with any strides: one for each column of b",
            "out": "`None`, or where the result goes: any strides that do not overlap; nothing around it is written",
            "out_dtype": "the torch dtype of the result; without this claim it is the operands' (bfloat16 of fp8)",
        },
        notes=(
            "`promoted`, asked of float8: tensor cores add it with 14 bits, so sums leave them for float32 every 128 "
            "values of K (four wgmma) at the latest. The kit's float8 sums never cancel, so that it is seen.",
            "The order is: product, scales, bias, activation, gate, rounding.",
            "Group `g` has what lies from the end of the one before it (0 for the first) to `offs[g]`. Nobody has "
            "looked at offsets on a GPU: a kernel clamps each into the tensor and to no less than those before it "
            "(`registry.toolbox.groups`), writes nothing where no operand is, and complains by "
            "`registry.ops.grouped_mm.offsets.OFFSETS` for `registry.check()`.",
            "Rows beyond the last group are zeros, groups may be empty (`inner`: a matrix of zeros), and their sizes "
            "are no part of the Problem: `each` is their mean.",
            "Strides and dtypes of all but `a`, `b` and `out` are no part of the Problem either; a launch can read "
            "them at its first call (`Interface.late`): all its later calls are alike.",
        ),
    )
}
