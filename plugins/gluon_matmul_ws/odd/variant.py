"""What `gluon_matmul_odd` can run, with which configs."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from registry import Reason, Variant
from registry.ops.matmul.calls import MATMUL, out_of
from registry.plugins.gluon_matmul_ws.claims import HAND_OVER, of_config, shared_memory
from registry.plugins.gluon_matmul_ws.host import sides, split_k
from registry.plugins.gluon_matmul_ws.odd import host
from registry.plugins.gluon_matmul_ws.odd.cost import guesses
from registry.plugins.gluon_matmul_ws.odd.fragments import STEP, UNIT
from registry.plugins.gluon_matmul_ws.tiles import config
from registry.toolbox.designs import MOST_ALONG_Y
from registry.toolbox.matrices import turned

MOST = 4
"""Configs that are worth measuring: see cost.py."""
_FAR = (1 << 31) - 1
"""Where columns of a map end, beyond which no box begins."""
_TILES = (("coop", 128, 64), ("coop", 128, 128), ("coop", 128, 256), ("pingpong", 64, 128))


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    found = sorted(_listed(problem), key=operator.itemgetter(0))[:MOST]
    return [config(mode, x, y, stages, swap=swap, split_k=way) for _, (mode, x, y, stages, swap, way) in found]


def _listed(problem: Any) -> Iterator[tuple[float, tuple[str, int, int, int, bool, int]]]:
    """What is guessed of each, and MODE, rows, columns, stages, SWAP, ranges of K."""
    given = MATMUL.operands(problem)
    guess = guesses(problem, host.run_of(out_of(problem, given)))
    sms, pairs = problem.target.sm_count or 132, -(-problem.k // (2 * STEP))
    swaps = [swap for swap in (False, True) if _may_be_first(sides({"SWAP": swap, "BLOCK_N": 64}, given)[0])]
    for (mode, x, y), swap in itertools.product(_TILES, swaps or (False,)):
        rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
        if x > 2 * max(rows, 64) or y > 2 * max(columns, 32):
            continue
        tiles = -(-rows // x) * -(-columns // y) * problem.batch
        buffers = 512 * (x // 2 if mode == "coop" else x)
        stages = min(12, (problem.target.shared_memory - HAND_OVER - buffers) // ((x + y) * 128 + 16))
        ways = [1]
        if mode == "coop":
            ways += [way for way in (2, 4, 8, 16, 32) if tiles * way <= sms and way * 2 <= pairs][-1:]
            ways += [0] if tiles % sms and tiles > sms // 4 and pairs >= 4 else []
        for way in ways:
            yield guess(mode, x, y, swap, way), (mode, x, y, stages, swap, way)


def _may_be_first(operand: Any) -> bool:
    """Whether rows lie along K, at distances that no tensor map can have."""
    return not turned(operand) and host.odd(operand)


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    first, _ = sides(config, MATMUL.operands(problem))
    if not _may_be_first(first):
        allowed = "rows along K, at distances that 16 bytes do not divide"
        yield Reason("alignment", "operands", "other rows", allowed, "other kernels take these", first.name)
        return
    far = len(first.shape) == 3 and first.shape[0] > 1 and first.strides[0] % UNIT
    if far and not host.flat_rows(first):
        allowed = f"a multiple of {UNIT} from one matrix to the next"
        yield Reason(
            "alignment", "stride", first.strides[0], allowed, f"call .contiguous() on {first.name}", first.name
        )
    if (pitch := max(first.strides[-2:])) * UNIT > _FAR:
        yield Reason("range", "stride", pitch, f"at most {_FAR // UNIT} from row to row", operand=first.name)
    if problem.batch > MOST_ALONG_Y:
        yield Reason("range", "batch", problem.batch, f"at most {MOST_ALONG_Y}: the copy's grid ends there")
    if split_k(config) > -(-problem.k // (2 * STEP)) or (split_k(config) != 1 and config["MODE"] != "coop"):
        yield Reason(
            "config", "SPLIT_K", split_k(config), "ranges of two blocks of K, of cooperative tiles", "SPLIT_K=1"
        )
    yield from of_config(config, host.SLAB)


def variant_of(product: Variant) -> Variant:
    """What the product claims of 16-bit operands, but for where they lie."""
    requires = dataclasses.replace(
        product.requires,
        dtypes=("float16", "bfloat16"),
        promoted=False,
        layouts=("nn", "nt", "tt"),
        out_dtypes=("float16", "bfloat16", "float32"),
        stride_alignment=1,
        shared_memory=shared_memory,
        rule=_rule,
    )
    return host.HOST.variant(
        "gluon_matmul_odd",
        op="matmul",
        requires=requires,
        configs=configs,
        design=product.design,
        design_of=product.design_of,
        summary="rows at odd distances, read in place by several tensor maps, shifted in registers",
    )
