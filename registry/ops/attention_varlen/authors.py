"""What the author of a kernel for packed, cached or paged attention has to know."""

from __future__ import annotations

from registry.ops.parts.authors import SOFTCAPS, Contract

_SHARED = {
    "causal": "key `j` of a sequence is seen by its query `i` where `j <= i + keys - rows` (aligned bottom-right)",
    "window": "`None`, or `(left, right)`: query `i` sees keys from `i + keys - rows - left` to `i + keys - rows + "
    "right`; -1 is unlimited. Beside `causal=True` the right side is 0",
    "softcap": "0.0, or scores become `softcap * tanh(scaled score / softcap)`",
    "scale": "a positive float by which scores are multiplied; the op has made negative ones positive",
    "max_seqlen_q": "a bound of the queries of a sequence: what a grid is made of",
    "max_seqlen_k": "a bound of the keys of a sequence, coarse for a cache and for pages",
    "cu_seqlens_q": "int32 [B + 1], contiguous, on the device: sequence `b` has the rows of q from entry `b` to `b + "
    "1`",
    "cu_seqlens_k": "the same for k and v; it may be the same tensor. `None` for a cache and for pages",
    "sinks": "`None`, or [Hq]: a logit a head that is in the sum of the softmax, and in the LSE",
    "alibi_slopes": "`None`, or float32 [Hq]: `-slope * abs(i + keys - rows - j)` is added to scores, after scale and "
    "cap",
}
_EARNED = {
    "packed": "`packed` among `kv_layouts`",
    "paged": "`paged` among `kv_layouts`",
    "lengths": "`cache` or `paged` among `kv_layouts`",
    "schedule": "a `schedule` of the variant",
}
_LENGTHS = (
    "Lengths live on the device and may lie. A kernel that claims no `checks_lengths` is handed such as are within "
    "bounds (the op launches a small kernel before it); one that claims it holds them to their bounds itself and "
    "complains (`registry/ops/attention_varlen/lengths.py` says how)."
)
_MASKS = (
    "Masks are put as plainly as they can be for the maxima: one that hides nothing is not there, and a right side of "
    "0 is `causal`."
)
BY_OP = {
    "attention_varlen": Contract(
        returns="`(out, lse)`: `out` [T, Hq, Dv] in q's dtype, the tensor that was given or a new dense one "
        "(`registry.ops.attention_varlen.outputs.new_out`); `lse` float32 [Hq, T], contiguous, natural logarithm, or "
        "`None` where it was not asked for",
        arguments={
            "q": "[T, Hq, D]: the queries of all sequences, one after the other",
            "k": "[T, Hkv, D] (`packed`), [B, S, Hkv, D] (`cache`) or [pages, page, Hkv, D] (`paged`)",
            "v": "as k, with Dv; its strides are its own, and need not be k's",
            **_SHARED,
            "seqused_k": "int32 [B]: how many keys of its cache or its pages each sequence has. `None` where k is "
            "packed",
            "block_table": "int32 [B, n] with a unit inner stride: the pages of each sequence, in order. Its rows may "
            "be further apart than their n entries, as those of a slice of a wider table; what lies between them is "
            "nobody's page. `None` where there are none",
            "k_scale": "`None`, or float32 by which k of float8 or int8 is multiplied: [1] (`tensor`), [Hkv] "
            "(`head`), or k's shape less D (`token`), with any strides, 0 among them",
            "v_scale": "the same for v; its strides are its own",
            "return_lse": "whether the LSE is wanted",
            "out": "`None`, or where the result goes, with a unit inner stride; nothing around it is written",
            "schedule": "`None`, or what the variant's `schedule` made of a step's operands, once for all layers",
        },
        earned=_EARNED,
        notes=(
            _LENGTHS,
            _MASKS,
            SOFTCAPS,
            "A row that sees no key gives zeros, and an LSE of -inf (with a sink: of the sink). Sequences may be "
            "empty.",
            "A Problem has the maxima and the totals of the lengths, not the lengths.",
        ),
    ),
    "attention_varlen_backward": Contract(
        returns="`(dq, dk, dv)`, dense, and where a call has sinks their gradient as a fourth, in their dtype",
        arguments={
            "grad_out": "[T, Hq, Dv] with a unit inner stride",
            "q": "as in the forward; k and v are packed",
            "k": "as in the forward; dk is summed over the query heads that share it",
            "v": "as in the forward",
            "out": "what the forward returned, by whichever variant",
            "lse": "float32 [Hq, T], where a row saw no key -inf, or its sink",
            **_SHARED,
            "grad_lse": "`None`, or float32 [Hq, T]: the gradient of the LSE, which adds to dq, dk and the sinks'",
            "deterministic": "whether torch asks for the same bits on every run: "
            "`torch.use_deterministic_algorithms(True)`",
        },
        earned=_EARNED,
        notes=(
            _LENGTHS,
            _MASKS,
            SOFTCAPS,
            "The claim `lse` is needed here, for every call has one: a variant without it is refused everywhere.",
        ),
    ),
}
