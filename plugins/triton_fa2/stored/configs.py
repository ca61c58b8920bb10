"""Tiles, warps and stages of gradients by way of memory, and what they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Reason
from registry.ops.attention.triton_tiles import family

Config = Mapping[str, Any]
TILE = ("WEIGHTS_M", "WEIGHTS_N")
WEIGHTS = (*TILE, "WEIGHTS_K", "weights_warps", "weights_stages")
PRODUCT = ("COLUMNS", "INNER", "product_warps", "product_stages")
SPECIALISED = (*TILE, "weights_stages", "COLUMNS", "product_stages")
# (a tile of P and dS, slice of the head, warps, stages), (columns, rows at a time, warps, stages of the products). On
# 59 shapes of an H200 the first of wgmma's lost 1.9% to the best of the three in the mean, the others 11 and 6.
TILES = {
    "wgmma": [
        ((64, 128, 64, 4, 3), (128, 64, 4, 3)),
        ((128, 128, 64, 8, 3), (256, 64, 8, 3)),
        ((128, 128, 64, 8, 3), (128, 64, 8, 3)),
    ],
    "mma": [((128, 64, 32, 8, 2), (128, 32, 8, 3)), ((64, 64, 32, 4, 2), (64, 32, 4, 2))],
}
TILES["tcgen05"] = TILES["mma"]
SPECIALISED_PRODUCTS = [(256, 3), (192, 4), (128, 6)]  # columns, stages
NARROW_PRODUCTS = [(128, 6), (64, 8)]  # of heads up to 128
IN_VAIN = 1.4  # columns that a tile may compute for each that is worth it, of the tile with the fewest
STAYING = 256  # head dim up to which rows of Q and dO stay in shared memory while keys pass
HELD = 2  # slices of a row of Q that the forward keeps in registers, which leaves room for as many more of keys
CHUNK = 1 << 30
"""Bytes of P and dS that are in memory at a time. Less leaves products too few blocks: see specialised_weights.py."""
OUTER = 128  # rows or keys that a block of a product writes, unless a tile of P and dS has fewer
SLICE = 64  # columns of a head, or rows of P, at a time in the specialised kernels
SHARED_MEMORY = 226 << 10  # for rings: of 227 KiB, the rest is for barriers
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # per thread
GROUPS = 2


def tiles_of(problem: Any, config: Config) -> tuple[int, int]:
    """Of queries, and of keys."""
    return -(-problem.seqlen_q // config["WEIGHTS_M"]), -(-problem.seqlen_k // config["WEIGHTS_N"])


def triton_configs(problem: Any) -> list[dict[str, Any]]:
    found = TILES[family(problem.target.sm)]
    return [dict(zip(WEIGHTS + PRODUCT, (*weights, *product), strict=True)) for weights, product in found]


def gluon_configs(problem: Any) -> list[dict[str, Any]]:
    if rows_stay(problem):
        room = SHARED_MEMORY - _staying(problem.head_dim, problem.head_dim_v) - 2 * 128 * 128
        weights = (128, 128, min(8, room // (2 * SLICE * 128)))
    elif problem.softcap:  # what tanh gave is kept in registers, which 256 keys of dP would leave no room for
        weights = (128, 128, 5)
    else:
        weights = (128, 256, 3)

    def computed(product: tuple[int, int]) -> int:
        return sum(-(-d // product[0]) * product[0] for d in (problem.head_dim, problem.head_dim, problem.head_dim_v))

    narrow = max(problem.head_dim, problem.head_dim_v) <= NARROW_PRODUCTS[0][0]
    products = sorted(NARROW_PRODUCTS if narrow else SPECIALISED_PRODUCTS, key=computed)
    products = [one for one in products if computed(one) < IN_VAIN * computed(products[0])]
    return [dict(zip(SPECIALISED, (*weights, *product), strict=True)) for product in products]


def forward_configs(problem: Any) -> list[dict[str, Any]]:
    """Rows of Q stay in shared memory; products in tiles of values, those first that compute the fewest columns."""
    slices = -(-problem.head_dim // SLICE)
    room = SHARED_MEMORY - _staying(SLICE * (slices - HELD)) - 2 * 128 * 128
    weights = (128, 128, min(8, room // (2 * SLICE * 128)))

    def computed(product: tuple[int, int]) -> int:
        return -(-problem.head_dim_v // product[0]) * product[0]

    products = sorted(SPECIALISED_PRODUCTS, key=computed)
    products = [one for one in products if computed(one) < IN_VAIN * computed(products[0])]
    return [dict(zip(SPECIALISED, (*weights, *product), strict=True)) for product in products]


def rows_stay(problem: Any) -> bool:
    """Of the specialised kernel."""
    return bool(max(problem.head_dim, problem.head_dim_v) <= STAYING)


def slices_a_turn(slices: int, stages: int) -> int:
    """A whole product, where the ring holds it. Else as many as it holds beside the one that a group, whose turn is
    over, lets go of in its next, and another that is on its way."""
    return slices if slices <= stages else max(1, stages - 2)


def _staying(*head_dims: int) -> int:
    """Bytes of rows of Q, and of dO."""
    return 2 * 128 * sum(-(-d // SLICE) * SLICE for d in head_dims)


def _product_memory(config: Config) -> int:
    columns, inner, _, ring = (config[name] for name in PRODUCT)
    outer = min(OUTER, max(config[name] for name in TILE))
    return 2 * ring * inner * (outer + columns) + 1024


def triton_shared_memory(problem: Any, config: Config) -> int:
    """Of the largest kernel: its ring of slices, or P and dS on their way to memory."""
    m, n, k, _, stages = (config[name] for name in WEIGHTS)
    return max(2 * stages * k * (m + n) + 1024, 2 * m * n + 1024, _product_memory(config))


def gluon_shared_memory(problem: Any, config: Config) -> int:
    """Of the larger kernel: a ring of slices, and a tile on its way out."""
    m, n, stages, columns, product_stages = (config[name] for name in SPECIALISED)
    weights = 2 * (stages * SLICE * (m + n) + m * n)
    if rows_stay(problem):
        weights = 2 * (stages * SLICE * n + m * n) + _staying(problem.head_dim, problem.head_dim_v)
    return max(weights, 2 * (product_stages * SLICE * (m + columns) + m * columns)) + 1024


def forward_shared_memory(problem: Any, config: Config) -> int:
    """The same of the forward's kernels."""
    m, n, stages, columns, product_stages = (config[name] for name in SPECIALISED)
    scores = _staying(problem.head_dim - SLICE * HELD) + 2 * (stages * SLICE * n + m * n)
    return max(scores, 2 * (product_stages * SLICE * (m + columns) + m * columns)) + 1024


def forward_rule(problem: Any, config: Config) -> Iterator[Reason]:
    """A stage is waited for before the one before it is let go of."""
    for name in ("weights_stages", "product_stages"):
        if config[name] < 2:
            yield Reason("config", name, config[name], ">= 2")


def gluon_rule(problem: Any, config: Config) -> Iterator[Reason]:
    """The same; and where rows stay, whole products of keys pass in turn."""
    yield from forward_rule(problem, config)
    slices = -(-max(problem.head_dim, problem.head_dim_v) // SLICE)
    if rows_stay(problem) and config["weights_stages"] < slices:
        yield Reason("config", "weights_stages", config["weights_stages"], f">= {slices}, slices of a head")


def gluon_registers(problem: Any, config: Config) -> int:
    """Of a block of the specialised kernels, as it is launched: before warps change theirs."""
    each = (GROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS) // (GROUPS + 1)
    return 128 * (GROUPS + 1) * each


@dataclass(frozen=True)
class WeightsTraits:
    """The constants of specialised_weights.py."""

    BLOCK_N: int
    STAGES: int
    ROWS_STAY: bool
    """Of Q and dO, in shared memory, while keys pass; the ring holds slices of keys alone."""
    TURN: int
    """Slices of a product that a warp group issues in turn."""
    SOFTCAP: bool
    SLICES: int
    """Of a row of Q or K."""
    SLICES_V: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    CONSUMER_REGISTERS: int = CONSUMER_REGISTERS
    PRODUCER_REGISTERS: int = PRODUCER_REGISTERS


@dataclass(frozen=True)
class ProductTraits:
    """The constants of specialised_product.py."""

    BLOCK_N: int
    STAGES: int
    COLUMNS: int
    FIRST: int
    """Of them those that are one accumulator, a power of two."""
    REST: int
    PARTS: int
    """Tiles of so many columns of Q and K."""
    PARTS_V: int
    GROUP: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    ADDS: bool
    KEEPS: bool
    CONSUMER_REGISTERS: int = CONSUMER_REGISTERS
    PRODUCER_REGISTERS: int = PRODUCER_REGISTERS

    def items(self, heads: int, key_tiles: int, tiles_q: int) -> int:
        """Of `heads` key heads: see `item_at`."""
        by_keys, by_rows = self.PARTS_V + self.PARTS, self.GROUP * self.PARTS
        if self.GROUP == 1:
            return heads * max(key_tiles, tiles_q) * (by_keys + by_rows)
        return heads * (key_tiles * by_keys + tiles_q * by_rows)


@dataclass(frozen=True)
class ScoresTraits:
    """The constants of specialised_scores.py."""

    BLOCK_N: int
    STAGES: int
    TURN: int
    """As of WeightsTraits."""
    HELD: int
    """Slices of a row of Q that are in registers."""
    SLICES: int
    SOFTCAP: bool
    LSE: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    ROWS_STAY: bool = True
    CONSUMER_REGISTERS: int = CONSUMER_REGISTERS
    PRODUCER_REGISTERS: int = PRODUCER_REGISTERS


@dataclass(frozen=True)
class OutputTraits:
    """The constants of specialised_output.py."""

    BLOCK_N: int
    STAGES: int
    COLUMNS: int
    FIRST: int
    """As of ProductTraits."""
    REST: int
    PARTS: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    CONSUMER_REGISTERS: int = CONSUMER_REGISTERS
    PRODUCER_REGISTERS: int = PRODUCER_REGISTERS
