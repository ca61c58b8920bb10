"""What the author of a kernel has to know of an op beyond its declarations: docs/authors.md is made from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Contract:
    """An op's folder may have one for each of its ops in authors.py, by name in `BY_OP`."""

    returns: str
    """What `run` and a prepared launch return."""
    arguments: Mapping[str, str]
    """What each argument is, encodings included."""
    earned: Mapping[str, str] = field(default_factory=dict)
    """By what a variant earns an argument, where that is no claim of its own."""
    notes: tuple[str, ...] = ()
    """What else holds, a sentence or two each."""
