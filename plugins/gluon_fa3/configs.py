"""Which configs exist for a problem, the measured best first (see the measured facts in kernel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry import Design
from registry.plugins.gluon_fa3.traits import ROWS, UNLIMITED, tier, two_powers, window_bounds

OVERLAP_FROM = 8  # tiles for each SM from which a tile's end is worth hiding behind the next one's start
THREE_GROUPS_FROM = 1536  # causal rows at head dim 64: below, the last of the tiles of 192 rows is too empty
SHORT = 128  # rows of a head up to which tiles of 64 are faster: 1.05 to 1.20 on shapes drawn at random
SHORT_CAUSAL = {64: 128, 96: 640, 128: 640, 192: 128, 256: 128}  # 1.1 to 1.47 at head dim 128
LONG_KEYS = 1536  # from which one block of 128 keys an SM is faster than two of 64: 1.09 to 1.13, with few queries
TWO_GROUPS_SPEED = 0.87  # of three, at head dim 64, both with full SMs


def design_of(config: Mapping[str, Any]) -> Design:
    return Design(
        warp_groups=config["consumers"],
        pipeline_stages=config["stages"],
        warp_specialized=True,
        pipeline_tasks=config["consumers"] + 1,
        tile=(ROWS * config["consumers"], config["BLOCK_N"]),
        persistent=True,
        dsl="gluon",
    )


def config_of(
    block_n: int,
    consumers: int,
    pingpong: str,
    q_columns: int,
    schedule: str,
    *,
    stages: int = 2,
    rescale: str = "before_pv",
    overlap: bool = False,
    **more: bool,
) -> dict[str, Any]:
    """`more` are what few configs have: written, one_product (see traits.py)."""
    return {
        "BLOCK_N": block_n,
        "consumers": consumers,
        "stages": stages,
        "pingpong": pingpong,
        "q_columns": q_columns,
        "schedule": schedule,
        "rescale": rescale,
        "overlap": overlap,
        **more,
    }


def configs(problem: Any) -> list[dict[str, Any]]:
    """The default, then what is worth searching."""
    wide = tier(problem)
    left, right = window_bounds(problem.causal, problem.window)
    triangular = right < UNLIMITED and left >= UNLIMITED  # tiles of unequal length
    sms = problem.target.sm_count
    tiles = _tiles(problem, 2)
    overlap = tiles >= OVERLAP_FROM * sms
    # 64-row tiles reach SMs that 128-row tiles would leave idle; at head dim 64 two of them share an SM besides. And
    # where no head has more rows than that, as in decoding, a second group would have nothing to do. Short heads end in
    # tiles that are mostly empty or masked, which costs a block of one group half as much.
    few = tiles <= (sms if triangular or wide == 64 else sms // 2)
    few = few or problem.seqlen_q <= (SHORT_CAUSAL[wide] if triangular else SHORT)
    family = {64: _head_64, 96: _head_96, 128: _head_128, 192: _head_192, 256: _head_256}[wide]
    made = family(problem, triangular, overlap)
    return made[-1:] + made[:-1] if few else made


def _tiles(problem: Any, groups: int) -> int:
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // (ROWS * groups))


def _filled(problem: Any, groups: int) -> float:
    """The share of the SMs' time that carries real rows, were all tiles equally long."""
    tiles, sms = _tiles(problem, groups), problem.target.sm_count
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return rows / (-(-tiles // sms) * sms * ROWS * groups)


# Each ends with the config of 64-row tiles, the one for few tiles. What else was tried is in kernel.py.


def _head_64(problem: Any, triangular: bool, overlap: bool) -> list[dict[str, Any]]:
    two = config_of(128, 2, "off", 64, "dynamic", overlap=overlap)
    if triangular:
        three = config_of(128, 3, "pair", 0, "dynamic")
        prefer_three = overlap and problem.seqlen_q >= THREE_GROUPS_FROM
    else:
        three = config_of(128, 3, "off", 0, "dynamic", overlap=overlap)
        prefer_three = _filled(problem, 3) > TWO_GROUPS_SPEED * _filled(problem, 2)
    found = [three, two] if prefer_three else [two, three]
    return [*found, config_of(128, 1, "off", 64, "dynamic")]


# What is written out pays where tensors of powers of two lose most, and not at head dims 64 and 256.


def _head_96(problem: Any, triangular: bool, overlap: bool) -> list[dict[str, Any]]:
    two = config_of(128, 2, "pair", 64, "dynamic", overlap=overlap)
    three = config_of(64, 3, "pair", 0, "dynamic", overlap=overlap and not triangular)
    one_product = two_powers(problem.head_dim_v).bit_count() > 1
    more = {"written": True, "one_product": True} if one_product else {"written": True}
    return [{**two, **more}, two, three, config_of(128, 1, "off", 0, "dynamic")]


def _head_128(problem: Any, triangular: bool, overlap: bool) -> list[dict[str, Any]]:
    shared = config_of(64, 1, "off", 0, "dynamic")  # two blocks of it fit an SM
    alone = config_of(128, 1, "off", 0, "dynamic")
    small = [shared, alone] if problem.seqlen_k >= LONG_KEYS else [alone, shared]
    columns = 128 if problem.head_dim > 64 else 64
    best = config_of(128, 2, "pair", columns, "dynamic" if triangular else "dynamic_early", overlap=overlap)
    if not triangular:
        return [best, *small]
    short = config_of(128, 2, "pair", 64, "dynamic", rescale="after_pv", overlap=overlap)
    return [best, {**best, "written": True}, {**best, "q_columns": 0}, short, *small]


def _head_192(problem: Any, triangular: bool, overlap: bool) -> list[dict[str, Any]]:
    best = config_of(128 if problem.head_dim_v <= 128 else 64, 2, "pair", 64, "dynamic")
    small = config_of(64, 1, "off", 64, "dynamic")
    if problem.head_dim_v <= 128:
        return [best, {**best, "q_columns": 0}, small]
    deeper = {**best, "stages": 3, "q_columns": 128, "written": True}
    return [*[deeper] * (problem.head_dim > 128), best, {**best, "overlap": True}, small]


def _head_256(problem: Any, triangular: bool, overlap: bool) -> list[dict[str, Any]]:
    return [config_of(64, 2, "pair", 0, "dynamic"), config_of(64, 1, "off", 64, "dynamic")]
