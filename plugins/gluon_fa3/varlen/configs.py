"""What shapes a build of the packed kernel, and which configs exist for a problem, the best first.

A config is gluon_fa3's. With `overlap` all groups of a tile visit the same key blocks, wholly masked ones too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Reason
from registry.plugins.gluon_fa3.configs import config_of
from registry.plugins.gluon_fa3.traits import (
    ROWS,
    ROWS_LIMIT,
    UNLIMITED,
    Traits,
    config_rule,
    may_skip,
    tier,
    traits_with,
    window_bounds,
)

LEAST_BLOCKS = 4  # of keys in a share
MOST_SHARES = 128  # of a row block's keys
MOST_MORE = 3  # times as many as SMs work on at once, of row blocks that sharing adds
BESIDE = {1: 2.0, 2: 3.0}  # blocks of keys in the time that a tile takes besides its own, by consumer groups
MOST_WAVES, MOST_WAVES_UNLIKE = 2, 8  # of tiles on the SMs: a last one that is not full; a sequence among short ones
LONG = 4  # times the mean, from where on a packed sequence is far longer than others
FEW, FAR = 8, 32  # with so few queries others may have so many times fewer keys than the longest, for all that is known
HEADS_LIMIT = 8  # side by side: a tile's rows are eight at least, a swizzle's
THREE_GROUPS_FROM = 8192  # masked rows of a sequence at head dim 64, in the mean: 0.98 of two groups at 4k, 1.06 at 16k


def mask_kind(left: int, right: int) -> str:
    """The cheapest mask that is right whatever the lengths."""
    if left >= UNLIMITED and right >= UNLIMITED:
        return "tail"
    return "shifted" if left >= UNLIMITED and right == 0 else "band"


def traits_of(problem: Any, config: Mapping[str, Any], *, score: str | None = None) -> Traits:
    """The build that `config` means for `problem`."""
    mask = mask_kind(*window_bounds(problem.causal, problem.window))
    skips = may_skip(mask, config["consumers"], config["BLOCK_N"]) and not config["overlap"]
    known = {"skips": skips, "overlap": config["overlap"], "longest_first": True, "packed": True}
    known |= {"page": problem.page_size}
    if config.get("shared_out"):
        known["shared_out"] = True
    elif problem.sinks:
        known["sinks"] = True
    if (heads := config.get("heads", 1)) > 1:
        known |= {"heads": heads, "group": problem.heads_q // problem.heads_kv}
    return traits_with(problem, config, mask=mask, score=score, **known)


def shared_memory(problem: Any, config: Mapping[str, Any]) -> int:
    """Bytes of dynamic shared memory of one block."""
    return traits_of(problem, config).shared_memory


def registers(problem: Any, config: Mapping[str, Any]) -> int:
    """Registers of one block."""
    t = traits_of(problem, config)
    return 128 * (t.groups + 1) * t.launch_registers


def rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets, and what a tensor map cannot count."""
    yield from listed_rule(problem, config)
    yield from rows_rule(problem)


def sequences(problem: Any) -> list[tuple[float, float, float]]:
    """(how many, queries, keys) of the longest sequence, and of the others."""
    others = problem.batch - 1
    longest = (1, problem.max_seqlen_q, problem.max_seqlen_k)
    if others < 1:
        return [longest]
    queries = max(problem.total_q - problem.max_seqlen_q, 0) / others
    if problem.kv_layout == "packed":
        keys = max(problem.total_k - problem.max_seqlen_k, 0) / others
    elif problem.max_seqlen_q <= FEW:  # who waits for one that is far longer loses most
        keys = problem.max_seqlen_k / FAR
    else:
        keys = problem.max_seqlen_k * min(queries / problem.max_seqlen_q, 1.0)
    return [longest, (others, queries, keys)]


def sets_of(problem: Any, t: Traits) -> int:
    """Tiles of the same rows that the heads which share keys take."""
    return t.sets if t.heads > 1 else problem.heads_q // problem.heads_kv


def places_of(problem: Any, t: Traits) -> int:
    """Row blocks, of all heads, that SMs work on at once."""
    return max(problem.target.sm_count * t.blocks_per_sm // (problem.heads_kv * sets_of(problem, t)), 1)


def may_help(problem: Any, t: Traits) -> bool:
    """Whether sharing keys out can fill SMs: tiles are few, or a sequence may be far longer than others."""
    left, _ = window_bounds(problem.causal, problem.window)
    seen = min(problem.max_seqlen_k, left + problem.max_seqlen_q)
    places = places_of(problem, t)
    if seen < 2 * LEAST_BLOCKS * t.block_n or -(-problem.max_seqlen_q // t.block_m) > MOST_WAVES * places:
        return False
    mean = -(-problem.total_q // (max(problem.batch, 1) * t.block_m)) * problem.batch
    alike = problem.batch < 2 or (problem.kv_layout == "packed" and seen < LONG * problem.total_k // problem.batch)
    return bool(mean <= (MOST_WAVES if alike else MOST_WAVES_UNLIKE) * places)


def listed_rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """What a config cannot be, beyond its budgets."""
    yield from config_rule(problem, config)
    most = most_heads(problem)
    if config.get("heads", 1) not in [1 << i for i in range(most.bit_length())]:
        yield Reason("config", "heads", config["heads"], f"a power of two up to {most}")


def most_heads(problem: Any) -> int:
    """That may lie side by side: a power of two, which holds all that share keys, or as many as there is room for."""
    group = problem.heads_q // problem.heads_kv
    return min(1 << (group - 1).bit_length(), HEADS_LIMIT)


def rows_rule(problem: Any) -> Iterator[Reason]:
    """More rows than a tensor map counts."""
    for name in ("total_q", "total_k"):
        if getattr(problem, name) >= ROWS_LIMIT:
            yield Reason("range", name, getattr(problem, name), f"< {ROWS_LIMIT}")


def cached_rule(problem: Any, config: Mapping[str, Any]) -> Iterator[Reason]:
    """The same where keys lie in a cache or on pages, of which one tensor map has the rows of all."""
    yield from listed_rule(problem, config)
    if problem.total_q >= ROWS_LIMIT:
        yield Reason("range", "total_q", problem.total_q, f"< {ROWS_LIMIT}")
    apart = {fact.name: outer_rows(fact) for fact in problem.operands if fact.name in ("k", "v")}
    of = "pages" if problem.page_size else "sequences"
    if None in apart.values() or len(set(apart.values())) > 1:
        shown = ", ".join(f"{fact.name} {tuple(fact.strides)}" for fact in problem.operands if fact.name in apart)
        yield Reason("alignment", "strides", shown, f"{of} that are as many whole rows apart in k as in v")
        return
    for fact in problem.operands:
        if fact.name in apart and fact.shape[0] * apart[fact.name] >= ROWS_LIMIT:
            yield Reason("range", f"rows of {fact.name}", fact.shape[0] * apart[fact.name], f"< {ROWS_LIMIT}")


def row_stride(operand: Any) -> int:
    """Elements from one row to the next, of packed rows, of a cache or of pages; where each has one, to the next of
    those."""
    steps = zip(operand.shape[-3::-1], operand.strides[-3::-1], strict=True)
    return next((stride for size, stride in steps if size > 1), -(-operand.shape[-1] // 8) * 8)


def outer_rows(operand: Any) -> int | None:
    """Rows from one page, or sequence of a cache, to the next; None where it is no whole number of them."""
    outer, rows = operand.shape[:2]
    if outer == 1:
        return int(rows)
    row = row_stride(operand)
    return None if row == 0 or operand.strides[0] % row else operand.strides[0] // row


def configs(problem: Any) -> list[dict[str, Any]]:
    """The default, then what is worth searching."""
    left, right = window_bounds(problem.causal, problem.window)
    masked = left < UNLIMITED or right < UNLIMITED
    made = {64: _head_64, 96: _head_128, 128: _head_128, 192: _head_256, 256: _head_256}[tier(problem)](problem, masked)
    if problem.total_q >= 2 * ROWS * problem.batch:  # in the mean: a tile of two groups is full
        return [*_shared_out(problem, made[:1]), *made]
    beside = [*_side_by_side(problem, made)]
    fills = any(config["consumers"] > 1 for config in beside)  # and one head a tile would leave its second half empty
    alone = [config for config in (*made[-1:], *made[:-1]) if not fills or config["consumers"] == 1]
    return [*_shared_out(problem, [*beside, *alone][:2]), *beside, *alone]


def _side_by_side(problem: Any, made: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The last and the first with the heads by which tiles go through the fewest blocks of keys."""
    group, most = problem.heads_q // problem.heads_kv, most_heads(problem)
    left, _ = window_bounds(problem.causal, problem.window)
    for config in (made[-1], made[0]):
        rows, beside = ROWS * config["consumers"], BESIDE[min(config["consumers"], 2)]
        blocks = {
            heads: sum(
                count
                * -(-group // heads)
                * -(-queries * heads // rows)
                * (min(keys, left + queries) / config["BLOCK_N"] + beside)
                for count, queries, keys in sequences(problem)
            )
            for heads in (1, 2, 4, 8)
            if heads <= most
        }
        heads = min(blocks, key=lambda heads: (blocks[heads], -heads))
        if heads > 1:
            yield {**config, "heads": heads}


def _shared_out(problem: Any, found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same with keys shared out, where that may help."""
    for config in found:
        shared = {**config, "shared_out": True}
        if may_help(problem, traits_of(problem, shared)):
            yield shared


# Each ends with a config of one group, for short sequences.


def _head_64(problem: Any, masked: bool) -> list[dict[str, Any]]:
    two = config_of(128, 2, "off", 64, "dynamic", overlap=True)
    apart = config_of(128, 2, "off", 64, "dynamic")
    three = config_of(128, 3, "pair" if masked else "off", 0, "dynamic", overlap=not masked)
    long = problem.total_q >= THREE_GROUPS_FROM * problem.batch
    found = [three, two, apart] if long or not masked else [two, apart, three]
    return [*found, config_of(128, 1, "off", 64, "dynamic")]


def _head_128(problem: Any, masked: bool) -> list[dict[str, Any]]:
    best = config_of(128, 2, "pair", 64, "dynamic", overlap=True)
    columns = (
        best if masked else {**best, "q_columns": 128 if problem.head_dim > 112 else 64, "schedule": "dynamic_early"}
    )
    early = {**best, "schedule": "dynamic_early"}
    apart = {**best, "overlap": False}
    found = [best, early, apart] if masked else [columns, best, early, apart]
    return [*found, config_of(128, 1, "off", 0, "dynamic"), config_of(64, 1, "off", 0, "dynamic")]


def _head_256(problem: Any, masked: bool) -> list[dict[str, Any]]:
    late = config_of(64, 2, "pair", 64, "dynamic")
    early = {**late, "schedule": "dynamic_early"}
    found = [late, config_of(64, 2, "qk", 0, "dynamic"), early] if masked else [early, late]
    return [*found, config_of(64, 1, "off", 64, "dynamic")]
