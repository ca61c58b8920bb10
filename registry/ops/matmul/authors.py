"""What the author of a kernel for matrix products has to know."""

from __future__ import annotations

from registry.ops.parts.authors import Contract

BY_OP = {
    "matmul": Contract(
        returns="`out`, the tensor that was given, or a new contiguous one of `out_dtype`: [M, N], or [batch, M, N] "
        "where there are several",
        arguments={
            "a": "[M, K], or [batch, M, K]; a batch may be shared (stride 0). Other shapes of torch.matmul are "
            "turned into these",
            "b": "[K, N], or [batch, K, N]",
            "bias": "`None`, or [N] with any stride, 0 among them, of the result's dtype or float32, added to every "
            "row",
            "scale_a": "`None`, or float32: a scalar tensor, or [M] with any stride, 0 among them: one for each row "
            "of a",
            "scale_b": "`None`, or float32: a scalar tensor, or [N] with any stride: one for each column of b",
            "out": "`None`, or where the result goes: any strides that do not overlap; nothing around it is written",
            "out_dtype": "the torch dtype of the result; without this claim it is what the operands have by default "
            "(int32 of int8, bfloat16 of fp8)",
            "activation": '`""`, or one of those claimed, applied last',
        },
        notes=(
            "`promoted`, asked of float8: tensor cores add it with 14 bits, so sums leave them for float32 every 128 "
            "values of K (four wgmma) at the latest. The kit's float8 sums never cancel, so that it is seen.",
            "The order is: product, scales, bias, activation, rounding. int8 sums are exact, an integer bias is added "
            "to them modulo 2**32.",
            "Strides and dtype of `bias`, of scales and of `out` are no part of the Problem, so that a table need not "
            "know them; but a plan is kept by them. `prepare` cannot read them from the Problem, its launch can from "
            "its first call (`Interface.late`): all its later calls are alike.",
            'layouts: a letter for each operand, "n" where a row is contiguous, "t" where a column is; "strided" is '
            "neither. `ieee` of the Problem is float32 in full precision, else tf32 may be used.",
        ),
    )
}
