"""A guess at how long a config of `triton_split` takes on an H200, from how its keys are shared out.

Fitted to 2,532 measured shapes in benchmarks/results, of an H200 and an H100. By it alone the config that is taken
loses 1.8% to the fastest (shapes left out in turn), where the first in the order of TILES loses 6.3. It is off by 17%
in the mean square; tables correct it by what was measured nearby.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from registry.plugins.triton_varlen import configs
from registry.plugins.triton_varlen.dense_host import work_of


class _Times(NamedTuple):
    """Microseconds."""

    launch: float
    block: float
    """For each block of a share, where all programs run that can."""
    adding: float
    """What parts of one tile are, added up by who comes last."""
    part: float
    """For each of them but the first."""
    tile: float
    """For each that a program begins besides its first."""


# (width, BLOCK_M, BLOCK_N, warps, stages)
_TIMES = {
    (64, 16, 64, 4, 1): _Times(3.14, 1.90, 2.25, 0.02, 1.75),
    (64, 16, 64, 4, 3): _Times(2.99, 1.32, 2.15, 0.03, 13.21),
    (64, 16, 64, 4, 5): _Times(3.11, 1.01, 2.30, 0.03, 3.52),
    (64, 16, 128, 4, 3): _Times(3.04, 1.78, 1.99, 0.03, 2.49),
    (64, 32, 64, 4, 1): _Times(2.14, 1.98, 4.04, 0.10, 1.05),
    (64, 32, 64, 4, 3): _Times(2.30, 1.75, 2.83, 0.15, 0.55),
    (64, 32, 64, 8, 5): _Times(2.98, 1.13, 2.10, 0.10, 1.72),
    (64, 32, 128, 4, 3): _Times(2.97, 2.25, 2.17, 0.14, 2.39),
    (64, 64, 64, 4, 3): _Times(2.95, 1.01, 2.62, 0.27, 1.66),
    (64, 64, 64, 4, 4): _Times(3.14, 1.51, 2.35, 0.33, 1.61),
    (64, 64, 64, 8, 1): _Times(2.99, 1.36, 3.26, 0.21, 0.99),
    (64, 64, 128, 4, 3): _Times(4.06, 2.07, 2.41, 0.33, 2.19),
    (128, 16, 64, 2, 3): _Times(4.52, 2.78, 1.52, 0.05, 2.19),
    (128, 16, 64, 4, 1): _Times(3.85, 2.69, 2.63, 0.04, 0.00),
    (128, 16, 64, 4, 3): _Times(3.44, 1.80, 1.71, 0.06, 1.89),
    (128, 16, 64, 8, 5): _Times(3.87, 1.13, 1.73, 0.07, 2.51),
    (128, 32, 64, 4, 1): _Times(2.81, 2.97, 4.47, 0.28, 0.88),
    (128, 32, 64, 4, 3): _Times(3.64, 2.17, 2.00, 0.34, 2.13),
    (128, 32, 64, 8, 5): _Times(3.75, 1.49, 2.12, 0.20, 1.98),
    (128, 64, 64, 4, 3): _Times(5.10, 1.80, 3.63, 0.76, 3.68),
    (128, 64, 64, 8, 1): _Times(3.92, 1.84, 3.75, 0.32, 1.25),
    (128, 64, 64, 8, 3): _Times(4.91, 1.28, 2.64, 0.40, 2.66),
    (256, 16, 32, 4, 1): _Times(2.85, 2.90, 4.16, 0.03, 4.96),
    (256, 16, 32, 4, 3): _Times(3.04, 1.95, 3.39, 0.05, 5.03),
    (256, 16, 64, 8, 3): _Times(4.44, 1.91, 2.06, 0.07, 4.26),
    (256, 32, 32, 8, 1): _Times(4.33, 2.22, 4.36, 0.43, 0.71),
    (256, 32, 32, 8, 6): _Times(4.26, 1.73, 5.53, 0.49, 1.32),
    (256, 32, 64, 8, 3): _Times(5.19, 2.22, 3.09, 0.55, 2.39),
    (256, 64, 32, 8, 4): _Times(6.82, 1.65, 8.35, 2.03, 3.44),
}
_OTHERS = _Times(4.0, 2.0, 3.0, 0.2, 2.0)  # of float32


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    tile = (configs.width(problem), *[config[name] for name in configs.TILE])
    times, work = _TIMES.get(tile, _OTHERS), work_of(problem, config)
    found = times.launch + times.block * work.share * work.programs / work.chunks
    if work.share < work.blocks:
        return found + times.adding + times.part * (-(-work.blocks // work.share) - 1)
    return found + times.tile * max(work.share / (work.filling + work.blocks) - 1, 0)
