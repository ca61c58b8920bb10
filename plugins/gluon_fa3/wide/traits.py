"""What shapes the machine code of one build of the wide kernel, and which configs exist. No import of Triton.

A config: {BLOCK_N, k_parts, k_slots, v_slots, q_panels, pingpong, schedule}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Design, Reason
from registry.plugins.gluon_fa3.traits import (
    CONSUMER_REGISTERS,
    MESSAGE_LIMIT,
    PANEL,
    PINGPONG,
    PRODUCER_REGISTERS,
    ROWS,
    SCHEDULES,
    UNLIMITED,
    mask_kind,
    two_powers,
    window_bounds,
)

GROUPS = 2  # consumer warp groups
WIDEST_O = 320  # columns of O that a warp group's registers hold
WIDEST_PART = 256  # columns of a product


@dataclass(frozen=True)
class WideTraits:
    """The constants of one compiled kernel. Those of the same name are what they are in ../traits.py."""

    dtype: str
    head: int  # columns of Q and K: what two powers of two make, whole panels; what the tensors lack reads as zero
    head_v: int  # columns of V and O that one tile has
    halves: int  # tiles beside each other: 2 where V has more columns than a tile
    block_n: int
    k_parts: int  # a block of K comes in so many parts, each in a slot of its own
    k_slots: int
    v_slots: int
    q_panels: int  # panels of Q that are in registers alone, its first ones
    pingpong: str
    schedule: str
    longest_first: bool
    mask: str
    score: str
    lse: bool
    skips: bool
    # What the parts of ../ ask about, and is always so here.
    rows: int = ROWS
    groups: int = GROUPS
    packed: bool = False
    shared_out: bool = False
    written: bool = False
    one_product: bool = False
    overlap: bool = False
    message_words: int = 1

    @property
    def block_m(self) -> int:
        return self.rows * self.groups

    @property
    def consumer_registers(self) -> int:
        return CONSUMER_REGISTERS[self.groups]

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS[self.groups]

    @property
    def dynamic(self) -> bool:
        return self.schedule != "static"

    @property
    def q_registers(self) -> int:
        """Columns of Q in registers alone, its first ones: a product of registers that follows others spills."""
        return PANEL * self.q_panels

    @property
    def k_widths(self) -> tuple[int, ...]:
        """Columns of each part of K: powers of two, and in the last what is left."""
        first = (self.k_part,) * (self.k_parts - 1)
        return (*first, self.head - sum(first))

    @property
    def k_part(self) -> int:
        """Of all but the last."""
        return 1 << ((self.head // self.k_parts).bit_length() - 1)

    @property
    def k_slot(self) -> int:
        """Columns of a slot."""
        return max(self.k_widths)

    @property
    def panels_in_slot(self) -> int:
        """Of Q, that a slot of K has room for."""
        return (1 << (self.k_slot.bit_length() - 1)) * self.block_n // (PANEL * ROWS)

    @property
    def q_parts(self) -> tuple[tuple[int, int], ...]:
        """Columns of Q in shared memory as (first, how many): at most 256, at a multiple of their number."""
        found, start = [], self.q_registers
        while start < self.head:
            most = start & -start or WIDEST_PART
            width = min(most, WIDEST_PART, 1 << ((self.head - start).bit_length() - 1))
            found.append((start, width))
            start += width
        return tuple(found)

    @property
    def o_place(self) -> int:
        """The part of Q through whose place O leaves: the widest."""
        widths = [width for _, width in self.q_parts]
        return widths.index(max(widths))

    @property
    def value_parts(self) -> tuple[tuple[int, int], ...]:
        """Columns of V and O in the same way."""
        return powers(self.head_v)

    @property
    def products(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """Those that make S: (part of K, its column, how many, part of Q in shared memory, its column), or for what is
        in registers -1 - panel instead of a part of Q. Each lies within one part of K, and in one matrix of it."""
        wanted = [(PANEL * i, PANEL, -1 - i, 0) for i in range(self.q_panels)]
        for i, (first, width) in enumerate(self.q_parts):
            step = min(width, self.k_part) if self.k_parts > 1 else width
            wanted += [(first + at, step, i, at) for at in range(0, width, step)]
        found, start = [], 0
        for part, width in enumerate(self.k_widths):
            inside = [one for one in wanted if start <= one[0] and sum(one[:2]) <= start + width]
            found += [(part, one[0] - start, *one[1:]) for one in inside]
            start += width
        return tuple(found)

    def products_after(self, part: int) -> int:
        """How many of them are issued behind those of a part of K."""
        return sum(one[0] > part for one in self.products)

    @property
    def shared_memory(self) -> int:
        """Bytes: the tiles, then barriers and what warp specialization passes to its partitions."""
        columns = self.k_slots * self.k_slot + self.v_slots * self.head_v
        return 2 * (self.block_m * (self.head - self.q_registers) + self.block_n * columns) + 1024


def powers(columns: int) -> tuple[tuple[int, int], ...]:
    """So many columns as (first, how many): powers of two, the largest first."""
    found, start = [], 0
    while start < columns:
        width = 1 << ((columns - start).bit_length() - 1)
        found.append((start, width))
        start += width
    return tuple(found)


def head_of(head_dim: int) -> int:
    """Columns of the tiles of Q and K."""
    return two_powers(-(-head_dim // PANEL) * PANEL)


def values_of(head_dim_v: int) -> tuple[int, int]:
    """(tiles beside each other, columns of each)."""
    halves = 2 if head_dim_v > WIDEST_O else 1
    return halves, -(-head_dim_v // (halves * PANEL)) * PANEL


def traits_of(problem: Any, config: Mapping[str, Any], *, score: str | None = None) -> WideTraits:
    """The build that `config` means for `problem`."""
    left, right = window_bounds(problem.causal, problem.window)
    block_n = config["BLOCK_N"]
    mask = mask_kind(problem.seqlen_q, problem.seqlen_k, left, right, block_n)
    mask = "shifted" if mask == "diagonal" and block_n < ROWS else mask
    halves, head_v = values_of(problem.head_dim_v)
    return WideTraits(
        dtype={"bfloat16": "bf16", "float16": "fp16"}[problem.dtype],
        head=head_of(problem.head_dim),
        head_v=head_v,
        halves=halves,
        block_n=block_n,
        k_parts=config["k_parts"],
        k_slots=config["k_slots"],
        v_slots=config["v_slots"],
        q_panels=config["q_panels"],
        pingpong=config["pingpong"],
        schedule=config["schedule"],
        longest_first=left >= UNLIMITED and right < UNLIMITED,
        mask=mask,
        score=score or ("softcap" if problem.softcap else "plain"),
        lse=problem.lse,
        skips=mask in ("diagonal", "shifted", "band"),
    )


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    return traits_of(problem, config).shared_memory


def launch_registers() -> int:
    """Per thread of the launch, until setmaxnreg."""
    return (GROUPS * CONSUMER_REGISTERS[GROUPS] + PRODUCER_REGISTERS[GROUPS]) // (GROUPS + 1)


def registers(problem: Any, config: Mapping[str, Any]) -> int:
    """Registers of one block: consumer warp groups, and one more that holds the producer warp."""
    return 128 * (GROUPS + 1) * launch_registers()


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets."""
    head, (_, head_v), block_n = head_of(problem.head_dim), values_of(problem.head_dim_v), config["BLOCK_N"]
    if block_n not in (32, 64):
        yield Reason("config", "BLOCK_N", block_n, "32 or 64")
    if config["pingpong"] not in PINGPONG:
        yield Reason("config", "pingpong", config["pingpong"], ", ".join(PINGPONG))
    if config["schedule"] not in SCHEDULES:
        yield Reason("config", "schedule", config["schedule"], ", ".join(SCHEDULES))
    if config["k_parts"] not in (1, 2, 4):
        yield Reason("config", "k_parts", config["k_parts"], "1, 2 or 4")
    if config["k_slots"] < config["k_parts"]:
        yield Reason("config", "k_slots", config["k_slots"], f">= {config['k_parts']}, a block's parts")
    if config["v_slots"] < 1:
        yield Reason("config", "v_slots", config["v_slots"], ">= 1")
    # They come through a slot of K; and O leaves through Q's place, 256 columns of it that are one matrix.
    most = traits_of(problem, config).panels_in_slot if head >= 2 * WIDEST_PART else 0
    if not 0 <= config["q_panels"] <= most:
        yield Reason("config", "q_panels", config["q_panels"], f"0 to {most}")
    if block_n // 4 * 3 + head_v // 2 + 16 * config["q_panels"] + 28 > CONSUMER_REGISTERS[GROUPS]:
        yield Reason("config", "BLOCK_N", block_n, "a smaller block: the accumulators would spill")
    row_blocks = -(-problem.seqlen_q // (ROWS * GROUPS))
    # The next tile is drawn when all of this one's values but the last block are on their way; the group that sees none
    # of the last blocks waits for that tile before it lets go of its own last values, and passes these after.
    t, passed = traits_of(problem, config), -(-ROWS * (GROUPS - 1) // block_n)
    drawn = t.dynamic and row_blocks * problem.batch * problem.heads_q * t.halves > (problem.target.sm_count or 0)
    if drawn and t.mask == "band" and min(t.v_slots, t.k_slots // t.k_parts) < passed:
        yield Reason("config", "v_slots", (t.v_slots, t.k_slots), f">= {passed} blocks of V and of K under a window")
    most = max(problem.batch, 2 * problem.heads_q, row_blocks)
    if most >= MESSAGE_LIMIT:
        yield Reason("range", "batch", most, f"< {MESSAGE_LIMIT}")


def design_of(config: Mapping[str, Any]) -> Design:
    return Design(
        warp_groups=GROUPS,
        pipeline_stages=config["v_slots"],
        warp_specialized=True,
        pipeline_tasks=GROUPS + 1,
        tile=(ROWS * GROUPS, config["BLOCK_N"]),
        persistent=True,
        dsl="gluon",
    )


def config_of(block_n: int, k_parts: int, k_slots: int, v_slots: int, q_panels: int, pingpong: str) -> dict[str, Any]:
    return {
        "BLOCK_N": block_n,
        "k_parts": k_parts,
        "k_slots": k_slots,
        "v_slots": v_slots,
        "q_panels": q_panels,
        "pingpong": pingpong,
        "schedule": "dynamic",
    }


def configs(problem: Any) -> list[dict[str, Any]]:
    """The default, then what is worth searching; what else was tried is in kernel.py."""
    head = head_of(problem.head_dim)
    if head <= 320:
        made = [(32, 1, 3, 3, 0, "off"), (32, 1, 3, 3, 0, "pair")]
    elif head <= 384:
        made = [(64, 1, 2, 1, 0, "off"), (64, 2, 3, 1, 0, "off"), (32, 1, 3, 3, 0, "qk")]
    elif head <= 512:
        made = [(64, 2, 3, 1, 2, "off"), (64, 4, 6, 1, 2, "off"), (32, 1, 3, 3, 3, "qk")]
    else:
        made = [(32, 1, 2, 3, 3, "qk"), (32, 1, 2, 3, 3, "off"), (32, 1, 3, 1, 3, "off")]
    return [config_of(*one) for one in made]
