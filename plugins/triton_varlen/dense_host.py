"""The host side of dense.py: which share of the keys each program takes, and what varlen's host side says the same way.

Nothing here hangs on the length but numbers: a cache that grows by a token runs the same compiled kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from registry import Reason
from registry.ops.attention import calls
from registry.ops.attention.calls import out_of, row_sums
from registry.plugins.triton_varlen import configs
from registry.plugins.triton_varlen.host import LOG2_E, NOTHING, bounds, for_parts, strides_in_units, switches
from registry.toolbox.call import Call, Host, Operands, PerCall, Zeroes
from registry.toolbox.launch import StandIn

MOST_QUERIES = 1024
"""More fill a GPU by themselves."""


# (rows that there are, width of a head) -> tiles: BLOCK_M, BLOCK_N, warps, stages, programs an SM, least blocks of one.
# Best first, as measured on an H200 (see dense.py); the last has one stage, and needs no asynchronous copy.
TILES = {
    (16, 64): [(16, 128, 4, 3, 2, 1), (16, 64, 4, 3, 3, 2), (16, 64, 4, 5, 2, 2), (16, 64, 4, 1, 2, 2)],
    (16, 128): [(16, 64, 4, 3, 2, 1), (16, 64, 8, 5, 1, 1), (16, 64, 2, 3, 3, 1), (16, 64, 4, 1, 2, 2)],
    (16, 256): [(16, 32, 4, 3, 2, 2), (16, 64, 8, 3, 1, 1), (16, 32, 4, 1, 2, 2)],
    (32, 64): [(32, 128, 4, 3, 2, 1), (32, 64, 8, 5, 1, 1), (32, 64, 4, 3, 3, 2), (32, 64, 4, 1, 2, 2)],
    (32, 128): [(32, 64, 8, 5, 1, 1), (32, 64, 4, 3, 2, 1), (32, 64, 4, 1, 2, 2)],
    (32, 256): [(32, 64, 8, 3, 1, 1), (32, 32, 8, 6, 1, 2), (32, 32, 8, 1, 1, 2)],
    (64, 64): [(64, 64, 4, 4, 3, 2), (64, 64, 4, 3, 2, 2), (64, 128, 4, 3, 2, 1), (64, 64, 8, 1, 1, 2)],
    (64, 128): [(64, 64, 8, 3, 1, 1), (64, 64, 4, 3, 2, 1), (64, 64, 8, 1, 1, 2)],
    (64, 256): [(32, 64, 8, 3, 1, 1), (64, 32, 8, 4, 1, 2), (32, 32, 8, 1, 1, 2)],
}


class AsCache:
    """A question of dense attention as one of a cache whose sequences are all as long."""

    kv_layout, page_size, kv_scale = "cache", 0, ""
    sinks = alibi = False

    def __init__(self, problem: Any) -> None:
        self._problem = problem
        self.kv_dtype = problem.dtype
        self.max_seqlen_q, self.max_seqlen_k = problem.seqlen_q, problem.seqlen_k

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


def tiles(problem: Any) -> list[dict[str, Any]]:
    found = configs.split_configs(AsCache(problem))
    if problem.dtype == "float32":
        return found
    rows = int(found[0]["BLOCK_M"])
    listed = [dict(zip(found[0], one, strict=True)) for one in TILES[rows, configs.width(problem)]]
    whole = problem.batch * problem.heads_kv * -(-problem.seqlen_q * problem.heads_q // (problem.heads_kv * rows))
    if whole < problem.target.sm_count:
        return listed
    # Tiles for all SMs: few are shared, and two programs of an SM hide what each of them waits for.
    return sorted(listed, key=lambda one: (one["num_stages"] == 1, one["PER_SM"] == 1))


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    return configs.forward_shared_memory(AsCache(problem), config)


def reasons(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    yield from configs.copy_reasons(problem, config)
    if problem.seqlen_q > MOST_QUERIES:
        yield Reason("range", "seqlen_q", problem.seqlen_q, f"up to {MOST_QUERIES}: more fill a GPU by themselves")


def lines_of(heads: int, at_once: int) -> int:
    """How many lines of work there are: as many as leave hardly a program without a share, and divide the heads."""
    return max(n for n in range(1, heads + 1) if n == 1 or heads % n == 0 and at_once // n * n * 20 >= at_once * 19)


def shares(blocks: int, tiles: int, chunks: int, least: int) -> tuple[int, int]:
    """(blocks that each tile is filled up with, share of a program) of a line of so many equal tiles.

    The same fraction of one tile for each program where that takes hardly longer than an equal share of the line: then
    none begins a second tile.
    """
    equal = max(-(-blocks * tiles // chunks), least)
    if 1 < tiles <= chunks:
        fraction = max(-(-blocks // (chunks // tiles)), least)
        if fraction * 8 <= equal * 9:
            return -blocks % fraction, fraction
    return 0, equal


def _rows_first(tensor: StandIn) -> StandIn:
    """[B, H, S, D] as [B, S, H, D]."""
    (b, h, s, d), (outer, head, row, column) = tensor.shape, tensor.strides
    return StandIn((b, s, h, d), tensor.dtype, (outer, row, head, column), tensor.alignment, tensor.name)


class Work(NamedTuple):
    """What there is to do in each line, and the share of each program."""

    lines: int
    chunks: int
    """Programs of a line, at most."""
    heads_in_line: int
    first_block: int
    blocks: int
    """Of a tile."""
    filling: int
    share: int
    total: int

    @property
    def programs(self) -> int:
        """Of a line."""
        return -(-self.total // self.share)


def work_of(problem: Any, config: Mapping[str, Any]) -> Work:
    """How the blocks of keys are shared out."""
    at_once, columns = problem.target.sm_count * config["PER_SM"], config["BLOCK_N"]  # programs
    lines = lines_of(problem.heads_kv, at_once)
    chunks = max(1, at_once // lines)
    left, _ = bounds(problem)
    first = max(problem.seqlen_k - problem.seqlen_q - left, 0) // columns if left >= 0 else 0
    # A tile has at least one block, so that it is somebody's and its output is written.
    blocks = max(-(-problem.seqlen_k // columns) - first, 1)
    heads_in_line, group = problem.heads_kv // lines, problem.heads_q // problem.heads_kv
    number = problem.batch * heads_in_line * -(-problem.seqlen_q * group // config["BLOCK_M"])
    filling, share = shares(blocks, number, chunks, config["LEAST"])
    return Work(lines, chunks, heads_in_line, first, blocks, filling, share, (filling + blocks) * number)


def forward(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.triton_varlen.dense import split_dense

    q, k, v, out = given["q"], given["k"], given["v"], out_of(given)
    asked, steps = AsCache(problem), ("outer", "row", "head")
    q_strides, q_unit = strides_in_units({"q": _rows_first(q), "out": _rows_first(out)}, steps)
    k_strides, k_unit = strides_in_units({"k": _rows_first(k), "v": _rows_first(v)}, steps)
    in_a_tile = max(stride for name, stride in q_strides.items() if not name.endswith("outer"))
    cfg = switches(
        asked,
        config,
        Q_UNIT=q_unit,
        K_UNIT=k_unit,
        WIDE=max(k_strides["k_row"], k_strides["v_row"]) * k_unit >= 2**22,
        Q_WIDE=in_a_tile * q_unit >= 2**24,
        PADDED_V=configs.value_width(asked, config),
        SIGNED=not scale > 0,
    )
    cfg, options = for_parts(asked, config, cfg)
    work = work_of(problem, config)
    parts = work.lines * work.chunks
    left, right = bounds(problem)
    arguments = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        out_ptr=out,
        lse_ptr=row_sums(q, "lse") if problem.lse else NOTHING,
        parts_ptr=StandIn((2 * parts * cfg.ROWS * (cfg.PADDED_V + 2),), "float32", name="parts"),
        counters_ptr=Zeroes(parts),
        **q_strides,
        **k_strides,
        queries=problem.seqlen_q,
        keys=problem.seqlen_k,
        heads=problem.heads_q,
        heads_in_line=work.heads_in_line,
        first_block=work.first_block,
        blocks=work.blocks,
        filling=work.filling,
        share=work.share,
        total=work.total,
        scale_log2=PerCall("scale", 1.0 / problem.softcap if problem.softcap else LOG2_E),
        cap_log2=problem.softcap * LOG2_E,
        window_left=left,
        window_right=right,
    )
    return [Call(split_dense, (work.lines, work.programs), arguments, {"cfg": cfg}, options)]


FORWARD = Host(calls.FORWARD, forward)
