"""In what products are alike: coordinates in which near ones are likely to be served best by the same kernel."""

from __future__ import annotations

import math
from typing import Any

from registry.contract.likeness import octaves, rounding_up, waves

THIN = 64
"""Rows or columns below which part of the smallest wgmma tile is empty."""


def coordinates(problem: Any) -> dict[str, float]:
    """Sizes and work in octaves, how full rounds of tiles are, and what decides which kernels of a library can run."""
    m, n, k, z = problem.m, problem.n, problem.k, problem.batch
    sms = problem.target.sm_count
    found = {"m": octaves(m), "n": octaves(n), "k": octaves(k), "elements": octaves(z * m * n)}
    found["work"] = octaves(z * m * n * k)
    for rows, columns in ((128, 256), (128, 128), (64, 64)):
        tiles = z * math.ceil(m / rows) * math.ceil(n / columns)
        found[f"waves_{rows}x{columns}"] = waves(tiles, sms)
    for tile in (64, 128):
        found[f"waste_{tile}"] = rounding_up(m, tile) + rounding_up(n, tile)
    return {
        **found,
        "thin": min(3.0, octaves(max(1.0, THIN / min(m, n)))),
        "tn": 2.0 * (problem.layout == "tn"),
        "nt": 2.0 * (problem.layout == "nt"),
        "pitch": octaves(problem.pitch),
        "pitch_16": 2.0 * (problem.pitch >= 16),
        **{f"{name}_divisor": octaves(math.gcd(size, 8)) for name, size in (("m", m), ("n", n), ("k", k))},
        "bits_8": 4.0 * (problem.dtype.startswith("float8") or problem.dtype == "int8"),
        "bits_32": 4.0 * (problem.dtype == "float32"),
        "activation": 2.0 * bool(problem.activation),
        "gelu": 2.0 * (problem.activation == "gelu"),
        "bias": float(problem.bias),
        "scales": {"": 0.0, "scalar": 6.0}.get(problem.scaling, 7.0),
        "batch": octaves(z),
    }
