"""The host side of the kernels: strides in units, masks as two bounds, and the constants that each call fixes.

`PREFILL`, `SPLIT` and `BACKWARD` derive `run`, `prepare` and `builds` from the calls made here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from registry.ops.attention.triton_tiles import KEY, QUERY, options_of, padded
from registry.ops.attention_varlen import calls
from registry.ops.attention_varlen.calls import out_of, row_sums, sink_call
from registry.ops.attention_varlen.lengths import LENGTHS
from registry.plugins.triton_varlen import configs
from registry.plugins.triton_varlen.switches import VarlenSwitches
from registry.toolbox import integers as math
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn

LOG2_E = 1.4426950408889634
FEW, MANY = (1, 32, 128), 1024
"""Sequences looked at together: one by itself, a warp's without waiting for others, all at once; or some of many."""
OVERHEAD = 3
"""What beginning and ending a tile costs, in blocks of keys, where tiles differ."""
NOTHING = StandIn((1,), "int32")
"""A null pointer, for what a problem does not have."""


@functools.cache
def _l2_bytes() -> int:
    """The L2 of the current device, or a guess where there is none."""
    return torch.cuda.get_device_properties().L2_cache_size if torch.cuda.is_available() else 50 << 20


def heads_together(masked: bool, key_bytes: int, rows: int, heads: int) -> int:
    """How many key heads have their tiles taken in turn: those whose keys fit L2 while tiles run longest first."""
    return max(1, min(heads, _l2_bytes() // 2 // max(1, key_bytes * rows))) if masked else 1


def _steps(tensor: StandIn) -> list[int]:
    """Strides of [outer,] row and head; 0 where there is one of something, whose stride nobody needs."""
    found = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)][:-1]
    return found if len(found) == 3 else [0, *found]


def strides_in_units(named: Mapping[str, StandIn], dims: tuple[str, ...]) -> tuple[dict[str, int], int]:
    """The strides of tensors that share a unit, and how many elements that is."""
    found = {name: _steps(tensor)[-len(dims) :] for name, tensor in named.items()}
    unit = math.gcd(16 // next(iter(named.values())).dtype.itemsize, *(s for steps in found.values() for s in steps))
    return {
        f"{name}_{dim}": stride // unit
        for name, steps in found.items()
        for dim, stride in zip(dims, steps, strict=True)
    }, unit


def _scale_strides(problem: Any, given: Operands) -> dict[str, int]:
    arguments = {}
    for name in ("k_scale", "v_scale"):
        steps = [0, 0, 0]
        if problem.kv_scale == "head":
            steps[2] = given[name].strides[0]
        elif problem.kv_scale == "token":
            strides = given[name].strides
            steps = [0, *strides] if len(strides) == 2 else [*strides]
        arguments |= {f"{name}_{dim}": step for dim, step in zip(("outer", "row", "head"), steps, strict=True)}
    return arguments


def bounds(problem: Any) -> tuple[int, int]:
    """(left, right) of the mask, -1 where that side hides nothing."""
    left, right = problem.window or (-1, -1)
    return left, 0 if problem.causal else right


def _sizes(problem: Any) -> dict[str, Any]:
    left, right = bounds(problem)
    return dict(
        batch=problem.batch,
        total_q=problem.total_q,
        most_q=problem.max_seqlen_q,
        most_k=problem.max_seqlen_k,
        heads_kv=problem.heads_kv,
        scale_log2=PerCall("scale", 1.0 / problem.softcap if problem.softcap else LOG2_E),
        cap_log2=problem.softcap * LOG2_E,
        window_left=left,
        window_right=right,
    )


def _room(problem: Any, given: Operands) -> int:
    """Keys that memory holds: of all sequences where they are packed, else of each."""
    k = given["k"]
    if problem.kv_layout == "paged":
        return given["block_table"].shape[1] * k.shape[1]
    return k.shape[-3]


def switches(problem: Any, config: Mapping[str, Any], **known: Any) -> VarlenSwitches:
    """What is fixed when a kernel is compiled."""
    left, right = bounds(problem)
    return VarlenSwitches(
        **dict(
            D=problem.head_dim,
            V=problem.head_dim_v,
            PADDED_D=padded(problem.head_dim),
            PADDED_V=padded(problem.head_dim_v),
            GROUP=problem.heads_q // problem.heads_kv,
            BLOCK_M=config["BLOCK_M"],
            BLOCK_N=config["BLOCK_N"],
            CHUNK=next((chunk for chunk in FEW if problem.batch <= chunk), MANY),
            FEW=problem.batch <= FEW[-1],
            PACKED=problem.kv_layout == "packed",
            PAGE=problem.page_size,
            PER_HEAD=problem.kv_scale in ("tensor", "head"),
            PER_KEY=problem.kv_scale == "token",
            TF32=not problem.ieee,
            PAIRED=False,
            INT8=problem.kv_dtype == "int8",
            PTX=problem.target.sm >= 89,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            CAP=problem.softcap != 0.0,
            ALIBI=problem.alibi,
            SINKS=problem.sinks,
            SIGNED=problem.kv_scale in ("tensor", "head"),
            LSE=problem.lse,
            COMPLAIN=True,
        )
        | known
    )


def _forward(problem: Any, config: Mapping[str, Any], given: Operands) -> tuple[dict[str, Any], VarlenSwitches]:
    """What both forward kernels are given."""
    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    q_strides, q_unit = strides_in_units({"q": q, "out": out}, ("row", "head"))
    k_strides, k_unit = strides_in_units({"k": k, "v": v}, ("outer", "row", "head"))
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=row_sums(q) if problem.lse else NOTHING,
        complaints_ptr=LENGTHS.argument,
        cu_q_ptr=given["cu_seqlens_q"],
        cu_k_ptr=given.get("cu_seqlens_k", NOTHING),
        used_ptr=given.get("seqused_k", NOTHING),
        table_ptr=given.get("block_table", NOTHING),
        sinks_ptr=given.get("sinks", NOTHING),
        slopes_ptr=given.get("alibi_slopes", NOTHING),
        k_scale_ptr=given.get("k_scale", NOTHING),
        v_scale_ptr=given.get("v_scale", NOTHING),
        **q_strides,
        **k_strides,
        **_scale_strides(problem, given),
        table_row=given["block_table"].strides[0] if problem.page_size else 0,
        pages=k.shape[0],
        room=_room(problem, given),
        **_sizes(problem),
    )
    wide = max(k_strides["k_row"], k_strides["v_row"]) * k_unit >= 2**22
    q_wide = max(q_strides.values()) * q_unit >= 2**24  # a tile has at most 128 rows
    known: dict[str, Any] = {"Q_UNIT": q_unit, "K_UNIT": k_unit, "WIDE": wide, "Q_WIDE": q_wide}
    known["PADDED_V"] = configs.value_width(problem, config)
    if problem.kv_scale:
        even = given["v"].alignment % 2 == 0 and k_unit % 2 == 0
        known["PAIRED"] = even and configs.in_pairs(problem, config)
    return arguments, switches(problem, config, **known)


def prefill_calls(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.triton_varlen.prefill import prefill

    arguments, cfg = _forward(problem, config, given)
    key_bytes = (problem.head_dim + problem.head_dim_v) * given["k"].dtype.itemsize
    slots = problem.total_q * cfg.GROUP // cfg.BLOCK_M + problem.batch
    arguments |= {
        "slots": slots,
        "heads_together": heads_together(cfg.RIGHT and not cfg.LEFT, key_bytes, problem.max_seqlen_k, problem.heads_kv),
    }
    return [Call(prefill, (slots * problem.heads_kv,), arguments, {"cfg": cfg}, options_of(config))]


def for_parts(problem: Any, config: Mapping[str, Any], cfg: VarlenSwitches) -> tuple[VarlenSwitches, dict[str, Any]]:
    """(switches, launch options) of a kernel whose programs leave parts: of how many rows, and how many are added up at
    once, as far as registers go."""
    rows = min(cfg.BLOCK_M, 1 << (problem.max_seqlen_q * cfg.GROUP - 1).bit_length())
    together = max(1, (configs.registers(config) + 1) // 2 * 32 * config["num_warps"] // (rows * cfg.PADDED_V))
    pdl = problem.target.sm >= 90
    options = configs.split_options(config) | ({"launch_pdl": True} if pdl else {})
    return replace(cfg, ROWS=rows, AT_ONCE=min(32, 1 << together.bit_length() - 1), PDL=pdl), options


def split_calls(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.triton_varlen.split import split

    arguments, cfg = _forward(problem, config, given)
    at_once = problem.target.sm_count * config["PER_SM"]  # programs
    chunks = max(1, at_once // problem.heads_kv)
    programs = chunks * problem.heads_kv
    cfg, options = for_parts(problem, config, cfg)
    arguments |= {
        "parts_ptr": StandIn((2 * programs * cfg.ROWS * (cfg.PADDED_V + 2),), "float32", name="parts"),
        "counters_ptr": Zeroes(programs),
        "least_share": config["LEAST"],
        "overhead": OVERHEAD,
        "checker": min(at_once, programs) - 1,  # of those that begin at once, one that may have nothing else to do
    }
    return [Call(split, (problem.heads_kv, chunks), arguments, {"cfg": cfg}, options)]


def backward_calls(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The query pass, the key pass (or one for dK and one for dV), and the sinks': they read what the first leaves."""
    from registry.plugins.triton_varlen.key_pass import key_pass
    from registry.plugins.triton_varlen.query_pass import query_pass

    q, k, v, out, grad_out, lse = (given[name] for name in ("q", "k", "v", "out", "grad_out", "lse"))
    dq, dk, dv = (StandIn(t.shape, t.dtype, name=f"d{t.name}") for t in (q, k, v))
    delta = row_sums(q, "delta")
    key_bytes = (problem.head_dim + problem.head_dim_v) * k.dtype.itemsize
    common = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        do_ptr=grad_out,
        lse_ptr=lse,
        delta_ptr=delta,
        cu_q_ptr=given["cu_seqlens_q"],
        cu_k_ptr=given["cu_seqlens_k"],
        slopes_ptr=given.get("alibi_slopes", NOTHING),
        room=_room(problem, given),
        scale=PerCall("scale"),
        **_sizes(problem),
    )
    del common["most_q"], common["most_k"]

    rows, units = ("row", "head"), {}
    q_strides, units["Q_UNIT"] = strides_in_units({"q": q, "out": out, "do": grad_out, "dq": dq}, rows)
    k_strides, units["K_UNIT"] = strides_in_units({"k": k, "v": v}, rows)
    tile = {"BLOCK_M": config["QUERY_M"], "BLOCK_N": config["QUERY_N"]}
    wide = max(k_strides["k_row"], k_strides["v_row"]) * units["K_UNIT"] >= 2**22
    cfg = switches(problem, tile, WIDE=wide, GRAD_LSE=problem.grad_lse, **units)
    slots = problem.total_q * cfg.GROUP // cfg.BLOCK_M + problem.batch
    masked = cfg.RIGHT != cfg.LEFT
    arguments = dict(
        **common,
        out_ptr=out,
        dlse_ptr=given.get("grad_lse", NOTHING),
        dq_ptr=dq,
        **q_strides,
        **k_strides,
        slots=slots,
        heads_together=heads_together(masked, key_bytes, problem.max_seqlen_k, problem.heads_kv),
        complaints_ptr=LENGTHS.argument,
        most_q=problem.max_seqlen_q,
        most_k=problem.max_seqlen_k,
    )
    grid = (slots * problem.heads_kv,)
    found = [Call(query_pass, grid, arguments, {"cfg": cfg}, options_of(config, QUERY))]

    q_strides, units["Q_UNIT"] = strides_in_units({"q": q, "do": grad_out}, rows)
    k_strides, units["K_UNIT"] = strides_in_units({"k": k, "v": v, "dk": dk, "dv": dv}, rows)
    tile = {"BLOCK_M": config["KEY_M"], "BLOCK_N": config["KEY_N"]}
    wide = max(q_strides["q_row"], q_strides["do_row"]) * units["Q_UNIT"] >= 2**22
    cfg = switches(problem, tile, WIDE=wide, **units)
    slots = problem.total_k // cfg.BLOCK_N + problem.batch
    arguments = dict(
        **common,
        dk_ptr=dk,
        dv_ptr=dv,
        **q_strides,
        **k_strides,
        slots=slots,
        heads_together=heads_together(masked, key_bytes * cfg.GROUP, problem.max_seqlen_q, problem.heads_kv),
    )
    grid, options = (slots * problem.heads_kv,), options_of(config, KEY)
    wanted = [(True, False), (False, True)] if config["KEY_SPLIT"] else [(True, True)]
    for with_dk, with_dv in wanted:
        constants = {"cfg": replace(cfg, WANT_DK=with_dk, WANT_DV=with_dv)}
        found.append(Call(key_pass, grid, arguments, constants, options))
    if problem.sinks:
        found.append(sink_call(problem, given, delta))
    return found


PREFILL = Host(calls.FORWARD, prefill_calls)
SPLIT = Host(calls.FORWARD, split_calls)
BACKWARD = Host(calls.BACKWARD, backward_calls, contiguous=("lse", "grad_lse"))
