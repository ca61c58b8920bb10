"""More broken kernels, as data: right for what examples have, wrong within what they claim."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

OF_RANGES: dict[str, dict[str, Any]] = {
    "attention": {
        "            scores = scores.masked_fill(hidden, -math.inf)\n": {
            "middle blocks of causal windows left out": "            if causal and left >= 0 and last - first >= 64 and not hidden.any():\n                hidden = ~hidden\n<>"
        },
        "            k_ = k[": {
            "the last block of a causal window left out": "            if causal and left >= 0 and first > 0 and first >= rows.stop - 1 + keys - length:\n                continue\n<>"
        },
        "if left >= 0:": {"windows above 100 without an end": "if 0 <= left <= 100:"},
        '"softcap": problem.softcap': {
            "a whole softcap": '"softcap": int(problem.softcap)',
            "a softcap of at most 30": '"softcap": min(problem.softcap, 30.0)',
        },
        "    left, right = window": {
            "groups of eight and more": "    scale = scale * (1.5 if group >= 8 else 1.0)\n<>",
            "the first four heads of keys": "    if group > 1 and k.shape[1] > 4: k = k[:, torch.arange(k.shape[1]) % 4]\n<>",
            "q's row stride for k": "    k = k.as_strided(k.shape, (*k.stride()[:2], q.stride(2), k.stride(3))) if k.shape == q.shape else k\n<>",
        },
    },
    "attention_backward": {"if left >= 0:": {"windows above 100 without an end": "if 0 <= left <= 100:"}},
    "attention_varlen": {
        "if left >= 0:": {"windows above 100 without an end": "if 0 <= left <= 100:"},
        "    result, lse = new_out": {
            "more than eight heads of keys": "    scale = scale * (1.5 if k.shape[-2] > 8 else 1.0)\n<>",
            "several heads of keys in large groups": "    scale = scale * (1.5 if q.shape[1] // k.shape[-2] >= 8 and k.shape[-2] > 1 else 1.0)\n<>",
        },
        "alibi_slopes[:, None, None] * (row": {
            "slopes of at most one": "alibi_slopes[:, None, None].clamp(max=1.0) * (row",
            "slopes below zero taken for none": "alibi_slopes[:, None, None].clamp(min=0.0) * (row",
        },
        "(scale[:, None] if len(scale) > 1 else scale)": {
            "scales of at most one": "(scale[:, None] if len(scale) > 1 else scale).clamp(max=1.0)",
            "scales below zero": "(scale[:, None] if len(scale) > 1 else scale).abs()",
        },
    },
    "attention_varlen_backward": {
        "if left >= 0:": {"windows above 100 without an end": "if 0 <= left <= 100:"},
        "    group = q.shape[1]": {
            "a group of 32": "    scale = scale * (1.2 if q.shape[1] // k.shape[1] >= 32 else 1.0)\n<>",
            "more than four heads of keys": "    scale = scale * (1.2 if k.shape[1] > 4 else 1.0)\n<>",
        },
    },
    "grouped_mm": {
        '"silu": torch.nn.functional.silu': {
            "silu that overflows": '"silu": lambda x: x * torch.exp(x) / (1 + torch.exp(x))'
        },
        "    start = 0\n": {
            "the ends' stride for the rows": "    rows = rows.as_strided(rows.shape, offs.stride()) if rows is not None else rows\n<>",
            "many groups with gathered, scaled rows": "    assert not (b.shape[0] > 16 and rows is not None and scale_a is not None)\n<>",
        },
    },
    "matmul": {
        "    return result\n": {
            "a transposed out of int8": "    if out is not None and out.dtype is torch.int32 and out.stride(-1) != 1: out += 1\n    return result\n"
        },
        "    m, n, k = a.shape": {
            "scale_a's stride for scale_b": "    scale_b = scale_b.as_strided(scale_b.shape, scale_a.stride()) if scale_b is not None and scale_b.dim() and scale_a.dim() else scale_b\n<>"
        },
    },
}
