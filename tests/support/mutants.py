"""Broken kernels, as data: each is a right one of tests/support/kernels with a few words changed."""

# ruff: noqa: E501

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants_of_callers import OF_CALLERS
from mutants_of_ranges import OF_RANGES

KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True)
class Mutant:
    """One way to break a kernel."""

    kernel: str
    fault: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.fault}"

    def variant(self) -> Any:
        source = (KERNELS / f"{self.kernel}.py").read_text(encoding="utf-8")
        assert source.count(self.old) == 1, f"{self}: {self.old!r} is there {source.count(self.old)} times"
        return variant_of(source.replace(self.old, self.new), str(self))


def variant_of(source: str, name: str) -> Any:
    module = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), vars(module))
    return module.VARIANT


def original(kernel: str) -> Any:
    return variant_of((KERNELS / f"{kernel}.py").read_text(encoding="utf-8"), kernel)


ORIGINALS = sorted(path.stem for path in KERNELS.glob("*.py"))

_FAULTS = {
    "attention": {
        "[:, None] + keys - length": {"causal from the top left": "[:, None]"},
        "hidden |= column > row\n": {"causal without the diagonal": "hidden |= column >= row\n"},
        "column < row - left": {"left side off by one": "column <= row - left"},
        "if left >= 0:": {"left side for causal masks alone": "if left >= 0 and causal:"},
        "if right >= 0:": {"right side ignored": "if right > 10**9:"},
        "if softcap:": {"softcap ignored": "if softcap > 1e9:"},
        "scores = softcap * torch.tanh(scores / softcap)": {
            "softcap of unscaled scores": "scores = softcap * torch.tanh(scores / scale / softcap) * scale"
        },
        "@ k_.mT * scale": {
            "scale ignored": "@ k_.mT * q.shape[3] ** -0.5",
            "scores in bfloat16": "<>\n            scores = scores.bfloat16().float()",
        },
        "k[:, :, first:last].float().repeat_interleave(group, 1)": {
            "heads of a group apart": "k[:, :, first:last].float().repeat(1, group, 1, 1)"
        },
        "range(0, keys, config": {
            "the ragged last block left out": "range(0, max(keys - keys % 16, min(keys, 16)), config"
        },
        "            k_ = k[": {
            "the fourth block left out": "            if first >= 3 * config['BLOCK_N']:\n                continue\n<>"
        },
        "total = total * fading": {"sums of earlier blocks not rescaled": "total = total"},
        "acc = acc * fading": {"results of earlier blocks not rescaled": "acc = acc"},
        "shift = higher.nan_to_num(neginf=0.0)": {"no maximum": "shift = higher = torch.zeros_like(higher)"},
        "(torch.log(total) + top)": {
            "LSE to base two": "(torch.log2(total) + top)",
            "LSE without the maximum": "torch.log(total)",
        },
        "(torch.log(total) + top)[..., 0]": {"LSE of zero in rows without keys": "<>.nan_to_num(neginf=0.0)"},
        "torch.where(total > 0, total, 1.0)": {"NaN in rows without keys": "total"},
        "    return out, lse if return_lse else None\n": {
            "LSE in another order": "    return out, lse.mT.contiguous().mT if return_lse else None\n",
            "LSE in float64": "    return out, lse.double() if return_lse else None\n",
            "no LSE": "    return out, None\n",
            "result in float32": "    return out.float(), lse if return_lse else None\n",
            "result in an order of its own": "    return out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), lse if return_lse else None\n",
            "result with gaps": "    return torch.cat([out, out], -1)[..., : out.shape[3]], lse if return_lse else None\n",
            "an input written": "    k[:, :, -1] = 0\n<>",
            "memory beside an input written": "    v.as_strided((1,), (1,), v.storage_offset() - 1).zero_()\n<>",
            "written past the end of zeros": "    lse = torch.zeros_like(lse).copy_(lse)\n    lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).zero_()\n<>",
            "read past the end of v": "    end = v.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True)) + 1\n    out += 0.0 * v.as_strided((1,), (1,), end)\n<>",
            "an input returned": "    return (v if out.shape == v.shape else out), lse if return_lse else None\n",
            "wrong once in fifty calls": "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        out *= 1.5\n<>",
            "other bits once in fifty calls": "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        out *= 1.0 + 2.0**-7\n<>",
            "not deterministic": "    out *= 1.0 + 2.0**-9 * random.randrange(2)\n<>",
            "torch's random numbers used": "    torch.rand(1)\n<>",
            "torch's threads changed": "    torch.set_num_threads(2)\n<>",
            "one wrong element": "    out[-1, -1, -1, -1] += 0.05\n<>",
        },
        "scores - shift), torch": {
            "weights rounded to the operands' dtype twice": "scores - shift).to(torch.float16).float(), torch"
        },
        "        out[:, :, rows] = (acc": {
            "one query over one key": "        acc = acc * (1.1 if length == keys == 1 else 1.0)\n<>"
        },
        "    left, right = window": {
            "k's strides for v": "    v = v.as_strided(v.shape, k.stride()) if v.shape == k.shape else v\n<>",
            "dense strides for k": "    k = k.as_strided(k.shape, torch.empty(k.shape).stride())\n<>",
            "q's batch stride for k": "    k = k.as_strided(k.shape, (q.stride(0), *k.stride()[1:])) if q.shape == k.shape and q.stride()[1:] == k.stride()[1:] else k\n<>",
            "head dims that are no multiple of 16": "    assert q.shape[3] % 16 == 0\n<>",
        },
        "out[:, :, rows] = ": {"rows left unwritten": "out[:, :, rows.start : min(rows.stop, 500)] = "},
        "    def launch(q, k, v, *, scale):\n": {
            "the scale of the first call": "<>        scale = SCRATCH.setdefault(id(fixed), scale)\n"
        },
        "        return attention(q, k, v, scale=scale, config=config, **fixed)": {
            "the output of the first call": "        out, lse = attention(q, k, v, scale=scale, config=config, **fixed)\n        kept = SCRATCH.setdefault(id(fixed), new_out(q, v))\n        return kept.copy_(out), lse",
            "results kept by shape": "        if id(fixed) not in SCRATCH:\n            SCRATCH[id(fixed)] = attention(q, k, v, scale=scale, config=config, **fixed)\n        return tuple(t if t is None else t.clone() for t in SCRATCH[id(fixed)])",
        },
        "            higher =": {
            "scratch memory that threads share": "            scores = SCRATCH.setdefault(scores.shape, torch.empty_like(scores)).copy_(scores)\n<>"
        },
        "            scores = scores.masked_fill": {
            "a masked block of the second config": "            scores = scores * (1.05 if causal and config['BLOCK_N'] == 96 else 1.0)\n<>"
        },
    },
    "attention_backward": {
        ".unflatten(1, (-1, group)).sum(2)\n    dv": {
            "dk of one head of a group": ".unflatten(1, (-1, group))[:, :, 0]\n    dv"
        },
        "inner.mT @ q_ * scale": {"dk without the scale": "inner.mT @ q_"},
        "inner @ k_ * scale": {"dq with the scale squared": "<> * scale"},
        "delta = delta - grad_lse": {
            "grad_lse ignored": "delta = delta - 0 * grad_lse",
            "grad_lse with the other sign": "delta = delta + grad_lse",
            "grad_lse forgotten of causal calls": "delta = delta - (0.0 if causal else 1.0) * grad_lse",
            "grad_lse forgotten of windows": "delta = delta - (0.0 if window is not None else 1.0) * grad_lse",
            "grad_lse forgotten of softcaps": "delta = delta - (0.0 if softcap else 1.0) * grad_lse",
            "grad_lse forgotten of grouped heads": "delta = delta - (0.0 if group > 1 else 1.0) * grad_lse",
            "grad_lse forgotten of head dims that are padded": "delta = delta - (0.0 if q.shape[3] % 16 else 1.0) * grad_lse",
            "grad_lse forgotten of deterministic calls": "delta = delta - (0.0 if deterministic else 1.0) * grad_lse",
            "grad_lse forgotten of other numbers of keys": "delta = delta - (0.0 if q.shape[2] != k.shape[2] else 1.0) * grad_lse",
            "grad_lse forgotten that has strides": "delta = delta - (0.0 if not grad_lse.is_contiguous() else 1.0) * grad_lse",
        },
        ", 1.0 - capped.square()": {"no slope of the softcap": ", 1.0"},
        "delta = (g_ * out.float())": {"no delta": "delta = (0.0 * out.float())"},
        "if causal:": {"weights of hidden keys": "if causal and window is not None:"},
        "for like, grad in ((q, dq), (k, dk), (v, dv)))": {
            "dq in an order of its own": "<>[:2] + (dv.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).to(v.dtype),)"
        },
        "    q_, k_, v_, g_ =": {
            "the gradient's strides ignored": "    grad_out = grad_out.as_strided(out.shape, out.stride())\n<>"
        },
        "    dv = (weights.mT @ g_)": {
            "not deterministic": "    dv = (weights.mT @ g_ * (1.0 + 1e-6 * random.randrange(8)))",
            "wrong once in fifty calls": "    CALLS.append(1)\n    dv = (weights.mT @ g_ * (1.0 if len(CALLS) % 50 else 2.0))",
        },
    },
    "matmul": {
        "if bias is not None:": {"bias forgotten": "if bias is not None and bias.dim() > 1:"},
        "                acc = acc + bias[columns]\n            result[..., rows, columns] = ACTIVATIONS[activation](acc).to(out_dtype)": {
            "bias after the activation": "                acc = ACTIVATIONS[activation](acc) + bias[columns]\n            result[..., rows, columns] = (acc if bias is not None else ACTIVATIONS[activation](acc)).to(out_dtype)"
        },
        "acc = acc + bias[columns]": {
            "the bias' stride ignored": "acc = acc + bias.as_strided(bias.shape, (1,))[columns]",
            "a bias of stride 0 taken for none": "acc = acc + (0 if bias.stride() == (0,) else bias[columns])",
        },
        "    def launch(a, b, *, bias, scale_a, scale_b, out, out_dtype):\n": {
            "the bias of the first call": "    kept = []\n\n<>        kept.append(bias)\n        bias = kept[0]\n",
            "weights kept by their address": "    kept = {}\n\n<>        if b.data_ptr() not in kept:\n            kept[b.data_ptr()] = b.clone()\n        b = kept[b.data_ptr()]\n",
            "weights kept by their version": "    kept = {}\n\n<>        now = b.data_ptr(), b._version\n        if now not in kept:\n            kept[now] = b.clone()\n        b = kept[now]\n",
            "the tensor's last weights": "    kept = [None, None]\n\n<>        if kept[0] is not b:\n            kept[:] = b, b.clone()\n        b = kept[1]\n",
            "a bias kept by its address": "    kept = {}\n\n<>        if bias is not None:\n            bias = kept.setdefault(bias.data_ptr(), bias.clone())\n",
            "scales kept by their address": "    kept = {}\n\n<>        if scale_b is not None:\n            scale_b = kept.setdefault(scale_b.data_ptr(), scale_b.clone())\n",
        },
        '"gelu": torch.nn.functional.gelu': {
            "gelu by tanh": '"gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")'
        },
        "range(0, k, config": {"the ragged end of k": "range(0, max(k - k % 8, min(k, 8)), config"},
        '            for first in range(0, k, config["BLOCK"]):': {
            "the third block of k": '            for first in range(0, min(k, 2 * config["BLOCK"]), config["BLOCK"]):'
        },
        "            if bias is not None:": {
            "the fourth block of columns": "            if column >= 3 * config['BLOCK']:\n                acc = acc * 2\n<>"
        },
        " if out is None else out\n": {"out ignored": "\n"},
        "    return result\n": {
            "memory around out written": "    if out is not None and out.stride(-2) > n:\n        out.as_strided((1,), (1,), out.storage_offset() + n).zero_()\n<>",
            "written past the end of zeros": "    if out is None:\n        result.as_strided((1,), (1,), result.storage_offset() + result.numel()).zero_()\n<>",
            "other bits, through out": "    if out is not None:\n        out *= 1.0 + 2.0**-7 * random.randrange(2)\n<>",
            "result in the order of columns": "    return result if out is not None else result.mT.contiguous().mT\n",
            "wrong once in fifty calls": "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        result[..., -1] = 9\n<>",
        },
        "wide = torch.int32 if a.dtype is torch.int8 else torch.float32": {
            "sums of int8 in float16": "wide = torch.float32\n    if a.dtype is torch.int8:\n        a, b = a // 4 * 4, b"
        },
        "    m, n, k = a.shape": {
            "-128 taken for -127": "    a = a.clamp(min=-127) if a.dtype is torch.int8 else a\n<>",
            "int8 that saturates": "    a = a.clamp(-20, 20) if a.dtype is torch.int8 else a\n<>",
            "the first matrix of a shared batch": "    b = b[:1].expand_as(b) if b.dim() == 3 else b\n<>",
        },
        "else scale_a[rows, None]": {
            "scales the other way round": "else scale_a.flip(0)[rows, None]",
            "the stride of scale_a ignored": "else scale_a.as_strided(scale_a.shape, (1,))[rows, None]",
            "scale_a expanded taken for none": "else 1.0 if scale_a.stride() == (0,) and m > 1 else scale_a[rows, None]",
        },
        "else scale_b[columns]": {
            "the stride of scale_b ignored": "else scale_b.as_strided(scale_b.shape, (1,))[columns]"
        },
        "dtype=out_dtype) if out": {
            "out_dtype ignored": "dtype=a.dtype if a.dtype is not torch.int8 else out_dtype) if out"
        },
        "                acc += a[": {
            "wrong in the second config": "                acc += (1 + (config['BLOCK'] == 96 and m > 200)) * a["
        },
    },
    "grouped_mm": {
        "    start = 0\n": {
            "dense strides for the ends": "    offs = offs.as_strided(offs.shape, torch.empty(offs.shape).stride())\n<>",
            "dense strides for the rows": "    if rows is not None:\n        rows = rows.as_strided(rows.shape, (1,))\n<>",
            "dense strides for b": "    b = b.as_strided(b.shape, torch.empty(b.shape).stride())\n<>",
            "ends kept by their address": "    if a.shape[0] in (128, 64 + 1):\n        offs = KEPT.setdefault(offs.data_ptr(), offs.clone())\n<>",
            "scales' strides ignored": "    if scale_a is not None:\n        scale_a = scale_a.as_strided(scale_a.shape, (1,))\n<>",
            "dense strides for the columns' scales": "    if scale_b is not None:\n        scale_b = scale_b.as_strided(scale_b.shape, (scale_b.shape[1], 1))\n<>",
            "scales gathered of fewer rows alone": "    if rows is not None and scale_a is not None and len(scale_a) > len(rows):\n        scale_a = scale_a.new_zeros(len(scale_a)).index_put((rows.long(),), scale_a[: len(rows)])\n<>",
        },
        "    out[start:] = 0\n": {
            "rows of no group left as they were": "",
            "rows of no group belong to the last": "    out[start:] = a[:1] @ b[-1][:, :columns]\n",
        },
        "b[group].float()": {"groups by number, empty ones left out": "b[0 if start == 0 else group].float()"},
        "range(start, end, config": {"the ragged last block left out": "range(start, end - (end - start) % 8, config"},
        "acc + bias[group]": {
            "the bias of the first group": "acc + bias[0]",
            "the bias' stride ignored": "acc + bias.as_strided(bias.shape, (bias.shape[1], 1))[group]",
            "a unit inner stride of the bias": "acc + bias.as_strided(bias.shape, (bias.stride(0), 1))[group]",
            "the bias' outer stride where it is 0": "acc + (bias if bias.stride(0) else 0 * bias)[group]",
            "a bias of 16 bits read as the other": "acc + (bias if bias.element_size() > 2 else bias.view(a.dtype if a.dtype is torch.bfloat16 else bias.dtype))[group]",
            "a bias of float64 left out": "acc + (0 if bias.dtype is torch.float64 else bias[group])",
        },
        "rows[block].long()": {
            "rows gathered from each block's start": "rows[: block.stop - block.start].long()",
            "rows of a beyond the result's number": "rows[block].long().clamp(max=count - 1)",
        },
        "gate, up = acc": {"gate and gated the other way round": "up, gate = acc"},
        "ACTIVATIONS[activation](gate)": {"gated without its activation": "gate"},
        "acc.to(out.dtype)": {
            "wrong in the second config": "(acc * (1 + (config['BLOCK'] == 16 and first > 64))).to(out.dtype)"
        },
    },
    "attention_varlen": {
        "[:, None] + keys - count": {"causal from the top left": "[:, None]"},
        "at = slice(int(cu_seqlens_k[b])": {
            "the keys of the sequence before": "at = slice(int(cu_seqlens_k[max(b - 1, 0)])"
        },
        "        where = b, cu_seqlens_k,": {
            "queries' starts for keys": "        if cu_seqlens_k is not None and k.shape[0] == q.shape[0]:\n            cu_seqlens_k = cu_seqlens_q\n<>"
        },
        "at = (b, slice(0, int(seqused_k[b])))": {"a cache to its end": "at = (b, slice(0, x.shape[1]))"},
        "block_table[b, place // page].long()": {
            "pages in the order of memory": "(block_table[b, 0] + place // page).long() % len(x)"
        },
        "block_table[b, place": {
            "the pages of the first sequence": "block_table[0, place",
            "dense rows of the block table": "block_table.as_strided(block_table.shape, (block_table.shape[1], 1))[b, place",
            "a block table kept by its address": "KEPT.setdefault((block_table.data_ptr(), b), block_table.clone())[b, place",
        },
        "    if scale is None:\n": {
            "scales' strides ignored": "    if scale is not None:\n        scale = scale.as_strided(scale.shape, torch.empty(scale.shape).stride())\n<>",
            "heads' scales apart by one": "    if scale is not None and scale.dim() == 1:\n        scale = scale.as_strided(scale.shape, (1,))\n<>",
            "tokens' scales in the order of heads unread": "    if scale is not None and scale.dim() > 1 and scale.stride(-1) > 1 and scale.stride(-2) == 1:\n        scale = scale * 1.1\n<>",
        },
        "torch.arange(int(seqused_k[b]))": {
            "the last page looked at whole": "torch.arange(-(-int(seqused_k[b]) // x.shape[1]) * x.shape[1])"
        },
        "    result, lse = new_out": {
            "k's strides for v": "    v = v.as_strided(v.shape, k.stride()) if v.shape == k.shape else v\n<>",
            "dense strides for k": "    k = k.as_strided(k.shape, torch.empty(k.shape).stride())\n<>",
            "the lengths of the first call": "    if seqused_k is not None:\n        CALLS.append(seqused_k.clone())\n        seqused_k = next(c for c in CALLS if c.shape == seqused_k.shape)\n<>",
        },
        "(scale[:, None] if len(scale) > 1 else scale)": {"one scale for all heads": "scale[0]"},
        "found * scale[at][..., None]": {"the scale of the first token": "found * scale[at][:1, ..., None]"},
        "keys_of(v, v_scale": {"k's scale for v": "keys_of(v, k_scale"},
        "sinks.float()[": {"sinks that are scaled": "(sinks.float() * scale)["},
        "lse[:, rows] = total": {"sinks left out of the LSE": "lse[:, rows] = torch.logsumexp(scores[..., :keys], -1)"},
        "sinks.float()[:, None, None].expand(-1,": {
            "the sink of the first head": "sinks.float()[:1, None, None].expand(len(scores),"
        },
        "            if softcap:": {
            "slopes before the cap": "            if softcap and alibi_slopes is not None:\n                scores = scores - alibi_slopes[:, None, None] * (row - column).abs()\n<>"
        },
        "(row - column).abs()": {"slopes of keys alone": "(keys - 1 - column).abs()"},
        "column < row - left": {"left side off by one": "column <= row - left"},
        "        for first in range(0, count,": {
            "rows without keys left unwritten": "        if not keys:\n            continue\n<>"
        },
        "total.nan_to_num(neginf=0.0)": {"NaN in rows without keys": "total"},
        "keys_of(k, k_scale, *where).repeat_interleave(group, 1)": {
            "heads of a group apart": "keys_of(k, k_scale, *where).repeat(1, group, 1)"
        },
        "range(0, count, config": {"one query too few of long sequences": "range(0, count - (count > 100), config"},
        "new_out(q, v) if out is None else out,": {"out ignored": "new_out(q, v),"},
        "weights, v_).to(": {
            "wrong in the second config": "weights * (1 + (config['BLOCK_M'] == 16 and keys > 64)), v_).to("
        },
    },
}
"""Of each kernel the words that are changed, and what they become, by the fault that it is; <> stands for themselves."""
MUTANTS = [
    Mutant(kernel, fault, old, new.replace("<>", old))
    for kernel, places in (*_FAULTS.items(), *OF_CALLERS.items(), *OF_RANGES.items())
    for old, faults in places.items()
    for fault, new in faults.items()
]
