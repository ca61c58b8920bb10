"""In what products are alike: coordinates in which near ones are likely to be served best by the same kernel."""

from __future__ import annotations

import math
from typing import Any

from registry.contract.likeness import counted, octaves, rounding_up, rounds
from registry.contract.noted import gcd
from registry.ops.parts.products import pitch_of

THIN = 64
"""Rows or columns below which part of the smallest wgmma tile is empty."""

ALIGNED = 16
"""Bytes that distances between rows are multiples of, where the TMA unit can address an operand."""

LINE = 64
"""Elements of two bytes in a cache line: what sizes are multiples of, up to that, decides how rows are aligned."""

_counted = counted(
    "m",
    "n",
    "k",
    "elements",
    "work",
    "waves_128x256",
    "waves_128x128",
    "waves_64x64",
    "pitch",
    "m_divisor",
    "n_divisor",
    "k_divisor",
    "batch",
    "memory",
)
"""What of these are sizes."""


def coordinates(problem: Any) -> dict[str, float]:
    """Sizes and work in octaves, how full rounds of tiles are, what decides which kernels of a library can run, how
    many products there are for each element of operands that others would have to copy, and what an SM has of the
    memory."""
    m, n, k, z = problem.m, problem.n, problem.k, problem.batch
    sms, elements = problem.target.sm_count, z * m * n
    alignments = [one.stride_alignment for one in problem.operands]
    pitch = pitch_of(n, problem.out_dtype, alignments)
    dtype, layout = problem.dtype, problem.layout
    tall, wide = math.ceil(m / 128), math.ceil(n / 128)
    odd = sum([math.prod(one.shape) for one, by in zip(problem.operands, alignments, strict=True) if by < ALIGNED])
    found = {
        "m": m,
        "n": n,
        "k": k,
        "elements": elements,
        "work": elements * k,
        "waves_128x256": rounds(z * tall * math.ceil(n / 256), sms),
        "waves_128x128": rounds(z * tall * wide, sms),
        "waves_64x64": rounds(z * math.ceil(m / 64) * math.ceil(n / 64), sms),
        "waste_64": rounding_up(m, 64) + rounding_up(n, 64),
        "waste_128": rounding_up(m, 128) + rounding_up(n, 128),
        "thin": min(3.0, octaves(max(1.0, THIN / min(m, n)))),
        "tn": 2.0 * (layout == "tn"),
        "nt": 2.0 * (layout == "nt"),
        "pitch": pitch,
        "pitch_16": 2.0 * (pitch >= 16),
        "per_odd": octaves(max(1.0, elements * k / odd)) if odd else 0.0,
        "m_divisor": gcd(m, LINE),
        "n_divisor": gcd(n, LINE),
        "k_divisor": gcd(k, LINE),
        "bits_8": 4.0 * (dtype.startswith("float8") or dtype == "int8"),
        "bits_32": 4.0 * (dtype == "float32"),
        "whole": 4.0 * (dtype == "int8"),
        "ieee": 4.0 * problem.ieee,
        "activation": 2.0 * bool(problem.activation),
        "gelu": 2.0 * (problem.activation == "gelu"),
        "bias": float(problem.bias),
        "scales": {"": 0.0, "scalar": 6.0}.get(problem.scaling, 7.0),
        "batch": z,
        "memory": problem.target.memory_gbs / max(sms, 1),
    }
    return _counted(found)
