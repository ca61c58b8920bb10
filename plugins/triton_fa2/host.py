"""The host side of the three kernels: masks as two bounds, strides in units, and the constants that each call fixes.

`forward_call` and `backward_calls` return what a launch needs as (kernel, grid, arguments, constants); the same records
serve `run`, the fast launcher and compiling ahead without a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton

from registry.plugins.triton_fa2.backward import key_gradients, query_gradients
from registry.plugins.triton_fa2.forward import attention_forward

LOG2_E = 1.4426950408889634
SWIZZLE_16_BIT = 64  # elements of the widest swizzle, 128 bytes
Call = tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]


def padded(head_dim: int) -> int:
    """The tile width that holds a head dim: the next power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def float32_precision() -> str:
    """How float32 tiles are multiplied: torch's own setting for float32 matrix products, read at each call."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def bounds(causal: bool, window: tuple[int, int] | None, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) of the mask, -1 where that side hides nothing."""
    left, right = window or (-1, -1)
    if causal:
        right = 0
    # A bound that no row can reach is no bound: the unmasked kernel runs.
    left = -1 if left >= seqlen_k - 1 else left
    right = -1 if right >= seqlen_q - 1 else right
    return left, right


@functools.cache
def _l2_bytes() -> int:
    """The L2 of the current device, or a guess where there is none."""
    return torch.cuda.get_device_properties().L2_cache_size if torch.cuda.is_available() else 50 << 20


def heads_per_section(masked: bool, row_bytes: int, rows: int, group: int, heads: int) -> int:
    """How many heads share L2 while their tiles run longest first; 1 where all tiles are equally long."""
    if not masked:
        return 1
    return max(1, min(heads, _l2_bytes() // 2 // (row_bytes * rows) * group))


def _strides(names: str, tensors: list[torch.Tensor], outputs: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Strides in units, and what the compiler may know of them. The last `outputs` tensors have unit columns."""
    found = [[0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)] for t in tensors]
    unit_columns = all(t[3] == 1 for t in found)
    unit = 16 // tensors[0].element_size()
    for strides in found:
        for stride in strides[: 3 if unit_columns or strides[3] == 1 else 4]:
            unit = math.gcd(unit, stride)
    if not unit_columns and any(t[3] == 1 for t in found[: len(found) - outputs]):
        unit = 1
    arguments = {}
    for number, (name, strides) in enumerate(zip(names.split(), found, strict=True)):
        for dim, stride in zip(("batch", "head", "row", "col"), strides, strict=True):
            if dim != "col":
                arguments[f"{name}_{dim}"] = stride // unit
            elif number < len(found) - outputs:
                arguments[f"{name}_col"] = 1 if unit_columns else stride // unit
    # Inside a tile of at most 256 rows and columns, 32-bit offsets hold unless a stride is beyond this.
    wide = max(max(strides[2:]) for strides in found) >= 2**22
    return arguments, {"STRIDE_UNIT": unit, "UNIT_COLUMNS": unit_columns, "WIDE": wide}


def _common(q: torch.Tensor, v: torch.Tensor, left: int, right: int, softcap: float) -> dict[str, Any]:
    return dict(
        HEAD_DIM=q.shape[3],
        HEAD_DIM_V=v.shape[3],
        PADDED_D=padded(q.shape[3]),
        PADDED_V=padded(v.shape[3]),
        PRECISION=float32_precision() if q.dtype == torch.float32 else "tf32",
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        SOFTCAP=softcap != 0.0,
    )


def _scales(scale: float, softcap: float, left: int, right: int) -> dict[str, Any]:
    """With a cap, scores * scale_log2 is the argument of tanh and softcap_log2 what it is multiplied by."""
    return dict(
        scale_log2=scale / softcap if softcap else scale * LOG2_E,
        softcap_log2=softcap * LOG2_E,
        window_left=left,
        window_right=right,
    )


def forward_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    config: dict[str, Any],
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
) -> Call:
    batch, heads_q, seqlen_q, _ = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    left, right = bounds(causal, window, seqlen_q, seqlen_k)
    strides, layout = _strides("q k v out", [q, k, v, out], outputs=1)
    row_bytes = (k.shape[3] + v.shape[3]) * k.element_size()
    heads, group = batch * heads_q, heads_q // heads_kv
    # The kernel takes maxima before it scales, so it wants a positive scale: a sign moves into q.
    scales = _scales(max(abs(scale), 1e-30), softcap, left, right)
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=lse,
        **strides,
        heads_q=heads_q,
        group=group,
        heads=heads,
        heads_per_section=heads_per_section(right >= 0 > left, row_bytes, seqlen_k, group, heads),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        **scales,
    )
    constants = dict(
        **_common(q, v, left, right, softcap),
        **layout,
        RAGGED=seqlen_k % config["BLOCK_N"] != 0,
        NEGATE=scale < 0,
        LSE=lse is not None,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
    )
    if config["num_stages"] == 1 and q.element_size() == 2:
        # K and V then take turns in one buffer. Where V's rows are swizzled more narrowly than K's, ptxas 12.8 loses
        # the address of V's tile on Hopper and the product reads other memory. So V is padded to K's swizzle.
        constants["PADDED_V"] = max(constants["PADDED_V"], min(SWIZZLE_16_BIT, constants["PADDED_D"]))
    return attention_forward, (triton.cdiv(seqlen_q, config["BLOCK_M"]) * heads,), arguments, constants


def backward_calls(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    delta: torch.Tensor,
    *,
    scale: float,
    config: dict[str, Any],
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    grad_lse: torch.Tensor | None = None,
) -> list[Call]:
    """The query pass, then the key pass (or one for dK and one for dV): they read the delta that the first leaves."""
    batch, heads_q, seqlen_q, _ = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    left, right = bounds(causal, window, seqlen_q, seqlen_k)
    common, scales = _common(q, v, left, right, softcap), _scales(scale, softcap, left, right)
    row_bytes = (k.shape[3] + v.shape[3]) * k.element_size()
    heads, group = batch * heads_q, heads_q // heads_kv
    sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, scale=scale, **scales)

    strides, layout = _strides("q k v out do dq", [q, k, v, out, grad_out, dq], outputs=1)
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        do_ptr=grad_out,
        lse_ptr=lse,
        dlse_ptr=grad_lse,
        delta_ptr=delta,
        dq_ptr=dq,
        **strides,
        heads_q=heads_q,
        group=group,
        heads=heads,
        **sizes,
        heads_per_section=heads_per_section(right >= 0 > left, row_bytes, seqlen_k, group, heads),
    )
    constants = dict(
        **common,
        **layout,
        RAGGED=seqlen_k % config["QUERY_N"] != 0,
        GRAD_LSE=grad_lse is not None,
        BLOCK_M=config["QUERY_M"],
        BLOCK_N=config["QUERY_N"],
    )
    query_pass = query_gradients, (triton.cdiv(seqlen_q, config["QUERY_M"]) * heads,), arguments, constants

    strides, layout = _strides("q k v do dk dv", [q, k, v, grad_out, dk, dv], outputs=2)
    heads = batch * heads_kv
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        do_ptr=grad_out,
        lse_ptr=lse,
        delta_ptr=delta,
        dk_ptr=dk,
        dv_ptr=dv,
        **strides,
        heads_kv=heads_kv,
        heads=heads,
        **sizes,
        heads_per_section=heads_per_section((left >= 0) != (right >= 0), row_bytes, seqlen_q * group, 1, heads),
    )
    constants = dict(
        **common,
        **layout,
        RAGGED=seqlen_q % config["KEY_M"] != 0,
        GROUP=group,
        BLOCK_M=config["KEY_M"],
        BLOCK_N=config["KEY_N"],
    )
    grid = (triton.cdiv(seqlen_k, config["KEY_N"]) * heads,)
    wanted = [(True, False), (False, True)] if config["KEY_SPLIT"] else [(True, True)]
    key_passes = [(key_gradients, grid, arguments, dict(constants, WANT_DK=dk, WANT_DV=dv)) for dk, dv in wanted]
    return [query_pass, *key_passes]
