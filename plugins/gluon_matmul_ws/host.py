"""Host side of the warp-specialised product: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.matmul.calls import (
    MATMUL,
    VECTORS,
    out_of,
    scale_strides,
    sizes_of,
    strides_of,
    tma_can_store,
    turned,
)
from registry.plugins.gluon_matmul_ws.turn import along_k, copying
from registry.toolbox.boxes import in_tiles
from registry.toolbox.call import Call, Host, Operands, Zeroes
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import split_n
from registry.toolbox.tensor_maps import boxed, rounded_to_tf32


@dataclass(frozen=True)
class Switches:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    PARTS: int  # consumers that share a tile
    GM: int  # rows of a consumer's wgmma
    FEW: int  # rows of a consumer, or columns of a tile where SWAP, that hold what there is; 0: all
    CUT: bool  # boxes bring no others
    N0: int
    N1: int
    BK: int
    STAGES: int
    STORES: int  # buffers of C for each consumer
    EN: int  # columns of such a buffer
    GROUP: int
    SPLIT: int
    SPLIT_K: int  # 0: equal stretches of K for all CTAs
    SWAP: bool  # columns of b are the rows of the product
    AT_ONCE: int  # partial sums in flight while they are added up
    REGS: int
    ITEM: int  # bytes of an operand's element
    PDL: bool
    A_T: bool
    A_REGS: bool  # the first factor comes from registers
    B_T: bool
    TMA_STORE: bool
    EXACT: int  # fp8: blocks of K that are summed by themselves before they are added
    ROUND: bool  # float32 that the tensor maps do not round to tf32
    BIAS: bool
    SCALED: bool
    ACT: str
    ACC: Any


def split_k(config: Mapping[str, Any]) -> int:
    """Ranges of K that a tile is cut into; configs from before there were any have one."""
    return config.get("SPLIT_K", 1)


def swapped(config: Mapping[str, Any]) -> bool:
    """Whether it multiplies b's transpose by a's: columns of b are wgmma's rows, for few rows of a."""
    return bool(config.get("SWAP", False))


def _transposed(operand: StandIn) -> StandIn:
    turn = (*range(len(operand.shape) - 2), -1, -2)
    shape, strides = (tuple(facts[i] for i in turn) for facts in (operand.shape, operand.strides))
    return StandIn(shape, operand.dtype, strides, operand.alignment, operand.name)


def sides(config: Mapping[str, Any], given: Operands) -> tuple[StandIn, StandIn]:
    """The factors as they are multiplied. Of 32 bits, the first comes from registers where it does not lie along K."""
    swap = swapped(config)
    a, b = along_k(given["a"], True), along_k(given["b"], False)
    if given["a"].dtype.itemsize == 4 and not split_n(config["BLOCK_N"])[1] and split_k(config):
        a, b = (a, given["b"]) if swap else (given["a"], b)
    return (_transposed(b), _transposed(a)) if swap else (a, b)


FEW = 256
"""So many rows are shared out evenly among tiles and their consumers."""


def few_rows(problem: Any, config: Mapping[str, Any], given: Operands) -> int:
    """Rows of each consumer, or of each tile where they are columns: hardly more than there are, for one that lies
    outside takes the TMA unit as long as two inside. A multiple of 8, so that there are but 8 kernels of a config, for
    the bytes of a stage are constants. 0 where all are whole."""
    first, second = sides(config, given)
    if problem.m > FEW:
        return 0
    if swapped(config):
        n0, n1 = split_n(config["BLOCK_N"])
        fits = n0 * (n1 > 0) < problem.m <= n0 + n1
        return 8 * triton.cdiv(problem.m, 8) if fits and turned(second) else 0
    consumers = (2 if config["MODE"] == "coop" else 1) * triton.cdiv(problem.m, config["BLOCK_M"])
    return 0 if turned(first) else 8 * triton.cdiv(problem.m, 8 * consumers)


def _at_once(config: Mapping[str, Any]) -> int:
    """Partial sums in flight while they are added up: as many as leave registers for the accumulators."""
    most = max(1, 128 * 128 // (config["BLOCK_M"] * config["BLOCK_N"] // 2))
    return min(most, split_k(config) or 4)


def rows_of_each(config: Mapping[str, Any]) -> int:
    """Rows of a tile that one consumer has."""
    return int(config["BLOCK_M"]) // (2 if config["MODE"] == "coop" else 1)


def columns_at_once(config: Mapping[str, Any], item: int) -> int:
    """Columns of a tile that are stored together, of elements of so many bytes."""
    first, second = split_n(config["BLOCK_N"])
    return min(128 // item, second or first // int(config["SPLIT"]))


def switches(problem: Any, config: Mapping[str, Any], given: Operands) -> Switches:
    """What this config means for a problem."""
    parts = 2 if config["MODE"] == "coop" else 1
    a, b = sides(config, given)
    n0, n1 = split_n(config["BLOCK_N"])
    few = few_rows(problem, config, given)
    split, out = config["SPLIT"], out_of(problem, given)
    return Switches(
        PARTS=parts,
        GM=rows_of_each(config),
        FEW=few,
        CUT=few > 0,
        N0=n0,
        N1=n1,
        BK=config["BLOCK_K"],
        STAGES=config["STAGES"],
        STORES=config["STORES"],
        EN=columns_at_once(config, out.dtype.itemsize),
        GROUP=config["GROUP"],
        SPLIT=split,
        SPLIT_K=split_k(config),
        SWAP=swapped(config),
        AT_ONCE=_at_once(config),
        REGS=240,
        ITEM=given["a"].dtype.itemsize,
        PDL=config.get("PDL", True),
        A_T=turned(a),
        A_REGS=turned(a) and a.dtype.itemsize == 4,
        B_T=turned(b),
        TMA_STORE=tma_can_store(out),
        EXACT=problem.dtype.startswith("float8") * (1 if n1 else 2),
        ROUND=False,
        BIAS=problem.bias,
        SCALED=bool(problem.scaling),
        ACT=problem.activation,
        ACC=gl.int32 if problem.dtype == "int8" else gl.float32,
    )


def _operand(operand: StandIn, rows: int, columns: int) -> TensorDescriptor:
    """As it is multiplied: float32 arrives as tf32."""
    found = in_tiles(operand, rows, columns)
    return rounded_to_tf32(found) if operand.dtype == torch.float32 else found


def _of_rows(descriptor: TensorDescriptor, rows: int) -> TensorDescriptor:
    return boxed(descriptor, rows) if rows else descriptor


def _last(m: int, tall: int, tiles_m: int, config: Mapping[str, Any]) -> int:
    """The last row where a consumer begins, if it may compute rows of the one before once more: to the same bits."""
    same = tiles_m == 1 or (config["SPLIT"] == 1 and split_k(config) != 0)
    return m - tall if 0 < tall <= m and same else m


def divided(
    problem: Any, cfg: Switches, given: Operands, tile: tuple[int, int], blocks: int
) -> tuple[int, dict[str, Any]]:
    """How many CTAs share the tiles, each of so many rows and columns and `blocks` of K, and what they are told of that
    and of C. Split-K adds the partial sums, and for each tile two counters of those who wrote."""
    out, (m, n, _, z) = out_of(problem, given), sizes_of(given)
    if cfg.SWAP:
        m, n = n, m
    tiles_m, tiles_n = triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1])
    tiles, sms = tiles_m * tiles_n * z, problem.target.sm_count
    ctas = min(tiles * (cfg.SPLIT * cfg.SPLIT_K or blocks), sms)
    partly = cfg.SPLIT > 1 or cfg.SPLIT_K == 0
    sums, counters = out, out
    if cfg.SPLIT_K != 1:
        places = tiles * cfg.SPLIT_K or 2 * ctas
        elements = places * cfg.PARTS * cfg.GM * (cfg.N0 + cfg.N1)
        sums = StandIn((elements,), torch.int32 if problem.dtype == "int8" else torch.float32, name="sums")
        counters = Zeroes(2 * tiles)
    return ctas, {
        "c_ptr": out,
        "bias_ptr": given.get("bias", out),
        "sa_ptr": given.get("scale_a", out),
        "sb_ptr": given.get("scale_b", out),
        "part_ptr": sums,
        "count_ptr": counters,
        "M": m,
        "N": n,
        "tiles": tiles,
        "whole": tiles // sms * sms if partly else tiles,  # of the complete rounds
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        **dict(zip(("scz", "scm", "scn"), strides_of(out), strict=True)),
        "s_az": 0,
        **dict(zip(("s_am", "s_bn"), scale_strides(given), strict=True)),
    }


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launch of this config, and of copies that it reads."""
    from registry.plugins.gluon_matmul_ws.kernel import matmul_ws

    (a, b), out = sides(config, given), out_of(problem, given)
    cfg = switches(problem, config, given)
    tall, wide = (0, cfg.FEW) if cfg.SWAP else (cfg.FEW, 0)
    a_desc = _of_rows(_operand(a, cfg.GM, cfg.BK), tall)
    b_desc = _of_rows(_operand(b, cfg.BK, cfg.N0), min(wide, cfg.N0))
    b1_desc = _of_rows(_operand(b, cfg.BK, cfg.N1 or cfg.N0 // cfg.SPLIT), max(wide - cfg.N0, 0))
    block = (cfg.EN, cfg.GM) if cfg.SWAP else (cfg.GM, cfg.EN)
    unit = 1 + cfg.A_REGS  # a block beyond K is of zeros
    blocks = unit * triton.cdiv(problem.k, unit * cfg.BK)
    ctas, shared = divided(problem, cfg, given, (cfg.PARTS * (tall or cfg.GM), cfg.N0 + cfg.N1), blocks)
    arguments = {
        **shared,
        "a_desc": a_desc,
        "b0_desc": b_desc,
        "b1_desc": b1_desc,
        "c_desc": _of_rows(in_tiles(out, *block), tall) if cfg.TMA_STORE else a_desc,
        "last": _last(shared["M"], tall, shared["tiles_m"], config),
        "blocks": blocks,
        "z_a": int(a_desc.shape[0] > 1),
        "z_b": int(b_desc.shape[0] > 1),
    }
    options = {"num_warps": 4, "launch_pdl": cfg.PDL}
    turns = {name: along_k(given[name], name == "a") for name in ("a", "b")}
    read = {descriptor.base.name for descriptor in (a_desc, b_desc)}
    copies = [copying(given[name], copy, cfg.PDL) for name, copy in turns.items() if copy.name in read - {name}]
    # rows of a neighbour that whole boxes bring are not stored: there, all of C goes by pointers
    plain = replace(cfg, ROUND=problem.dtype == "float32", CUT=False, TMA_STORE=cfg.TMA_STORE and not tall)
    return [*copies, Call(matmul_ws, (ctas,), arguments, {"cfg": cfg}, options, if_plain_maps={"cfg": plain})]


HOST = Host(MATMUL, call, contiguous=VECTORS)
