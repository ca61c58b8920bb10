"""Broken kernels, as data: each is a right one of tests/support/kernels with a few words changed."""

# ruff: noqa: E501

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

_RETURN = "    return out, lse if return_lse else None\n"
_ATTENTION = {
    "causal from the top left": ("[:, None] + keys - length", "[:, None]"),
    "causal without the diagonal": ("hidden |= column > row\n", "hidden |= column >= row\n"),
    "left side off by one": ("column < row - left", "column <= row - left"),
    "left side for causal masks alone": ("if left >= 0:", "if left >= 0 and causal:"),
    "right side ignored": ("if right >= 0:", "if right > 10**9:"),
    "softcap ignored": ("if softcap:", "if softcap > 1e9:"),
    "softcap of unscaled scores": (
        "scores = softcap * torch.tanh(scores / softcap)",
        "scores = softcap * torch.tanh(scores / scale / softcap) * scale",
    ),
    "scale ignored": ("@ k_.mT * scale", "@ k_.mT * q.shape[3] ** -0.5"),
    "heads of a group apart": (
        "k[:, :, first:last].float().repeat_interleave(group, 1)",
        "k[:, :, first:last].float().repeat(1, group, 1, 1)",
    ),
    "the ragged last block left out": (
        "range(0, keys, config",
        "range(0, max(keys - keys % 16, min(keys, 16)), config",
    ),
    "the fourth block left out": (
        "            k_ = k[",
        "            if first >= 3 * config['BLOCK_N']:\n                continue\n            k_ = k[",
    ),
    "sums of earlier blocks not rescaled": ("total = total * fading", "total = total"),
    "results of earlier blocks not rescaled": ("acc = acc * fading", "acc = acc"),
    "no maximum": ("shift = higher.nan_to_num(neginf=0.0)", "shift = higher = torch.zeros_like(higher)"),
    "LSE to base two": ("(torch.log(total) + top)", "(torch.log2(total) + top)"),
    "LSE without the maximum": ("(torch.log(total) + top)", "torch.log(total)"),
    "LSE of zero in rows without keys": (
        "(torch.log(total) + top)[..., 0]",
        "(torch.log(total) + top)[..., 0].nan_to_num(neginf=0.0)",
    ),
    "NaN in rows without keys": ("torch.where(total > 0, total, 1.0)", "total"),
    "LSE in another order": (_RETURN, "    return out, lse.mT.contiguous().mT if return_lse else None\n"),
    "LSE in float64": (_RETURN, "    return out, lse.double() if return_lse else None\n"),
    "no LSE": (_RETURN, "    return out, None\n"),
    "result in float32": (_RETURN, "    return out.float(), lse if return_lse else None\n"),
    "result in an order of its own": (
        _RETURN,
        "    return out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), lse if return_lse else None\n",
    ),
    "result with gaps": (
        _RETURN,
        "    return torch.cat([out, out], -1)[..., : out.shape[3]], lse if return_lse else None\n",
    ),
    "weights rounded to the operands' dtype twice": (
        "scores - shift), torch",
        "scores - shift).to(torch.float16).float(), torch",
    ),
    "scores in bfloat16": ("@ k_.mT * scale", "@ k_.mT * scale\n            scores = scores.bfloat16().float()"),
    "k's strides for v": (
        "    left, right = window",
        "    v = v.as_strided(v.shape, k.stride()) if v.shape == k.shape else v\n    left, right = window",
    ),
    "dense strides for k": (
        "    left, right = window",
        "    k = k.as_strided(k.shape, torch.empty(k.shape).stride())\n    left, right = window",
    ),
    "q's batch stride for k": (
        "    left, right = window",
        "    k = k.as_strided(k.shape, (q.stride(0), *k.stride()[1:])) if q.shape == k.shape and q.stride()[1:] == k.stride()[1:] else k\n    left, right = window",
    ),
    "an input written": (_RETURN, "    k[:, :, -1] = 0\n" + _RETURN),
    "memory beside an input written": (
        _RETURN,
        "    v.as_strided((1,), (1,), v.storage_offset() - 1).zero_()\n" + _RETURN,
    ),
    "rows left unwritten": ("out[:, :, rows] = ", "out[:, :, rows.start : min(rows.stop, 500)] = "),
    "written past the end of zeros": (
        _RETURN,
        "    lse = torch.zeros_like(lse).copy_(lse)\n    lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).zero_()\n"
        + _RETURN,
    ),
    "read past the end of v": (
        _RETURN,
        "    end = v.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True)) + 1\n    out += 0.0 * v.as_strided((1,), (1,), end)\n"
        + _RETURN,
    ),
    "an input returned": (_RETURN, "    return (v if out.shape == v.shape else out), lse if return_lse else None\n"),
    "the scale of the first call": (
        "    def launch(q, k, v, *, scale):\n",
        "    def launch(q, k, v, *, scale):\n        scale = SCRATCH.setdefault(id(fixed), scale)\n",
    ),
    "the output of the first call": (
        "        return attention(q, k, v, scale=scale, config=config, **fixed)",
        "        out, lse = attention(q, k, v, scale=scale, config=config, **fixed)\n        kept = SCRATCH.setdefault(id(fixed), new_out(q, v))\n        return kept.copy_(out), lse",
    ),
    "results kept by shape": (
        "        return attention(q, k, v, scale=scale, config=config, **fixed)",
        "        if id(fixed) not in SCRATCH:\n            SCRATCH[id(fixed)] = attention(q, k, v, scale=scale, config=config, **fixed)\n        return tuple(t if t is None else t.clone() for t in SCRATCH[id(fixed)])",
    ),
    "scratch memory that threads share": (
        "            higher =",
        "            scores = SCRATCH.setdefault(scores.shape, torch.empty_like(scores)).copy_(scores)\n            higher =",
    ),
    "wrong once in fifty calls": (
        _RETURN,
        "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        out *= 1.5\n" + _RETURN,
    ),
    "other bits once in fifty calls": (
        _RETURN,
        "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        out *= 1.0 + 2.0**-7\n" + _RETURN,
    ),
    "not deterministic": (_RETURN, "    out *= 1.0 + 2.0**-9 * random.randrange(2)\n" + _RETURN),
    "a masked block of the second config": (
        "            scores = scores.masked_fill",
        "            scores = scores * (1.05 if causal and config['BLOCK_N'] == 96 else 1.0)\n            scores = scores.masked_fill",
    ),
    "torch's random numbers used": (_RETURN, "    torch.rand(1)\n" + _RETURN),
    "torch's threads changed": (_RETURN, "    torch.set_num_threads(2)\n" + _RETURN),
    "head dims that are no multiple of 16": (
        "    left, right = window",
        "    assert q.shape[3] % 16 == 0\n    left, right = window",
    ),
    "one wrong element": (_RETURN, "    out[-1, -1, -1, -1] += 0.05\n" + _RETURN),
}
_BACKWARD = {
    "dk of one head of a group": (
        ".unflatten(1, (-1, group)).sum(2)\n    dv",
        ".unflatten(1, (-1, group))[:, :, 0]\n    dv",
    ),
    "dk without the scale": ("inner.mT @ q_ * scale", "inner.mT @ q_"),
    "dq with the scale squared": ("inner @ k_ * scale", "inner @ k_ * scale * scale"),
    "grad_lse ignored": ("delta = delta - grad_lse", "delta = delta - 0 * grad_lse"),
    "grad_lse with the other sign": ("delta = delta - grad_lse", "delta = delta + grad_lse"),
    "grad_lse forgotten of causal calls": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if causal else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of windows": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if window is not None else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of softcaps": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if softcap else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of grouped heads": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if group > 1 else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of head dims that are padded": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if q.shape[3] % 16 else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of deterministic calls": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if deterministic else 1.0) * grad_lse",
    ),
    "grad_lse forgotten of other numbers of keys": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if q.shape[2] != k.shape[2] else 1.0) * grad_lse",
    ),
    "grad_lse forgotten that has strides": (
        "delta = delta - grad_lse",
        "delta = delta - (0.0 if not grad_lse.is_contiguous() else 1.0) * grad_lse",
    ),
    "no slope of the softcap": (", 1.0 - capped.square()", ", 1.0"),
    "no delta": ("delta = (g_ * out.float())", "delta = (0.0 * out.float())"),
    "weights of hidden keys": ("if causal:", "if causal and window is not None:"),
    "dq in an order of its own": (
        "for like, grad in ((q, dq), (k, dk), (v, dv)))",
        "for like, grad in ((q, dq), (k, dk), (v, dv)))[:2] + (dv.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).to(v.dtype),)",
    ),
    "the gradient's strides ignored": (
        "    q_, k_, v_, g_ =",
        "    grad_out = grad_out.as_strided(out.shape, out.stride())\n    q_, k_, v_, g_ =",
    ),
    "not deterministic": (
        "    dv = (weights.mT @ g_)",
        "    dv = (weights.mT @ g_ * (1.0 + 1e-6 * random.randrange(8)))",
    ),
    "wrong once in fifty calls": (
        "    dv = (weights.mT @ g_)",
        "    CALLS.append(1)\n    dv = (weights.mT @ g_ * (1.0 if len(CALLS) % 50 else 2.0))",
    ),
}
_MATMUL = {
    "bias forgotten": ("if bias is not None:", "if bias is not None and bias.dim() > 1:"),
    "bias after the activation": (
        "                acc = acc + bias[columns]\n            result[..., rows, columns] = ACTIVATIONS[activation](acc).to(out_dtype)",
        "                acc = ACTIVATIONS[activation](acc) + bias[columns]\n            result[..., rows, columns] = (acc if bias is not None else ACTIVATIONS[activation](acc)).to(out_dtype)",
    ),
    "the bias' stride ignored": ("acc = acc + bias[columns]", "acc = acc + bias.as_strided(bias.shape, (1,))[columns]"),
    "the bias of the first call": (
        "    def launch(a, b, *, bias, scale_a, scale_b, out, out_dtype):\n",
        "    kept = []\n\n    def launch(a, b, *, bias, scale_a, scale_b, out, out_dtype):\n        kept.append(bias)\n        bias = kept[0]\n",
    ),
    "gelu by tanh": (
        '"gelu": torch.nn.functional.gelu',
        '"gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")',
    ),
    "the ragged end of k": ("range(0, k, config", "range(0, max(k - k % 8, min(k, 8)), config"),
    "the third block of k": (
        '            for first in range(0, k, config["BLOCK"]):',
        '            for first in range(0, min(k, 2 * config["BLOCK"]), config["BLOCK"]):',
    ),
    "the fourth block of columns": (
        "            if bias is not None:",
        "            if column >= 3 * config['BLOCK']:\n                acc = acc * 2\n            if bias is not None:",
    ),
    "out ignored": (" if out is None else out\n", "\n"),
    "memory around out written": (
        "    return result\n",
        "    if out is not None and out.stride(-2) > n:\n        out.as_strided((1,), (1,), out.storage_offset() + n).zero_()\n    return result\n",
    ),
    "written past the end of zeros": (
        "    return result\n",
        "    if out is None:\n        result.as_strided((1,), (1,), result.storage_offset() + result.numel()).zero_()\n    return result\n",
    ),
    "other bits, through out": (
        "    return result\n",
        "    if out is not None:\n        out *= 1.0 + 2.0**-7 * random.randrange(2)\n    return result\n",
    ),
    "sums of int8 in float16": (
        "wide = torch.int32 if a.dtype is torch.int8 else torch.float32",
        "wide = torch.float32\n    if a.dtype is torch.int8:\n        a, b = a // 4 * 4, b",
    ),
    "-128 taken for -127": (
        "    m, n, k = a.shape",
        "    a = a.clamp(min=-127) if a.dtype is torch.int8 else a\n    m, n, k = a.shape",
    ),
    "int8 that saturates": (
        "    m, n, k = a.shape",
        "    a = a.clamp(-20, 20) if a.dtype is torch.int8 else a\n    m, n, k = a.shape",
    ),
    "the first matrix of a shared batch": (
        "    m, n, k = a.shape",
        "    b = b[:1].expand_as(b) if b.dim() == 3 else b\n    m, n, k = a.shape",
    ),
    "scales the other way round": ("else scale_a[rows, None]", "else scale_a.flip(0)[rows, None]"),
    "out_dtype ignored": (
        "dtype=out_dtype) if out",
        "dtype=a.dtype if a.dtype is not torch.int8 else out_dtype) if out",
    ),
    "result in the order of columns": (
        "    return result\n",
        "    return result if out is not None else result.mT.contiguous().mT\n",
    ),
    "wrong in the second config": (
        "                acc += a[",
        "                acc += (1 + (config['BLOCK'] == 96 and m > 200)) * a[",
    ),
    "wrong once in fifty calls": (
        "    return result\n",
        "    CALLS.append(1)\n    if len(CALLS) % 50 == 0:\n        result[..., -1] = 9\n    return result\n",
    ),
}
_DENSE = "    {0} = {0}.as_strided({0}.shape, torch.empty({0}.shape).stride())\n    start = 0\n"
_GROUPED = {
    "dense strides for the ends": ("    start = 0\n", _DENSE.format("offs")),
    "dense strides for the rows": (
        "    start = 0\n",
        "    if rows is not None:\n        rows = rows.as_strided(rows.shape, (1,))\n    start = 0\n",
    ),
    "dense strides for b": ("    start = 0\n", _DENSE.format("b")),
    "rows of no group left as they were": ("    out[start:] = 0\n", ""),
    "rows of no group belong to the last": ("    out[start:] = 0\n", "    out[start:] = a[:1] @ b[-1][:, :columns]\n"),
    "groups by number, empty ones left out": ("b[group].float()", "b[0 if start == 0 else group].float()"),
    "the ragged last block left out": ("range(start, end, config", "range(start, end - (end - start) % 8, config"),
    "the bias of the first group": ("acc + bias[group]", "acc + bias[0]"),
    "the bias' stride ignored": ("acc + bias[group]", "acc + bias.as_strided(bias.shape, (bias.shape[1], 1))[group]"),
    "gate and gated the other way round": ("gate, up = acc", "up, gate = acc"),
    "gated without its activation": ("ACTIVATIONS[activation](gate)", "gate"),
    "rows gathered from each block's start": ("rows[block].long()", "rows[: block.stop - block.start].long()"),
    "wrong in the second config": (
        "acc.to(out.dtype)",
        "(acc * (1 + (config['BLOCK'] == 16 and first > 64))).to(out.dtype)",
    ),
}
_VARLEN = {
    "causal from the top left": ("[:, None] + keys - count", "[:, None]"),
    "the keys of the sequence before": (
        "at = slice(int(cu_seqlens_k[b])",
        "at = slice(int(cu_seqlens_k[max(b - 1, 0)])",
    ),
    "queries' starts for keys": (
        "        where = b, cu_seqlens_k,",
        "        if cu_seqlens_k is not None and k.shape[0] == q.shape[0]:\n            cu_seqlens_k = cu_seqlens_q\n        where = b, cu_seqlens_k,",
    ),
    "a cache to its end": ("at = (b, slice(0, int(seqused_k[b])))", "at = (b, slice(0, x.shape[1]))"),
    "pages in the order of memory": (
        "block_table[b, place // page].long()",
        "(block_table[b, 0] + place // page).long() % len(x)",
    ),
    "the pages of the first sequence": ("block_table[b, place", "block_table[0, place"),
    "the last page looked at whole": (
        "torch.arange(int(seqused_k[b]))",
        "torch.arange(-(-int(seqused_k[b]) // x.shape[1]) * x.shape[1])",
    ),
    "k's strides for v": (
        "    result, lse = new_out",
        "    v = v.as_strided(v.shape, k.stride()) if v.shape == k.shape else v\n    result, lse = new_out",
    ),
    "dense strides for k": (
        "    result, lse = new_out",
        "    k = k.as_strided(k.shape, torch.empty(k.shape).stride())\n    result, lse = new_out",
    ),
    "one scale for all heads": ("(scale[:, None] if len(scale) > 1 else scale)", "scale[0]"),
    "the scale of the first token": ("found * scale[at][..., None]", "found * scale[at][:1, ..., None]"),
    "k's scale for v": ("keys_of(v, v_scale", "keys_of(v, k_scale"),
    "sinks that are scaled": ("sinks.float()[", "(sinks.float() * scale)["),
    "sinks left out of the LSE": ("lse[:, rows] = total", "lse[:, rows] = torch.logsumexp(scores[..., :keys], -1)"),
    "the sink of the first head": (
        "sinks.float()[:, None, None].expand(-1,",
        "sinks.float()[:1, None, None].expand(len(scores),",
    ),
    "slopes before the cap": (
        "            if softcap:",
        "            if softcap and alibi_slopes is not None:\n                scores = scores - alibi_slopes[:, None, None] * (row - column).abs()\n            if softcap:",
    ),
    "slopes of keys alone": ("(row - column).abs()", "(keys - 1 - column).abs()"),
    "left side off by one": ("column < row - left", "column <= row - left"),
    "rows without keys left unwritten": (
        "        for first in range(0, count,",
        "        if not keys:\n            continue\n        for first in range(0, count,",
    ),
    "NaN in rows without keys": ("total.nan_to_num(neginf=0.0)", "total"),
    "heads of a group apart": (
        "keys_of(k, k_scale, *where).repeat_interleave(group, 1)",
        "keys_of(k, k_scale, *where).repeat(1, group, 1)",
    ),
    "one query too few of long sequences": ("range(0, count, config", "range(0, count - (count > 100), config"),
    "out ignored": ("new_out(q, v) if out is None else out,", "new_out(q, v),"),
    "the lengths of the first call": (
        "    result, lse = new_out",
        "    if seqused_k is not None:\n        CALLS.append(seqused_k.clone())\n        seqused_k = next(c for c in CALLS if c.shape == seqused_k.shape)\n    result, lse = new_out",
    ),
    "wrong in the second config": (
        "weights, v_).to(",
        "weights * (1 + (config['BLOCK_M'] == 16 and keys > 64)), v_).to(",
    ),
}
MUTANTS = [
    Mutant(kernel, fault, old, new)
    for kernel, faults in (
        ("attention", _ATTENTION),
        ("attention_backward", _BACKWARD),
        ("matmul", _MATMUL),
        ("grouped_mm", _GROUPED),
        ("attention_varlen", _VARLEN),
    )
    for fault, (old, new) in faults.items()
]
