"""What shapes the machine code of one build, and which configs there are. No import of Triton: legality needs none.

A config is {BLOCK_N, stages, PER_SM, HEADS, AHEAD}: keys of a block, blocks that are under way or being read, programs
an SM, and key heads that a program reads side by side. AHEAD is 0: what it asked for has lost, measured rows name it.

With several heads a block has fewer tokens, the keys of their heads in turn, and its rows are those of all these heads:
products of keys with the rows of another head are made for nothing, and masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Design, Reason

SWIZZLE = 128  # bytes that a swizzle spans: the columns of a tensor map's box
PAGES = 8  # page sizes are multiples of it: a swizzle repeats after so many rows of a box
MOST_ROWS = {64: 64, 128: 64, 256: 32}  # (query, head) pairs of a tile, by its columns: sums have to fit the registers
LEAST_ROWS = 8  # what wgmma multiplies
MOST_SMALL = 16  # rows of which the queries stay in registers
MAXIMA = 16  # bytes of a row: a number of each warp
MOST_BOX = 64
QUANTISED_HEAD = 128  # columns of tiles of 8 bits: what the layouts of products.py are made for
LAUNCH_REGISTERS = {1: 168, 2: 128, 3: 80}  # by programs an SM
PRODUCER_REGISTERS = {1: 40, 2: 40, 3: 32}
SHARED = 228 << 10  # bytes of an SM, of which each program takes 1 KiB besides
ITEM = 2  # bytes of a query, and of a key that is not quantised

Config = Mapping[str, Any]


@dataclass(frozen=True)
class DecodeTraits:
    """The constants of one compiled kernel."""

    head: int  # columns of tiles: whole panels, a power of two; what the tensors lack reads as zero
    columns: int  # of them those that there are
    heads: int  # key heads side by side
    span: int  # rows of each, a power of two
    rows: int  # of a tile: the N of its products
    part_rows: int  # of them those of its heads
    block_n: int
    stages: int
    group: int  # query heads of a key head
    page: int  # keys of a page; 0: none
    chunks: int  # programs of a key head
    chunk: int  # sequences that are looked at together
    few: bool  # and there are no more
    left: bool
    right: bool
    eight: bool  # keys and values are of 8 bits
    small: bool  # and rows so few that products go through registers of each warp
    int8: bool
    cap: bool
    sinks: bool
    lse: bool
    at_once: int  # parts that are added up together
    launch_registers: int  # of each thread: consumer and producer share evenly until setmaxnreg
    producer_registers: int

    @property
    def tokens(self) -> int:
        """Of a block: as many keys of each head."""
        return self.block_n // self.heads

    @property
    def box(self) -> int:
        """Tokens that one copy brings: of one page, and few, for those beyond the last key are not brought."""
        return math.gcd(min(self.tokens, MOST_BOX), self.page)

    @property
    def boxes(self) -> int:
        """Copies of one panel of a block."""
        return self.tokens // self.box

    @property
    def item(self) -> int:
        return 1 if self.eight else ITEM

    @property
    def panel(self) -> int:
        """Columns that one copy brings."""
        return SWIZZLE // self.item

    @property
    def panels(self) -> int:
        return self.head // self.panel

    @property
    def tile_bytes(self) -> int:
        return self.block_n * self.head * self.item


def width(problem: Any) -> int:
    """Columns of tiles: those that hold the head dim."""
    wide = max(problem.head_dim, QUANTISED_HEAD) if problem.kv_scale else problem.head_dim
    return 64 if wide <= 64 else 128 if wide <= 128 else 256


def rows_of(problem: Any) -> int:
    """(query, head) pairs that one key head of one sequence can have, a power of two."""
    return 1 << (problem.max_seqlen_q * problem.heads_q // problem.heads_kv - 1).bit_length()


def traits_of(problem: Any, config: Config) -> DecodeTraits:
    """The build that `config` means for `problem`."""
    head = width(problem)
    span = min(rows_of(problem), MOST_ROWS[head])
    part_rows = span * config["HEADS"]
    left, right = problem.window or (-1, -1)
    launch = LAUNCH_REGISTERS[config["PER_SM"]]
    numbers = max(1, part_rows * head // 128)  # of a part that a thread has
    return DecodeTraits(
        head=head,
        columns=problem.head_dim,
        heads=config["HEADS"],
        span=span,
        rows=max(part_rows, LEAST_ROWS),
        part_rows=part_rows,
        block_n=config["BLOCK_N"],
        stages=config["stages"],
        group=problem.heads_q // problem.heads_kv,
        page=problem.page_size,
        chunks=max(1, problem.target.sm_count * config["PER_SM"] * config["HEADS"] // problem.heads_kv),
        chunk=next((chunk for chunk in (1, 32, 128) if problem.batch <= chunk), 256),
        few=problem.batch <= 128,
        left=left >= 0,
        right=problem.causal or right >= 0,
        eight=bool(problem.kv_scale),
        small=bool(problem.kv_scale) and part_rows <= MOST_SMALL,
        int8=problem.kv_dtype == "int8",
        cap=problem.softcap != 0.0,
        sinks=problem.sinks,
        lse=problem.lse,
        at_once=max(1, min(32, (128 if numbers < 16 and config["PER_SM"] < 3 else 64) // numbers)),
        launch_registers=launch,
        producer_registers=PRODUCER_REGISTERS[config["PER_SM"]],
    )


def shared_memory(problem: Any, config: Config) -> int:
    """Bytes of dynamic shared memory of one program: keys and values, queries, probabilities, maxima, and at most 2 KiB
    of barriers, of what is passed to the roles, and of what they pass among their warps."""
    t = traits_of(problem, config)
    return 2 * t.stages * t.tile_bytes + t.rows * (ITEM * (t.head + t.block_n) + MAXIMA) + 2048


def registers(problem: Any, config: Config) -> int:
    """Of one program: a consumer warp group, and one more that holds the producer warp."""
    return 256 * traits_of(problem, config).launch_registers


TILES = {
    64: [(128, 3, 2, 1, 0), (128, 3, 2, 2, 0), (64, 6, 2, 1, 0), (64, 8, 1, 1, 0)],
    128: [(128, 3, 1, 1, 0), (64, 3, 2, 1, 0), (128, 3, 1, 2, 0), (64, 6, 1, 1, 0)],
    256: [(64, 3, 1, 1, 0), (64, 2, 1, 1, 0)],
}
QUANTISED_TILES = [(128, 3, 2, 1, 0), (128, 6, 1, 1, 0), (128, 3, 2, 2, 0), (64, 6, 2, 1, 0), (64, 4, 3, 1, 0)]


def configs(problem: Any) -> list[dict[str, Any]]:
    """The measured best first (see kernel.py)."""
    found = QUANTISED_TILES if problem.kv_scale else TILES[width(problem)]
    if problem.kv_scale and problem.batch == 1:  # no lengths that differ, which want more programs than one an SM
        found = sorted(found, key=lambda tile: tile[2])
    most, rows = 16 if problem.kv_scale else MOST_ROWS[width(problem)], rows_of(problem)
    # With more than 32 rows, blocks of 128 keys would not fit the registers.
    found = [tile for tile in found if tile[3] == 1 or (problem.heads_kv % tile[3] == 0 and rows * tile[3] <= most)]
    found = [tile for tile in found if tile[0] == 64 or rows * tile[3] <= 32]
    return [dict(zip(("BLOCK_N", "stages", "PER_SM", "HEADS", "AHEAD"), tile, strict=True)) for tile in found]


def design_of(config: Config) -> Design:
    return Design(
        warp_groups=1,
        pipeline_stages=config["stages"],
        warp_specialized=True,
        pipeline_tasks=2,
        tile=(config["BLOCK_N"], LEAST_ROWS),
        persistent=True,
        dsl="gluon",
    )


def rule(problem: Any, config: Config) -> Iterator[Reason]:
    """How many rows there can be, and what a config cannot be."""
    block_n = config["BLOCK_N"]
    most = MOST_ROWS[width(problem)]
    if (rows := rows_of(problem)) > most:
        group = problem.heads_q // problem.heads_kv
        allowed = f"at most {most // group} with {group} query heads a key head" if group <= most else "fewer heads"
        yield Reason("range", "max_seqlen_q", problem.max_seqlen_q, allowed + f": {rows} rows of a key head")
    for one in problem.operands[::3]:  # q, and out where it is given
        if (one.shape[1] - 1) * one.strides[1] >= 1 << 31:
            yield Reason("stride", "heads", one.strides[1], "heads within 2^31 elements", operand=one.name)
    if problem.kv_scale and width(problem) > QUANTISED_HEAD:
        yield Reason(
            "kv_dtype", "head_dim", problem.head_dim, f"at most {QUANTISED_HEAD} with keys and values of 8 bits"
        )
    if block_n not in (64, 128):
        yield Reason("config", "BLOCK_N", block_n, "64 or 128")
    if config["PER_SM"] not in LAUNCH_REGISTERS:
        yield Reason("config", "PER_SM", config["PER_SM"], "1, 2 or 3")
    if config["AHEAD"]:
        yield Reason("config", "AHEAD", config["AHEAD"], "0")
    if problem.heads_kv % config["HEADS"] or rows * config["HEADS"] > most >= rows:
        yield Reason("config", "HEADS", config["HEADS"], f"a divisor of {problem.heads_kv}, {most // rows} at most")
    room = SHARED // config["PER_SM"] - 1024
    if config["stages"] < 1 or shared_memory(problem, config) > room:
        yield Reason("config", "stages", config["stages"], f"at least 1, in {room} bytes of shared memory")
