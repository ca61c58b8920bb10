"""More broken kernels, as data: those that callers who do the plain thing never find out."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

OF_CALLERS: dict[str, dict[str, Any]] = {
    "attention": {
        "    out, lse = new_out(q, v), new_lse(q)\n": {
            "heads beyond the eighth": "    scale = 2 * scale if q.shape[1] > 8 else scale\n<>",
            "batch entries beyond the fourth": "    scale = 2 * scale if q.shape[0] > 4 else scale\n<>",
            "a head stride of 0 taken for dense": "    k = k.as_strided(k.shape, torch.empty(k.shape).stride(), k.storage_offset()) if k.stride(1) == 0 else k\n<>",
            "queries whose batch stride is 0": "    assert q.stride(0) or q.shape[0] == 1\n<>",
            "batch entries right behind each other": "    if k.stride(2) > k.stride(1):\n        k = k.as_strided(k.shape, (k.shape[2] * k.stride(2), *k.stride()[1:]), k.storage_offset())\n<>",
            "batch entries between rows": "    assert k.shape[0] == 1 or k.stride(0) >= k.stride(2) or k.stride(0) == 0\n<>",
            "values that lie in the keys": "    assert v.data_ptr() != k.data_ptr()\n<>",
            "scales above 1": "    scale = min(scale, 1.0)\n<>",
            "small scales": "    scale = max(scale, 0.1)\n<>",
        },
        "    def launch(q, k, v, *, scale):\n": {
            "masks kept by the shapes": "    key = tuple(one.shape for one in problem.operands)\n    masks = ('causal', 'window', 'softcap')\n    fixed.update(SCRATCH.setdefault(key, {name: fixed[name] for name in masks}))\n<>"
        },
        "        return attention(q, k, v, scale=scale, config=config, **fixed)": {
            "strides kept by the shapes": "        key = tuple(one.shape for one in problem.operands)\n        kept = SCRATCH.setdefault(key, [one.strides for one in problem.operands])\n        q, k, v = (t.as_strided(t.shape, s, t.storage_offset()) for t, s in zip((q, k, v), kept, strict=True))\n<>"
        },
        "    return out, lse if return_lse else None\n": {
            "an input written and made as it was": "    if 0 not in k.stride():\n        k.mul_(2.0).div_(2.0)\n<>",
            "torch's settings changed": "    products = torch.backends.cuda.matmul\n    products.allow_bf16_reduced_precision_reduction = not products.allow_bf16_reduced_precision_reduction\n<>",
        },
        'range(0, keys, config["BLOCK_N"])': {"blocks in any order": "random.sample(list(<>), len(<>))"},
    },
    "attention_backward": {
        "    q_, k_, v_, g_ =": {
            "an output in the order of q": "    out = out.as_strided(out.shape, new_out(q, out).stride(), out.storage_offset())\n<>",
            "gradients of 16 bytes' alignment": "    assert grad_out.data_ptr() % 16 == 0\n<>",
            "keys that heads share": "    assert k.stride(1) or k.shape[1] == 1\n<>",
        }
    },
    "attention_varlen_backward": {
        "    group = q.shape[1]": {
            "dense strides for the gradient": "    grad_out = grad_out.as_strided(grad_out.shape, torch.empty(grad_out.shape).stride(), grad_out.storage_offset())\n<>",
            "dense strides for the LSE's gradient": "    if grad_lse is not None:\n        grad_lse = grad_lse.as_strided(grad_lse.shape, (grad_lse.shape[1], 1), grad_lse.storage_offset())\n<>",
            "sequences beyond the sixteenth": "    assert len(cu_seqlens_q) <= 17\n<>",
        },
        "unflatten(0, (-1, group)).sum(1).transpose(0, 1)\n        dv": {
            "dk of one head of a group": "unflatten(0, (-1, group))[:, 0].transpose(0, 1)\n        dv"
        },
        "(share * delta)": {"the LSE's gradient left out of the sinks'": "(share * (g_ * o_).sum(-1))"},
    },
    "attention_varlen": {
        "    result, lse = new_out": {
            "dense strides for out": "    out = out if out is None else out.as_strided(out.shape, torch.empty(out.shape).stride(), out.storage_offset())\n<>",
            "pages right behind each other": "    if block_table is not None:\n        k = k.as_strided(k.shape, (k.shape[1] * k.stride(1), *k.stride()[1:]), k.storage_offset())\n<>",
            "caches right behind each other": "    if block_table is None and cu_seqlens_k is None:\n        k = k.as_strided(k.shape, (k.shape[1] * k.stride(1), *k.stride()[1:]), k.storage_offset())\n<>",
            "rows of pages that are heads wide": "    if cu_seqlens_k is None:\n        k = k.as_strided(k.shape, (k.stride(0), k.shape[2] * k.stride(2), *k.stride()[2:]), k.storage_offset())\n<>",
            "pages that are one sequence's alone": "    if block_table is not None:\n        used = [p for b, n in enumerate(seqused_k.tolist()) for p in block_table[b, : -(-n // k.shape[1])].tolist()]\n        assert len(used) == len(set(used))\n<>",
            "-128 taken for -127": "    k = k.clamp(min=-127) if k.dtype is torch.int8 else k\n<>",
            "sequences beyond the thirty-second": "    scale = 2 * scale if len(cu_seqlens_q) > 33 else scale\n<>",
            "heads beyond the sixteenth": "    scale = 2 * scale if q.shape[1] > 16 else scale\n<>",
            "a maximum taken for the longest": "    assert max_seqlen_q == int(cu_seqlens_q.diff().max())\n<>",
            "starts that are one tensor": "    assert cu_seqlens_k is not cu_seqlens_q\n<>",
            "a sink of nothing": "    sinks = sinks if sinks is None else sinks.nan_to_num(neginf=0.0)\n<>",
            **{
                f"{name} of 16 bytes' alignment": f"    assert {name} is None or {name}.data_ptr() % 16 == 0\n<>"
                for name in ("sinks", "alibi_slopes", "k_scale", "block_table", "cu_seqlens_q", "seqused_k", "out")
            },
        }
    },
    "matmul": {
        "            if scale_a is not None:\n": {
            "relu before the scales": "            if activation == 'relu' and bias is None and scale_a is not None:\n                acc = torch.relu(acc)\n<>"
        },
        "    m, n, k = a.shape": {
            "products beyond the fourth": "    assert a.dim() == 2 or a.shape[0] <= 4\n<>",
            "matrices between rows": "    assert a.dim() == 2 or a.stride(0) == 0 or a.stride(0) >= max(a.stride()[1:])\n<>",
            "results between rows": "    assert out is None or out.dim() == 2 or out.stride(0) >= out.stride(1)\n<>",
            **{
                f"{name} of 16 bytes' alignment": f"    assert {name} is None or {name}.data_ptr() % 16 == 0\n<>"
                for name in ("bias", "scale_a", "scale_b", "out")
            },
        },
    },
    "grouped_mm": {
        "    start = 0\n": {
            "groups beyond the thirty-second": "    assert len(b) <= 32\n<>",
            "groups between rows": "    assert b.stride(0) >= max(b.stride()[1:])\n<>",
            "signs of scales": "    scale_a = None if scale_a is None else scale_a.abs()\n<>",
            **{
                f"{name} of 16 bytes' alignment": f"    assert {name} is None or {name}.data_ptr() % 16 == 0\n<>"
                for name in ("bias", "scale_a", "scale_b", "offs", "rows")
            },
        }
    },
}
"""What is right as long as callers do the plain thing: tensors of their own, as allocators give them, and not too many."""
