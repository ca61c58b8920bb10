"""What the author of a kernel has to know of an op beyond its declarations: docs/authors.md is made from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.ops.parts.heads import MOST_SOFTCAP

SOFTCAPS = (
    f"The claim `softcap` is one of softcaps up to {MOST_SOFTCAP:g}: a tanh made of exponentials leaves scores off by "
    "1e-7 of the softcap, however small they are. `any_softcap=True` beside it claims those above, too, for a kernel "
    "whose tanh does not."
)
"""What attention's ops say alike."""


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
