"""The host side of the three kernels: masks as two bounds, strides in units, and the constants that each call fixes.

`FORWARD` and `BACKWARD` derive `run`, `prepare` and `builds` from the calls made here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton

from registry.ops.attention import calls
from registry.ops.attention.calls import dense_like, out_of, row_sums
from registry.ops.attention.triton_tiles import KEY, QUERY, options_of, padded
from registry.plugins.triton_fa2.configs import head_tiles
from registry.toolbox import integers as math
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.launch import StandIn
from registry.toolbox.sections import section_of

LOG2_E = 1.4426950408889634
ACCUMULATORS = 2**12
BLOCKS_AN_SM = 2  # about: what tile, head dim and card make of it
"""Of one warp: half of its registers, for wide values. What is more goes to other programs."""
SWIZZLE_16_BIT = 64  # elements of the widest swizzle, 128 bytes


def bounds(problem: Any) -> tuple[int, int]:
    """(left, right) of the mask, -1 where that side hides nothing."""
    left, right = problem.window or (-1, -1)
    if problem.causal:
        right = 0
    # A bound that no row can reach is no bound: the unmasked kernel runs.
    left = -1 if left >= problem.seqlen_k - 1 else left
    right = -1 if right >= problem.seqlen_q - 1 else right
    return left, right


@functools.cache
def _l2_bytes() -> int:
    """The L2 of the current device, or a guess where there is none."""
    return torch.cuda.get_device_properties().L2_cache_size if torch.cuda.is_available() else 50 << 20


def heads_per_section(problem: Any, masked: bool, head_bytes: int, heads: int, tiles: int, group: int = 1) -> int:
    """How many heads share L2 while their tiles run longest first; 1 where all tiles are equally long. `group` of them
    read the same `head_bytes`, and have `tiles` tiles each."""
    if not masked:
        return 1
    slots = BLOCKS_AN_SM * problem.target.sm_count
    return section_of(heads // group, _l2_bytes() // 2 // head_bytes, tiles * group, slots) * group


def strides_of(names: str, tensors: list[StandIn], outputs: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Strides in units, and what the compiler may know of them. The last `outputs` tensors have unit columns."""
    found = [[0 if size == 1 else stride for size, stride in zip(t.shape, t.strides, strict=True)] for t in tensors]
    unit_columns = all(t[3] == 1 for t in found)
    unit = 16 // tensors[0].dtype.itemsize
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


def _common(problem: Any, left: int, right: int) -> dict[str, Any]:
    return dict(
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        PADDED_D=head_tiles(problem.head_dim)[0],
        PADDED_V=padded(problem.head_dim_v),
        PRECISION="ieee" if problem.ieee else "tf32",
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        SOFTCAP=problem.softcap != 0.0,
    )


def sizes_of(problem: Any, left: int, right: int, sign: int = 1) -> dict[str, Any]:
    """With a cap, scores * scale_log2 is the argument of tanh and softcap_log2 what it is multiplied by."""
    return dict(
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        scale_log2=PerCall("scale", sign * (1.0 / problem.softcap if problem.softcap else LOG2_E)),
        softcap_log2=problem.softcap * LOG2_E,
        window_left=left,
        window_right=right,
    )


def _row_bytes(k: StandIn, v: StandIn) -> int:
    """Of one key and its value."""
    return (k.shape[3] + v.shape[3]) * k.dtype.itemsize


def forward(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.triton_fa2.forward import attention_forward

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    left, right = bounds(problem)
    strides, layout = strides_of("q k v out", [q, k, v, out], outputs=1)
    # The kernel takes maxima before it scales, so it wants a positive scale: a sign moves into q.
    sizes = sizes_of(problem, left, right, -1 if scale < 0 else 1)
    if not scale > 0 and not scale < 0:
        sizes["scale_log2"] = max(scale, 1e-30) * sizes["scale_log2"].factor
    heads, group = problem.batch * problem.heads_q, problem.heads_q // problem.heads_kv
    tiles, kv_bytes = triton.cdiv(problem.seqlen_q, config["BLOCK_M"]), _row_bytes(k, v) * problem.seqlen_k
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=row_sums(q, "lse") if problem.lse else None,
        **strides,
        **sizes,
        heads_q=problem.heads_q,
        group=group,
        heads=heads,
        heads_per_section=heads_per_section(problem, right >= 0 > left, kv_bytes, heads, tiles, group),
    )
    constants = dict(
        **_common(problem, left, right),
        **layout,
        RAGGED=problem.seqlen_k % config["BLOCK_N"] != 0,
        NEGATE=scale < 0,
        LSE=problem.lse,
        BLOCK_M=config["BLOCK_M"],
        BLOCK_N=config["BLOCK_N"],
    )
    if config["num_stages"] == 1 and q.dtype.itemsize == 2:
        # K and V then take turns in one buffer. Where V's rows are swizzled more narrowly than K's, ptxas 12.8 loses
        # the address of V's tile on Hopper and the product reads other memory. So V is padded to K's swizzle.
        constants["PADDED_V"] = max(constants["PADDED_V"], min(SWIZZLE_16_BIT, constants["PADDED_D"]))
    chunks = -(-constants["PADDED_V"] * config["BLOCK_M"] // (ACCUMULATORS * config["num_warps"]))
    constants |= {
        "TAIL": head_tiles(problem.head_dim)[1],
        "CHUNKS": chunks,
        "PADDED_V": constants["PADDED_V"] // chunks,
    }
    grid = (tiles * heads, chunks)
    return [Call(attention_forward, grid, arguments, constants, options_of(config))]


def backward(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The query pass, then the key pass (or one for dK and one for dV): they read the delta that the first leaves."""
    from registry.plugins.triton_fa2.key_pass import key_gradients
    from registry.plugins.triton_fa2.query_pass import query_gradients

    q, k, v, out, grad_out, lse = (given[name] for name in ("q", "k", "v", "out", "grad_out", "lse"))
    dq, dk, dv = (dense_like(x, f"d{x.name}") for x in (q, k, v))
    delta = row_sums(q, "delta")
    left, right = bounds(problem)
    common, sizes = _common(problem, left, right), sizes_of(problem, left, right) | {"scale": PerCall("scale")}
    group, row_bytes = problem.heads_q // problem.heads_kv, _row_bytes(k, v)

    strides, layout = strides_of("q k v out do dq", [q, k, v, out, grad_out, dq], outputs=1)
    heads, tiles = problem.batch * problem.heads_q, triton.cdiv(problem.seqlen_q, config["QUERY_M"])
    kv_bytes = row_bytes * problem.seqlen_k
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        do_ptr=grad_out,
        lse_ptr=lse,
        dlse_ptr=given.get("grad_lse"),
        delta_ptr=delta,
        dq_ptr=dq,
        **strides,
        **sizes,
        heads_q=problem.heads_q,
        group=group,
        heads=heads,
        heads_per_section=heads_per_section(problem, right >= 0 > left, kv_bytes, heads, tiles, group),
    )
    constants = dict(
        **common,
        **layout,
        RAGGED=problem.seqlen_k % config["QUERY_N"] != 0,
        GRAD_LSE=problem.grad_lse,
        BLOCK_M=config["QUERY_M"],
        BLOCK_N=config["QUERY_N"],
    )
    grid = (tiles * heads,)
    query_pass = Call(query_gradients, grid, arguments, constants, options_of(config, QUERY))

    strides, layout = strides_of("q k v do dk dv", [q, k, v, grad_out, dk, dv], outputs=2)
    heads, masked = problem.batch * problem.heads_kv, (left >= 0) != (right >= 0)
    tiles = triton.cdiv(problem.seqlen_k, config["KEY_N"])
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
        **sizes,
        heads_kv=problem.heads_kv,
        heads=heads,
        heads_per_section=heads_per_section(problem, masked, row_bytes * problem.seqlen_q * group, heads, tiles),
    )
    constants = dict(
        **common,
        **layout,
        RAGGED=problem.seqlen_q % config["KEY_M"] != 0,
        GROUP=group,
        BLOCK_M=config["KEY_M"],
        BLOCK_N=config["KEY_N"],
    )
    grid, options = (tiles * heads,), options_of(config, KEY)
    wanted = [(True, False), (False, True)] if config["KEY_SPLIT"] else [(True, True)]
    key_passes = [
        Call(key_gradients, grid, arguments, {**constants, "WANT_DK": with_dk, "WANT_DV": with_dv}, options)
        for with_dk, with_dv in wanted
    ]
    return [query_pass, *key_passes]


FORWARD = Host(calls.FORWARD, forward)
BACKWARD = Host(calls.BACKWARD, backward, contiguous=("lse", "grad_lse"))
