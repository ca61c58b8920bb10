"""The host side of the gradients of wide heads: chunks of heads, and for each chunk the weights and three products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import triton

from registry.ops.attention import calls
from registry.ops.attention.calls import dense_like, row_sums
from registry.ops.attention.triton_tiles import padded
from registry.plugins.triton_fa2.host import bounds, sizes_of, strides_of
from registry.plugins.triton_fa2.wide.configs import CHUNK, group_bytes, tiles_of
from registry.plugins.triton_fa2.wide.product import weighted_sums
from registry.plugins.triton_fa2.wide.weights import attention_weights, row_deltas
from registry.toolbox.call import Call, Host, Operands, PerCall
from registry.toolbox.launch import StandIn

ROWS_OF_DELTA = 16


def chunks_of(groups: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of the key heads whose weights are in memory at a time."""
    if groups * bytes_each <= CHUNK:
        yield 0, groups
        return
    parts = min(groups, -(-groups * bytes_each // CHUNK))
    for part in range(parts):
        first = part * groups // parts
        yield first, (part + 1) * groups // parts - first


def backward(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    q, k, v, out, grad_out, lse = (given[name] for name in ("q", "k", "v", "out", "grad_out", "lse"))
    dq, dk, dv = (dense_like(x, f"d{x.name}") for x in (q, k, v))
    delta = row_sums(q, "delta")
    left, right = bounds(problem)
    group = problem.heads_q // problem.heads_kv
    tiles_q, tiles_k = tiles_of(problem, config)
    m, n = config["WEIGHTS_M"], config["WEIGHTS_N"]
    sizes = sizes_of(problem, left, right)
    masks = dict(HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0)
    counts = dict(group=group, tiles_q=tiles_q, tiles_k=tiles_k)

    strides, layout = _layout("out do", [out, grad_out])
    arguments = dict(
        out_ptr=out,
        do_ptr=grad_out,
        dlse_ptr=given.get("grad_lse"),
        delta_ptr=delta,
        **strides,
        heads_q=problem.heads_q,
        seqlen_q=problem.seqlen_q,
    )
    constants = dict(
        **layout,
        HEAD_DIM_V=problem.head_dim_v,
        PADDED_V=padded(problem.head_dim_v),
        GRAD_LSE=problem.grad_lse,
        BLOCK_M=ROWS_OF_DELTA,
    )
    grid = (triton.cdiv(problem.seqlen_q, ROWS_OF_DELTA) * problem.batch * problem.heads_q,)
    found = [Call(row_deltas, grid, arguments, constants, {"num_warps": 4})]

    chunks = [*chunks_of(problem.batch * problem.heads_kv, group_bytes(problem, config))]
    memory = (max(count for _, count in chunks) * group, tiles_q * m, tiles_k * n)
    p, ds = (StandIn(memory, q.dtype, name=name) for name in ("weights", "grad_weights"))
    product = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_COLUMNS=config["COLUMNS"], INNER=config["INNER"], GROUP=group, **masks)
    options = {"num_warps": config["product_warps"], "num_stages": config["product_stages"]}
    for first, count in chunks:
        strides, layout = _layout("q k v do", [q, k, v, grad_out])
        arguments = dict(
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            do_ptr=grad_out,
            lse_ptr=lse,
            delta_ptr=delta,
            p_ptr=p,
            ds_ptr=ds,
            **strides,
            **sizes,
            **counts,
            heads_q=problem.heads_q,
            first_head=first * group,
        )
        constants = dict(
            **layout,
            **masks,
            HEAD_DIM=problem.head_dim,
            HEAD_DIM_V=problem.head_dim_v,
            ROWS_RAGGED=problem.seqlen_q % m != 0,
            KEYS_RAGGED=problem.seqlen_k % n != 0,
            SOFTCAP=problem.softcap != 0.0,
            BLOCK_M=m,
            BLOCK_N=n,
            BLOCK_K=config["WEIGHTS_K"],
        )
        weights_options = {"num_warps": config["weights_warps"], "num_stages": config["weights_stages"]}
        grid = (count * group * tiles_q * tiles_k,)
        found.append(Call(attention_weights, grid, arguments, constants, weights_options))
        for w, x, to, by_keys in ((p, grad_out, dv, True), (ds, q, dk, True), (ds, k, dq, False)):
            strides, layout = _layout("x to", [x, to])
            arguments = dict(
                w_ptr=w,
                x_ptr=x,
                to_ptr=to,
                **strides,
                **counts,
                heads_to=to.shape[1],
                first_head=first if by_keys else first * group,
                seqlen_q=problem.seqlen_q,
                seqlen_k=problem.seqlen_k,
                factor=1.0 if to is dv else PerCall("scale"),
                window_left=left,
                window_right=right,
            )
            inner = problem.seqlen_q if by_keys else problem.seqlen_k
            constants = dict(
                **product, **layout, COLUMNS=to.shape[3], RAGGED=inner % config["INNER"] != 0, BY_KEYS=by_keys
            )
            parts = triton.cdiv(to.shape[3], config["COLUMNS"])
            grid = (parts * (tiles_k * count if by_keys else tiles_q * count * group),)
            found.append(Call(weighted_sums, grid, arguments, constants, options))
    return found


def _layout(names: str, tensors: list[StandIn]) -> tuple[dict[str, int], dict[str, Any]]:
    """As `strides_of` gives it, of tensors with unit columns."""
    strides, layout = strides_of(names, tensors, outputs=0)
    rows = {name: stride for name, stride in strides.items() if not name.endswith("_col")}
    return rows, {name: layout[name] for name in ("STRIDE_UNIT", "WIDE")}


HOST = Host(calls.BACKWARD, backward, contiguous=("lse", "grad_lse"))
