"""What shapes the machine code of one build: tiles, roles, masks, schedule. No import of Triton: legality needs none.

A config is the searchable part: {BLOCK_N, consumers, stages, pingpong, q_columns, schedule, rescale, overlap}, and in
some written, one_product, heads and shared_out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Reason

PANEL = 64  # columns of a tensor map's box: 128 bytes, a swizzle's span
ROWS = 64  # query rows of one consumer warp group: the M of one wgmma
PINGPONG = ("off", "pair", "qk")  # hand over to the next group never, after QK(i) and PV(i-1), or after QK(i)
RESCALES = ("before_pv", "after_pv")
SCHEDULES = ("static", "dynamic", "dynamic_early")
CONSUMER_REGISTERS = {1: 232, 2: 240, 3: 160}  # per thread, by the number of consumer warp groups
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}
PAGING_REGISTERS = 16  # more for a producer that looks up pages, of what one or two consumers have
TIERS = (64, 96, 128, 192, 256)  # head dims up to each share their configs
MESSAGE_LIMIT = 1 << 21  # of batch, heads and row blocks: see schedule.FIELD
ROWS_LIMIT = 1 << 30  # of packed sequences: see places.py
SHARE_BITS = 16  # of a word that says which share of a tile's keys is whose, and behind them how many there are
PADDING = 4  # columns of a part behind its values, so that rows are multiples of 16 bytes: varlen/parts.py
UNLIMITED = 1 << 29  # a window side without a limit, far beyond any length and far from overflow


@dataclass(frozen=True)
class Traits:
    """The constants of one compiled kernel."""

    dtype: str  # "bf16" or "fp16"
    head: int  # columns of the Q and K tiles, whole panels; what the tensors lack reads as zero
    head_v: int  # columns of the V and O tiles
    head_columns: int  # columns of Q and K that can be nonzero, rounded up to 16
    values: int  # columns of V and O that can be nonzero, rounded up to what two products make
    block_n: int  # keys per block
    groups: int  # consumer warp groups
    stages: int  # K blocks, and V blocks, in flight
    pingpong: str
    q_columns: int  # leading columns of Q that stay in registers
    schedule: str
    rescale: str  # when O is multiplied by alpha: "before_pv" of the next block is issued, or "after_pv" of this one
    overlap: bool  # a tile's last PV runs beside the next tile's first QK and softmax; takes a second Q tile per group
    longest_first: bool
    mask: (
        str  # "none", "tail" (keys past the end), "diagonal" (one masked block), "shifted" (up to three), "band" (any)
    )
    score: str  # "plain", "softcap", or "scaled" (a scale <= 0 must be applied before the maximum is taken)
    lse: bool
    skips: bool  # a group of a tile may not see the highest blocks that another group sees, and passes them
    packed: bool = False  # sequences end to end, of lengths that the device knows: varlen/
    page: int = 0  # keys of a page, where keys lie on pages: pages.py
    heads: int = 1  # that share keys, side by side in a tile: of each the same few rows, one head below the other
    group: int = 1  # of all that share keys, where several lie side by side
    shared_out: bool = False  # a tile's keys among several, each of which leaves a part: varlen/parts.py
    sinks: bool = False  # a logit a head in a row's sum; where keys are shared out, what adds the parts up adds it
    written: bool = False  # K and V lie at a known place, and waits for them are written out: tiles.py
    one_product: bool = False  # so are products of columns of O that are no power of two: one_product.py

    @property
    def rows(self) -> int:
        """Queries of a sequence that a group has, each with all heads that lie side by side."""
        return ROWS // self.heads

    @property
    def block_m(self) -> int:
        """The same of a tile."""
        return self.rows * self.groups

    @property
    def sets(self) -> int:
        """Tiles that the heads which share keys take; the last may have some twice, of which one is kept."""
        return -(-self.group // self.heads)

    @property
    def box_heads(self) -> int:
        """Heads that one copy of queries brings, or of O takes."""
        return math.gcd(self.heads, self.group)

    @property
    def q_boxes(self) -> int:
        """Copies of one panel of a group's queries."""
        return self.heads // self.box_heads

    @property
    def box(self) -> int:
        """Keys that one copy brings: of one page."""
        return math.gcd(self.block_n, self.page)

    @property
    def boxes(self) -> int:
        """Copies of one panel of a block."""
        return self.block_n // self.box

    @property
    def o_columns(self) -> int:
        """O leaves through a tile of so many columns, in one step or two, where a full one would not fit."""
        return 64 if self.head_v == 64 or (self.head == 192 and self.block_n == 128) else 128

    @property
    def message_words(self) -> int:
        """Words of 64 bits in which the producer tells the consumers of a tile."""
        return 4 if self.packed else 1

    def head_parts(self, start: int) -> tuple[tuple[int, int], ...]:
        """Columns of Q and K from `start` on as (first, how many): powers of two, each at a multiple of its width."""
        found = []
        while start < self.head_columns:
            width = min(start & -start or 256, 1 << ((self.head_columns - start).bit_length() - 1))
            found.append((start, width))
            start += width
        return tuple(found)

    @property
    def value_parts(self) -> tuple[tuple[int, int], ...]:
        """Columns of V and O in the same way."""
        first = 1 << (self.values.bit_length() - 1)
        return ((0, first), (first, self.values - first)) if self.values > first else ((0, first),)

    @property
    def wide(self) -> int:
        return max(self.head, self.head_v)

    @property
    def consumer_registers(self) -> int:
        """Per thread. A single consumer group gets what the launch gives to two warp groups, less the producer's."""
        if self.groups == 1 and self.wide > 128:
            return 256
        return CONSUMER_REGISTERS[self.groups] - self.paging_registers // self.groups

    @property
    def launch_registers(self) -> int:
        return launch_registers(self.groups, self.wide)

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS[self.groups] + self.paging_registers

    @property
    def paging_registers(self) -> int:
        return PAGING_REGISTERS if self.groups < 3 and self.page else 0

    @property
    def q_slots(self) -> int:
        return 2 if self.overlap else 1

    @property
    def shared_memory(self) -> int:
        """Bytes: the tiles, then barriers and what warp specialization passes to its partitions (at most 1 KiB)."""
        tiles = ROWS * self.groups * (self.q_slots * self.head + (0 if self.shared_out else self.o_columns))
        tiles += self.stages * self.block_n * (self.head + self.head_v)
        return 2 * tiles + (2048 if self.written else 1024)

    @property
    def blocks_per_sm(self) -> int:
        """One consumer group takes half of the registers; where two blocks' tiles fit too, two share an SM."""
        return 2 if self.groups == 1 and self.wide <= 128 and 2 * self.shared_memory <= 226 << 10 else 1

    @property
    def dynamic(self) -> bool:
        return self.schedule != "static"


def launch_registers(groups: int, wide: int) -> int:
    """Per thread of the launch: consumers' and producer's warp groups share evenly until setmaxnreg."""
    if groups > 1:
        return (groups * CONSUMER_REGISTERS[groups] + PRODUCER_REGISTERS[groups]) // (groups + 1)
    return 168 if wide > 128 else 128


def padded(head_dim: int) -> int:
    """The tile width that holds `head_dim` columns."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def tier(problem: Any) -> int:
    """The family of configs that a problem belongs to, by the wider of its head dims."""
    wide = max(problem.head_dim, problem.head_dim_v)
    for most in TIERS:
        if wide <= most:
            return most
    raise ValueError(f"no config for {wide} columns of a head")


def two_powers(head_dim: int) -> int:
    """The fewest columns that hold `head_dim`: at least 64, and one power of two from 16 or the sum of two."""
    columns = max(-(-head_dim // 16) * 16, 64)
    while columns.bit_count() > 2:
        columns += columns & -columns
    return columns


def mask_kind(seqlen_q: int, seqlen_k: int, left: int, right: int, block_n: int) -> str:
    """The cheapest mask that is right. `left` and `right` bound the window, UNLIMITED where there is no bound.

    "diagonal": with right == 0 and (Sk - Sq) % 64 == 0, the last visible keys of a group's 64 rows lie in one block,
    and valid rows never reach a key past the end, so only the first block that a group visits needs the mask.
    """
    if left >= UNLIMITED and right >= UNLIMITED:
        return "tail" if seqlen_k % block_n else "none"
    if left >= UNLIMITED and right == 0 and (seqlen_k - seqlen_q) % ROWS == 0:
        return "diagonal"
    return "band"


def may_skip(mask: str, groups: int, block_n: int, shift: int = 0) -> bool:
    """See Traits.skips; `shift` is by how many keys the diagonal lies to the right. Such tiles cannot overlap: the
    skipped V blocks would wait for the slot of the last one."""
    if mask == "diagonal":
        return ROWS * groups > block_n or groups == 3 or (groups > 1 and shift % block_n != 0)
    return mask in ("band", "shifted")


def window_bounds(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) with UNLIMITED for no bound."""
    left, right = window if window is not None else (-1, -1)
    left = UNLIMITED if left < 0 else min(left, UNLIMITED)
    right = 0 if causal else UNLIMITED if right < 0 else min(right, UNLIMITED)
    return left, right


def traits_of(problem: Any, config: Mapping[str, Any], *, score: str | None = None) -> Traits:
    """The build that `config` means for `problem`."""
    left, right = window_bounds(problem.causal, problem.window)
    mask = mask_kind(problem.seqlen_q, problem.seqlen_k, left, right, config["BLOCK_N"])
    skips = may_skip(mask, config["consumers"], config["BLOCK_N"], problem.seqlen_k - problem.seqlen_q)
    known = {"skips": skips, "overlap": config["overlap"] and not skips}
    triangular = left >= UNLIMITED and right < UNLIMITED
    return traits_with(problem, config, mask=mask, longest_first=triangular, score=score, **known)


def traits_with(problem: Any, config: Mapping[str, Any], *, score: str | None, **known: Any) -> Traits:
    """The same, for a mask that is known."""
    return Traits(
        dtype={"bfloat16": "bf16", "float16": "fp16"}[problem.dtype],
        head=-(-problem.head_dim // PANEL) * PANEL,
        head_v=-(-problem.head_dim_v // PANEL) * PANEL,
        head_columns=max(-(-problem.head_dim // 16) * 16, 64),
        values=two_powers(problem.head_dim_v),
        block_n=config["BLOCK_N"],
        groups=config["consumers"],
        stages=config["stages"],
        pingpong=config["pingpong"],
        q_columns=config["q_columns"],
        schedule=config["schedule"],
        rescale=config["rescale"],
        score=score or ("softcap" if problem.softcap else "plain"),
        lse=problem.lse,
        written=config.get("written", False),
        one_product=config.get("one_product", False),
        **known,
    )


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    return traits_of(problem, config).shared_memory


def registers(problem: Any, config: Mapping[str, Any]) -> int:
    """Registers of one block: consumer warp groups, and one more that holds the producer warp."""
    groups, wide = config["consumers"], max(problem.head_dim, problem.head_dim_v)
    return 128 * (groups + 1) * launch_registers(groups, -(-wide // PANEL) * PANEL)


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets, and what a message of the dense schedule cannot say."""
    yield from config_rule(problem, config)
    row_blocks = -(-problem.seqlen_q // (ROWS * max(config["consumers"], 1)))
    if max(problem.batch, problem.heads_q, row_blocks) >= MESSAGE_LIMIT:
        yield Reason("range", "batch", max(problem.batch, problem.heads_q, row_blocks), f"< {MESSAGE_LIMIT}")


def config_rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets."""
    groups, block_n = config["consumers"], config["BLOCK_N"]
    if groups not in CONSUMER_REGISTERS:
        yield Reason("config", "consumers", groups, "1, 2 or 3")
    if config["pingpong"] not in PINGPONG or (groups == 1 and config["pingpong"] != "off"):
        yield Reason("config", "pingpong", config["pingpong"], "off" if groups == 1 else ", ".join(PINGPONG))
    if config["schedule"] not in SCHEDULES:
        yield Reason("config", "schedule", config["schedule"], ", ".join(SCHEDULES))
    if config["rescale"] not in RESCALES:
        yield Reason("config", "rescale", config["rescale"], ", ".join(RESCALES))
    yield from written_rule(problem, config)
    # Accumulators of S and O, and P, must fit beside the addressing in a consumer's registers.
    values = two_powers(problem.head_dim_v)
    need = block_n // 2 + block_n // 4 + values // 2 + (8 if values.bit_count() > 1 else 0)
    need += 24 + (16 if problem.softcap or problem.window else 0)
    if need > CONSUMER_REGISTERS.get(groups, 240):
        yield Reason("config", "BLOCK_N", block_n, "a smaller block: the accumulators would spill")
    columns = -(-problem.head_dim // PANEL) * PANEL
    in_registers = [0, 64] + [128] * (columns >= 128) + [256] * (columns == 256)
    if config["q_columns"] not in in_registers:
        yield Reason("config", "q_columns", config["q_columns"], " or ".join(map(str, in_registers)))
    if block_n not in (64, 128):
        yield Reason("config", "BLOCK_N", block_n, "64 or 128")
    # A block is waited for before the one before it is let go of. And some of a tile's end are passed by its last group
    # once it knows the next tile: see wide/traits.py.
    if config["stages"] < 2 or (groups - 1) * ROWS > config["stages"] * block_n:
        yield Reason("config", "stages", config["stages"], f">= {max(-(-(groups - 1) * ROWS // block_n), 2)}")


def written_rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What holds for K and V at a known place: V's tiles lie at multiples of what is one matrix of them."""
    k, v = (1 << (-(-d // PANEL)).bit_length() - 1 for d in (problem.head_dim, problem.head_dim_v))
    if config.get("written") and config["stages"] * k % v:
        yield Reason("config", "written", True, "False with so much wider values")
    if config.get("written") and problem.target.triton.startswith("3.8."):  # see PARTS_HAVE_VIEWS in toolbox/hopper.py
        yield Reason("config", "written", True, "False with Triton 3.8, which has no view of a part of a tile")
    parts, panels = two_powers(problem.head_dim_v).bit_count(), -(-problem.head_dim_v // PANEL)
    if config.get("one_product") and not (config.get("written") and parts > 1 and panels.bit_count() == 1):
        yield Reason("config", "one_product", True, "False: one product as it is, or V does not lie as one matrix")
