"""The gate before the timer: a kernel's results against the op's oracle in float64, block by block.

The oracle is evaluated in pieces that fit in memory: attention is independent row by row and head by head, and the
gradients of keys and values are sums over pieces of rows. Where the whole would take too long, a sample of pieces that
always has the first and the last stands for it, and every element is still held to be finite.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from registry.ops.known import op_named

BLOCK = 64
"""Rows that are judged together: one wrong tile must not vanish in the norm of a large result."""
PIECE_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 4e-3,
    "float16": 5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.15,
    "float8_e5m2": 0.3,
    "int8": 0.0,
    "int32": 0.0,
}
"""Largest relative error of one block. Rounding of a bfloat16 result alone gives 2e-3."""
BACKWARD_FACTOR = 2.5
LSE_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
FLOOR = 0.05
"""A block whose values are smaller than this share of the usual is judged by that share."""


@dataclass(frozen=True)
class Expected:
    """What one part of one output should be."""

    output: str
    index: tuple[Any, ...]
    value: torch.Tensor
    absolute: float | None = None
    """A bound on each element, for results on a logarithmic scale; None: a relative bound on each block."""


@dataclass(frozen=True)
class Verdict:
    """Whether results may be timed, and how far they were off."""

    ok: bool
    errors: dict[str, float]
    detail: str = ""


def flops_limit(device: torch.device) -> float:
    """Work that the oracle may take for one case: about a second."""
    if device.type != "cuda":
        return 4e9
    return 6e12 if torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0)) else 2e11


def expected(load: Any) -> list[Expected]:
    """The oracle's answer for a workload, in pieces."""
    if load.case.op == "matmul":
        return list(_matmul(load))
    return _joined(_backward(load) if load.case.op == "attention_backward" else _forward(load))


def _joined(parts: Iterable[Expected]) -> list[Expected]:
    """Neighbouring heads of the oracle's answer as one part each: judging waits for the device a few times a part."""
    found: list[list[Expected]] = []
    runs: dict[Any, list[Expected]] = {}
    for part in parts:
        run = runs.get((part.output, part.index[0])) if len(part.index) == 2 else None
        if run is not None and run[-1].index[1].stop == part.index[1].start:
            run.append(part)
        else:
            found.append([part])
            if len(part.index) == 2:
                runs[part.output, part.index[0]] = found[-1]
    return [
        run[0]
        if len(run) == 1
        else replace(
            run[0],
            index=(run[0].index[0], slice(run[0].index[1].start, run[-1].index[1].stop)),
            value=torch.cat([part.value for part in run]),
        )
        for run in found
    ]


def judge(load: Any, results: Any, wanted: list[Expected]) -> Verdict:
    """Hold the results of one launch against the oracle."""
    found = results if isinstance(results, tuple) else (results,)
    named = dict(zip(load.outputs, found, strict=False))
    errors: dict[str, float] = {}
    for name, tensor in named.items():
        if (
            tensor is not None
            and tensor.dtype.is_floating_point
            and name != "lse"
            and not bool(torch.isfinite(tensor.float()).all())
        ):
            return Verdict(False, {name: math.inf}, f"{name} has elements that are not finite")
    for part in wanted:
        tensor = named.get(part.output)
        if tensor is None:
            continue
        got = tensor[part.index]
        if got.shape != part.value.shape:
            return Verdict(
                False,
                {part.output: math.inf},
                f"{part.output}: shape {tuple(got.shape)}, expected {tuple(part.value.shape)}",
            )
        error = _log_error(got, part.value) if part.absolute is not None else _block_error(got, part.value)
        errors[part.output] = max(errors.get(part.output, 0.0), error)
        limit = part.absolute if part.absolute is not None else tolerance(load)
        if not error <= limit:
            return Verdict(False, errors, f"{part.output}{_where(part.index)}: error {error:.3g}, allowed {limit:.3g}")
    return Verdict(True, errors)


def tolerance(load: Any) -> float:
    """The relative error that a block may have."""
    sizes = load.sizes
    dtype = sizes.get("dtype", "bfloat16")
    if dtype == "float32" and not sizes.get("ieee") and load.device.type == "cuda":
        dtype = "tf32"
    found = TOLERANCE[dtype]
    if load.case.op == "matmul":
        from registry.ops.matmul.arguments import default_out_dtype

        out = load.out_dtype or default_out_dtype(load.tensors["a"].dtype)
        result = TOLERANCE[str(out).removeprefix("torch.")]
        return result if dtype.startswith(("float8", "int8")) else max(found, result)
    return found * (BACKWARD_FACTOR if load.case.op == "attention_backward" else 1.0)


def _block_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else math.inf
    want = want.reshape(-1, want.shape[-2] if want.dim() > 1 else 1, want.shape[-1]).double()
    difference = got.reshape(want.shape).double() - want
    rows = want.shape[1]
    starts = torch.arange(rows, device=want.device) // BLOCK
    blocks = int(starts[-1]) + 1
    sums = [torch.zeros(want.shape[0], blocks, dtype=torch.float64, device=want.device) for _ in range(2)]
    for total, values in zip(sums, (difference, want), strict=True):
        total.index_add_(1, starts, values.square().sum(dim=-1))
    counts = torch.bincount(starts, minlength=blocks) * want.shape[-1]
    usual = float(want.square().mean().sqrt())
    floor = counts * max(FLOOR * usual, 1e-30) ** 2
    return float((sums[0] / torch.maximum(sums[1], floor)).sqrt().max())


def _log_error(got: torch.Tensor, want: torch.Tensor) -> float:
    same = torch.isinf(want) & (got == want)
    return float(torch.where(same, 0.0, (got.double() - want.double()).abs()).nan_to_num(math.inf, math.inf).max())


def _where(index: tuple[Any, ...]) -> str:
    shown = [str(i) if isinstance(i, int) else f"{i.start or 0}:{'' if i.stop is None else i.stop}" for i in index]
    return f"[{', '.join(shown)}]" if shown else ""


# --- the oracle in pieces -----------------------------------------------------------------------------------------


def _sample(count: int, affordable: int, seed: int) -> list[int]:
    """At most `affordable` of `count` pieces: the first, the last, and some between."""
    if affordable >= count:
        return list(range(count))
    ends = [0, count - 1][: max(1, affordable)]
    return sorted({*ends, *random.Random(seed).sample(range(count), max(0, affordable - len(ends)))})


def _row_pieces(rows: int, keys: int, heads: int, device: torch.device, whole: bool) -> Iterator[slice]:
    """Slices of query rows whose scores fit in memory."""
    each = 6 * 8 * keys * heads
    step = rows if whole else max(1, min(rows, PIECE_BYTES.get(device.type, 128 << 20) // each))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _seen_keys(rows: slice, seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Keys that a piece of rows is given, so that its alignment is the whole's: all, or up to its last row's."""
    return max(0, min(seqlen_k, rows.stop + seqlen_k - seqlen_q)) if causal else seqlen_k


def _mask_of(load: Any) -> tuple[dict[str, Any], bool, bool]:
    """(oracle's mask arguments, whether keys can be cut, whether rows cannot be)."""
    from registry.ops.attention.arguments import canonical_window, check_window

    mask = load.mask()
    causal, window = canonical_window(check_window(mask["window"]), mask["causal"])
    whole = not causal and window is not None
    return {**mask, "causal": causal, "window": window, "scale": load.scale}, causal, whole


def _groups(load: Any) -> list[tuple[int, int, slice]]:
    """(batch, key head, query heads) of the pieces to look at."""
    q, k = load.tensors["q"], load.tensors["k"]
    group = q.shape[1] // k.shape[1]
    flops = 4.0 * group * q.shape[2] * k.shape[2] * (q.shape[3] + load.tensors["v"].shape[3])
    flops *= 3 if load.case.op == "attention_backward" else 1
    count = q.shape[0] * k.shape[1]
    chosen = _sample(count, max(1, int(flops_limit(load.device) / flops)), seed=count)
    return [
        (i // k.shape[1], i % k.shape[1], slice(i % k.shape[1] * group, (i % k.shape[1] + 1) * group)) for i in chosen
    ]


def _forward_piece(
    tensors: Any, at: tuple[int, int, slice], mask: dict[str, Any], cut: bool, whole: bool
) -> tuple[Any, Any]:
    """(out, lse) of one batch entry and key head, float64."""
    b, head, heads = at
    q, k, v = (
        tensors["q"][b : b + 1, heads],
        tensors["k"][b : b + 1, head : head + 1],
        tensors["v"][b : b + 1, head : head + 1],
    )
    out = torch.zeros((1, q.shape[1], q.shape[2], v.shape[3]), dtype=torch.float64, device=q.device)
    lse = torch.full(out.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    for rows in _row_pieces(q.shape[2], k.shape[2], q.shape[1], q.device, whole):
        keys = _seen_keys(rows, q.shape[2], k.shape[2], cut)
        if keys:
            out[:, :, rows], lse[:, :, rows] = op_named("attention").reference(  # type: ignore[attr-defined]
                q[:, :, rows], k[:, :, :keys], v[:, :, :keys], return_lse=True, **mask
            )
    return out, lse


def _forward(load: Any) -> Iterator[Expected]:
    mask, cut, whole = _mask_of(load)
    limit = LSE_TOLERANCE.get(load.sizes.get("dtype", "bfloat16"), 2e-2)
    for at in _groups(load):
        out, lse = _forward_piece(load.tensors, at, mask, cut, whole)
        index = (at[0], at[2])
        yield Expected("out", index, out[0].float() if load.dtype != torch.float64 else out[0])
        if load.sizes.get("lse"):
            yield Expected(
                "lse",
                index,
                lse[0],
                absolute=max(limit, 1e-2 if limit < 1e-2 and load.device.type == "cuda" else limit),
            )


def forward_into(tensors: Any, *, causal: bool, window: Any, softcap: float, scale: float) -> None:
    """Fill tensors["out"] and tensors["lse"] with what a forward saves for the backward."""
    from registry.ops.attention.arguments import canonical_window, check_window

    causal, window = canonical_window(check_window(window), causal)
    mask = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    q, k = tensors["q"], tensors["k"]
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            out, lse = _forward_piece(tensors, (b, head, heads), mask, causal, not causal and window is not None)
            tensors["out"][b, heads] = out[0].to(q.dtype)
            tensors["lse"][b, heads] = lse[0].float()


def _backward(load: Any) -> Iterator[Expected]:
    mask, cut, whole = _mask_of(load)
    tensors = load.tensors
    for b, head, heads in _groups(load):
        q, g = tensors["q"][b : b + 1, heads], tensors["grad_out"][b : b + 1, heads]
        k, v = tensors["k"][b : b + 1, head : head + 1], tensors["v"][b : b + 1, head : head + 1]
        dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
        for rows in _row_pieces(q.shape[2], k.shape[2], 2 * q.shape[1], q.device, whole):
            keys = _seen_keys(rows, q.shape[2], k.shape[2], cut)
            if not keys:
                continue
            extra = {} if tensors["grad_lse"] is None else {"grad_lse": tensors["grad_lse"][b : b + 1, heads, rows]}
            part = op_named(
                "attention_backward"
            ).reference(  # type: ignore[attr-defined]
                g[:, :, rows], q[:, :, rows], k[:, :, :keys], v[:, :, :keys], **mask, **extra
            )
            dq[:, :, rows] = part[0]
            dk[:, :, :keys] += part[1]
            dv[:, :, :keys] += part[2]
        yield Expected("dq", (b, heads), dq[0])
        yield Expected("dk", (b, slice(head, head + 1)), dk[0])
        yield Expected("dv", (b, slice(head, head + 1)), dv[0])


def _matmul(load: Any) -> Iterator[Expected]:
    a, b = load.tensors["a"], load.tensors["b"]
    batches = range(a.shape[0]) if a.dim() == 3 else [None]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    step = max(1, min(m, max(128, PIECE_BYTES.get(load.device.type, 128 << 20) // (16 * (n + k)))))
    pieces = [(i, slice(r, min(m, r + step))) for i in batches for r in range(0, m, step)]
    chosen = _sample(len(pieces), max(1, int(flops_limit(load.device) / (2.0 * step * n * k))), seed=m)
    options = {"bias": load.tensors.get("bias"), "activation": load.sizes.get("activation") or None}
    for i, rows in (pieces[c] for c in chosen):
        scale_a, scale_b = load.tensors.get("scale_a"), load.tensors.get("scale_b")
        scale_a = scale_a[rows] if scale_a is not None and scale_a.dim() else scale_a
        left, right = (a[rows], b) if i is None else (a[i, rows], b[i])
        value = load.op.reference(left, right, scale_a=scale_a, scale_b=scale_b, **options)
        exact = a.dtype is torch.int8 and load.out_dtype in (None, torch.int32) and scale_a is None
        yield Expected("out", (rows,) if i is None else (i, rows), value.round().to(torch.int32) if exact else value)
