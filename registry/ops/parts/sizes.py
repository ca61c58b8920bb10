"""How large the conformance kit's problems are, by device and level."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Size:
    """How large problems may be, so that a check takes milliseconds on a GPU and not minutes on a CPU."""

    lengths: tuple[int, ...]
    widest: int
    """The largest inner dimension."""
    large: bool
    """Whether problems of a real workload's size are tried as well."""
    long: int
    """A length of several blocks of any config, for a few problems."""
    slow: bool
    """Kernels are interpreted: as few programs as show what is wrong."""
    samples: int
    """Further random problems after each axis value had its own."""
    values: int
    """Values kept of an axis with many."""
    full_config_problems: int
    """How many problems are run with every config; among the others they are dealt out."""
    repeats: int
    """How often launches on the same values are compared: a race that shows once in fifty calls has to show."""
    far: int = 0
    """A length of one problem with little else; 0 where such lengths come anyway, or would be interpreted."""


_LENGTHS = {"small": (1, 16, 77, 129), "cpu": (1, 77, 129, 64, 300), "cuda": (1, 77, 129, 1000, 256, 2049)}


def size_for(device: torch.device, level: str, interpreted: bool) -> Size:
    """The sizes of one level ("quick" or "full") on a device."""
    if level not in ("quick", "full"):
        raise ValueError(f'level: got {level!r}; allowed: "quick", "full"')
    full, cuda = level == "full", device.type == "cuda"
    return Size(
        lengths=_LENGTHS["small" if interpreted else "cuda" if cuda else "cpu"],
        widest=576 if cuda else 64 if interpreted else 160,
        large=cuda,
        slow=interpreted,
        long=2049 if cuda else 200 if interpreted else 520,
        samples=(40 if cuda else 20) if full else 6,
        values=12 if full else 4,
        full_config_problems=3 if full else 0,
        repeats=3 if interpreted else 200,
        far=0 if cuda or interpreted else 1501,
    )
