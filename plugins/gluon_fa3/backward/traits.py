"""What shapes the machine code of one build of the backward: tiles, masks, options. No import of Triton.

A config is the searchable part: {method, BLOCK_M, BLOCK_N, stages, order}. The methods:

sums    one kernel for all gradients, dQ added up in memory, in any order or in a fixed one (the same bits every time)
sweeps  a kernel for each gradient, for head dims beyond 128: always in a fixed order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Reason
from registry.plugins.gluon_fa3.backward.sections import ask_memory, unlike
from registry.plugins.gluon_fa3.traits import UNLIMITED, padded, window_bounds

GROUPS = 2  # matrix warp groups
KEYS = 64  # key rows of a group: the M of one wgmma
TERM_COLUMNS = 16  # that a product takes at once: three terms of LSE, three of delta, zeroes
GROUP_REGISTERS = 240  # per thread
HELPER_REGISTERS = 24  # of the producer and of the senders
ORDERS = ("any", "fixed")  # in which the tiles of a head add to dQ
FEW_STEPS = 16
# What a tile in parts costs, in steps, as of packed sequences (varlen/backward.py). Of 146 gradients of grouped heads
# with fewer tiles than SMs the number of parts that this picks takes 1.0% longer than the best of 1, 2 and 4, at most
# 25%; rounds of tiles alone, without these costs, 5.8%, at most 102% (backward_parts.json). All divisions over 1, 2 and
# 4, an H200, 28 shapes (shared_keys.json): 71 heads to a key head 0.32 of the time (0.21 to 0.82), 7 0.82 (0.41 to
# 1.01), 5 0.82 (0.60 to 1.01), 8 0.96.
TILE_STEPS = 4  # a part's begin and end
SUMS_STEPS = 12  # at 128 columns: for dK and dV to be zeroed, added up and read again
MEMORY = 1.2  # times as long, where queries come from memory (sections.py)
LAUNCH_REGISTERS = 168  # per thread of the launch: 504 of an SM's 512, over three warp groups


_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class SumsTraits:
    """The constants of the kernel of all gradients."""

    dtype: str  # "bf16" or "fp16"
    head: int  # columns of the Q and K tiles: 64 or 128; what the tensors lack reads as zero
    head_v: int  # columns of the V and dO tiles
    block_m: int  # query rows of a step
    block_n: int  # keys of a tile
    stages: int  # Q tiles in flight, with the terms of their rows
    do_stages: int  # dO tiles in flight
    mask: str  # "none", "from" (a key's first query; also keys past the end), "band" (its last one too)
    softcap: bool
    drawn: bool  # a block an SM draws one tile after the other; else a block a tile
    ordered: bool  # tiles add to dQ one after the other, from the first keys to the last
    of_queries: bool = False  # whether the rows of a tile are queries
    parts: int = 1  # blocks of a tile, which add to dK and dV in memory
    packed: bool = False  # sequences end to end, of lengths that the device knows: varlen/

    @property
    def folded(self) -> bool:
        """LSE and delta come in by the matrix products; a cap bends the scores before LSE may be taken off."""
        return not self.softcap

    @property
    def stats_bytes(self) -> int:
        """Of one step."""
        return self.block_m * (2 * TERM_COLUMNS if self.folded else 8)

    @property
    def dq_rows(self) -> bool:
        """Each group computes dQ of half of a step's rows; else of half of the columns."""
        return self.block_m == 2 * KEYS

    @property
    def dq_columns(self) -> int:
        """Columns of a group's part of dQ, which has 64 rows."""
        return self.head if self.dq_rows else self.head // GROUPS

    @property
    def handed_shape(self) -> list[int]:
        """Halves of a tile that a group hands over: its part of dQ in float32, or its rows of dK or dV."""
        widest = max(self.head, self.head_v)
        return [max(2 * KEYS * self.dq_columns // widest, KEYS), widest]

    @property
    def shared_memory(self) -> int:
        """Bytes: the tiles, then barriers and what warp specialization passes to its partitions (at most 1 KiB)."""
        rows, columns = self.handed_shape
        halves = self.block_n * (self.head + self.head_v) + GROUPS * rows * columns
        halves += self.block_m * (self.stages * self.head + self.do_stages * self.head_v)
        halves += 2 * self.block_n * self.block_m  # dS
        return 2 * halves + self.stages * self.stats_bytes + 1024


@dataclass(frozen=True)
class SweepTraits:
    """The constants of the kernel of one gradient."""

    dtype: str
    gradient: str  # "dq", "dk" or "dv"
    head: int
    head_v: int
    mask: str
    softcap: bool
    stages: int  # blocks of U in flight
    block: int = KEYS  # rows of the other side that meet a tile at once
    rows: int = GROUPS * KEYS  # of a tile
    parts: int = 1  # a sweep is never divided
    packed: bool = False  # as above
    follows: bool = True  # what the launch before leaves; else it may run beside that one

    @property
    def of_queries(self) -> bool:
        return self.gradient == "dq"

    @property
    def x_columns(self) -> int:
        """Of Q and K."""
        return self.head

    @property
    def w_columns(self) -> int:
        """Of V and dO."""
        return self.head_v

    @property
    def out_columns(self) -> int:
        return self.head_v if self.gradient == "dv" else self.head

    @property
    def tile_columns(self) -> int:
        """Of X's tile, through which the gradient leaves."""
        return max(self.x_columns, self.out_columns)

    @property
    def w_stages(self) -> int:
        """Where X, Y and two blocks of U fill the shared memory, one."""
        return 1 if self.head + self.head_v > 384 and self.gradient != "dv" else 2

    @property
    def shared_memory(self) -> int:
        """Bytes: the tiles, then barriers and what warp specialization passes to its partitions (at most 1 KiB)."""
        halves = self.rows * (self.tile_columns + (0 if self.gradient == "dv" else self.w_columns))
        halves += self.block * (self.stages * self.x_columns + self.w_stages * self.w_columns)
        return 2 * halves + 4 * self.stages * 2 * self.block + 1024


def traits_of(problem: Any, config: Mapping[str, Any]) -> SumsTraits:
    """The main kernel that `config` means for `problem`."""
    mask = mask_kind(problem, config["BLOCK_N"])
    if config["BLOCK_M"] == 2 * KEYS and mask == "none":
        mask = "from"  # never taken; without that branch ptxas mixes what is before and after it, and spills
    steps = problem.seqlen_q * problem.heads_q // problem.heads_kv / config["BLOCK_M"]
    return sums_with(problem, config, mask=mask, parts=parts_of(problem, config), drawn=draws(problem, steps))


def divisions(problem: Any, ordered: bool) -> list[int]:
    """In how many parts a tile can go. dV leaves in two halves at most; in a fixed order two parts at most add to a
    sum, for a + b is b + a."""
    if padded(problem.head_dim_v) > padded(problem.head_dim):
        return [1]
    group = problem.heads_q // problem.heads_kv
    return [parts for parts in range(1, (min(group, 2) if ordered else group) + 1) if group % parts == 0]


def parts_of(problem: Any, config: Mapping[str, Any]) -> int:
    """Blocks for a tile: each takes a part of the query heads that share its keys, where tiles are too few for all SMs
    to be busy alike, or would ask memory for queries (sections.py). The fewest of those that take least, in steps. All
    SMs are done when the work is, if it can be shared, and not before the longest tile: rounds of them where all are
    alike, one where a bound cuts. What parts add up to passes through memory."""
    group, sms = problem.heads_q // problem.heads_kv, max(problem.target.sm_count, 1)
    ordered = config["order"] == "fixed"
    choices = divisions(problem, ordered)
    if len(choices) == 1:
        return 1
    key_blocks = -(-problem.seqlen_k // config["BLOCK_N"])
    tiles, steps = problem.batch * problem.heads_kv * key_blocks, -(-problem.seqlen_q // config["BLOCK_M"]) * group
    alike = not unlike(problem) or key_blocks == 1
    share = 1.0 if alike else (1 + 1 / key_blocks) / 2
    sums = SUMS_STEPS * max(padded(problem.head_dim), padded(problem.head_dim_v)) / 128 * tiles / sms
    times = {}
    for parts in choices:
        rounds = -(-tiles * parts // sms) if alike else 1
        shared = tiles * (share * steps + TILE_STEPS * parts) / sms
        heads, queries = problem.batch * problem.heads_kv * parts, problem.seqlen_q * group // parts
        if not ordered and ask_memory(problem, heads, key_blocks, queries):
            shared *= MEMORY
        times[parts] = max(shared, rounds * (steps / parts + TILE_STEPS)) + (sums if parts > 1 else 0.0)
    return min(choices, key=lambda parts: times[parts])


def draws(problem: Any, steps: float) -> bool:
    """Whether a block of an SM draws tiles, of `steps` steps where no mask cuts: the next one's loads then hide behind
    this one's end. At 128 columns that steady loop is slower (kernel.py), with a cap it spills."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    return not problem.softcap and (wide == 64 or steps <= FEW_STEPS)


def sums_with(problem: Any, config: Mapping[str, Any], **known: Any) -> SumsTraits:
    """The same, for a mask and a division of the work that are known."""
    return SumsTraits(
        dtype=_DTYPES[problem.dtype],
        head=padded(problem.head_dim),
        head_v=padded(problem.head_dim_v),
        block_m=config["BLOCK_M"],
        block_n=config["BLOCK_N"],
        stages=config["stages"],
        do_stages=2,
        softcap=bool(problem.softcap),
        ordered=config["order"] == "fixed",
        **known,
    )


def sweeps_of(problem: Any, config: Mapping[str, Any]) -> list[SweepTraits]:
    """The kernels of the three gradients."""
    return sweeps_with(problem, config, mask=mask_kind(problem, KEYS))


def sweeps_with(problem: Any, config: Mapping[str, Any], **known: Any) -> list[SweepTraits]:
    """The same, for a mask that is known."""
    head, head_v = padded(problem.head_dim), padded(problem.head_dim_v)
    return [
        SweepTraits(
            dtype=_DTYPES[problem.dtype],
            gradient=gradient,
            head=head,
            head_v=head_v,
            softcap=bool(problem.softcap),
            stages=3 if gradient == "dv" else config["stages"],
            **known,
        )
        for gradient in ("dq", "dk", "dv")
    ]


def mask_kind(problem: Any, block_n: int) -> str:
    """Queries past the end need no mask: their LSE is +inf."""
    left, right = window_bounds(problem.causal, problem.window)
    if left < UNLIMITED:
        return "band"
    return "from" if right < UNLIMITED or problem.seqlen_k % block_n else "none"


def _block_m(problem: Any) -> int:
    """Query rows of a step: what a thread's 64 scores leave no registers for is a wide head, or a cap's tanh."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    return 2 * KEYS if wide == 64 and not problem.softcap else KEYS


def _stages(problem: Any) -> tuple[int, ...]:
    """Q tiles in flight, the better number first. A cap's loads of LSE and delta for a third one spill."""
    return (2,) if problem.softcap else (3, 2)


def configs(problem: Any) -> list[dict[str, Any]]:
    """The default, then what is worth searching."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    tile = {"BLOCK_M": _block_m(problem), "BLOCK_N": GROUPS * KEYS}
    if wide == 256:
        return [{"method": "sweeps", **tile, "stages": 2, "order": "fixed"}]
    return [
        {"method": "sums", **tile, "stages": stages, "order": order} for order in ORDERS for stages in _stages(problem)
    ]


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    if config["method"] == "sweeps":
        return max(t.shared_memory for t in sweeps_of(problem, config))
    return traits_of(problem, config).shared_memory


def registers(problem: Any, config: Mapping[str, Any]) -> int:
    """Registers of one block: two matrix warp groups, and a third that holds producer and senders."""
    return 128 * (GROUPS + 1) * LAUNCH_REGISTERS


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    methods = ("sums",) if wide <= 128 else ("sweeps",)
    method = config.get("method")
    allowed: dict[str, tuple[Any, ...]] = {
        "method": methods,
        "BLOCK_M": tuple(sorted({KEYS, _block_m(problem)})),
        "BLOCK_N": (GROUPS * KEYS,),
        "stages": tuple(sorted(_stages(problem))) if method == "sums" else (2,),
        "order": ("fixed",) if problem.deterministic or method == "sweeps" else ORDERS,
    }
    for name, values in allowed.items():
        if config.get(name) not in values:
            yield Reason("config", name, config.get(name), ", ".join(map(str, values)))
