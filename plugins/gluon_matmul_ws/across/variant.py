"""What `gluon_matmul_across` can run, with which configs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from registry import Reason, Variant
from registry.ops.matmul.calls import MATMUL, out_of
from registry.plugins.gluon_matmul_ws.across import host
from registry.plugins.gluon_matmul_ws.across.copy import UNIT, blocks_of
from registry.plugins.gluon_matmul_ws.across.cost import guesses
from registry.plugins.gluon_matmul_ws.claims import HAND_OVER, of_config, shared_memory
from registry.plugins.gluon_matmul_ws.host import sides, split_k
from registry.plugins.gluon_matmul_ws.odd.host import run_of
from registry.plugins.gluon_matmul_ws.tiles import config
from registry.toolbox.designs import MOST_ALONG_Y
from registry.toolbox.matrices import strides_of, tma_geometry, turned

MOST = 4
"""Configs that are worth measuring: see cost.py."""
BLOCKS = (64, 32, 16)
"""Elements of K of a block."""
_FAR = (1 << 31) - 1
"""Where columns of a map end, beyond which no box begins."""
_TILES = (
    ("coop", 128, 64),
    ("coop", 128, 128),
    ("coop", 128, 256),
    ("coop", 256, 128),
    ("pingpong", 64, 128),
    ("pingpong", 64, 256),
)


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    found = sorted(_listed(problem), key=operator.itemgetter(0))[:MOST]
    return [
        config(mode, x, y, stages, high, swap=swap, split_k=way) for _, (mode, x, y, high, stages, swap, way) in found
    ]


def _listed(problem: Any) -> Iterator[tuple[float, tuple[str, int, int, int, int, bool, int]]]:
    """What is guessed of each, and MODE, rows, columns, a block of K, stages, SWAP, ranges of K."""
    given = MATMUL.operands(problem)
    pairs = {swap: sides({"SWAP": swap, "BLOCK_N": 64}, given) for swap in (False, True)}
    swaps = [swap for swap, (_, second) in pairs.items() if _may_be_second(second)] or [False]
    sms, run = problem.target.sm_count or 132, run_of(out_of(problem, given))
    for (mode, x, y), swap in itertools.product(_TILES, swaps):
        first, second = pairs[swap]
        classes, copied = max(host.classes_of(second), 2), 0 if host.in_place(first) else math.prod(first.shape)
        high = block_of(problem.k, classes)
        guess, blocks = guesses(problem, run, high, classes, copied), classes * blocks_of(problem.k, high, classes)
        rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
        if x > 2 * max(rows, 64) or y > 2 * max(columns, 32):
            continue
        tiles = -(-rows // x) * -(-columns // (y - host.LOST)) * problem.batch
        buffers = 512 * (x // 2 if mode == "coop" else x)
        stages = min(12, (problem.target.shared_memory - HAND_OVER - buffers) // ((x + y) * 2 * high + 16))
        ways = [1]
        if mode == "coop":
            ways += [way for way in (2, 4, 8, 16, 32) if tiles * way <= sms and way * 4 <= blocks][-1:]
            ways += [0] if tiles % sms and tiles > sms // 4 and blocks >= 8 else []
        for way in ways:
            yield guess(mode, x, y, swap, way), (mode, x, y, high, stages, swap, way)


def block_of(k: int, classes: int) -> int:
    """Most that leaves few zeros beyond K: 32 took 0.89 of the time of 64 where it does not, and 16 0.82."""
    whole = {block: block * blocks_of(k, block, classes) for block in BLOCKS}
    return next(block for block, held in whole.items() if held <= 1.15 * min(whole.values()))


def _may_be_second(operand: Any) -> bool:
    """Whether rows lie across K, at distances that no tensor map can have."""
    return not turned(operand) and host.classes_of(operand) > 1


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    first, second = sides(config, MATMUL.operands(problem))
    if not _may_be_second(second):
        allowed = "rows across K, at distances that 16 bytes do not divide"
        yield Reason("alignment", "operands", "other rows", allowed, "other kernels take these", second.name)
        return
    if len(second.shape) == 3 and second.shape[0] > 1 and (z := strides_of(second)[0]) % UNIT:
        allowed = f"a multiple of {UNIT} from one matrix to the next"
        yield Reason("alignment", "stride", z, allowed, f"call .contiguous() on {second.name}", second.name)
        return
    if problem.k < UNIT:
        yield Reason("k", "k", problem.k, f"at least {UNIT}: each class of K has a row")
    for one in (first, second):
        _, (_, pitch, _) = tma_geometry(one)
        if pitch * UNIT > _FAR:
            yield Reason("range", "stride", pitch, f"at most {_FAR // UNIT} from row to row", operand=one.name)
    if problem.batch > MOST_ALONG_Y:
        yield Reason("range", "batch", problem.batch, f"at most {MOST_ALONG_Y}: the copy's grid ends there")
    classes = host.classes_of(second)
    blocks = classes * blocks_of(problem.k, config["BLOCK_K"], classes)
    if split_k(config) > blocks or (split_k(config) != 1 and config["MODE"] != "coop"):
        yield Reason("config", "SPLIT_K", split_k(config), "ranges of a block of K, of cooperative tiles", "SPLIT_K=1")
    yield from of_config(config, *BLOCKS)


def variant_of(product: Variant) -> Variant:
    """What the product claims of 16-bit operands, but for where they lie."""
    requires = dataclasses.replace(
        product.requires,
        dtypes=("float16", "bfloat16"),
        promoted=False,
        layouts=("nn", "tn", "tt"),
        out_dtypes=("float16", "bfloat16", "float32"),
        stride_alignment=1,
        shared_memory=shared_memory,
        rule=_rule,
    )
    return host.HOST.variant(
        "gluon_matmul_across",
        op="matmul",
        requires=requires,
        configs=configs,
        design=product.design,
        design_of=product.design_of,
        summary="rows at odd distances across K, read in place by several tensor maps, K by classes",
    )
