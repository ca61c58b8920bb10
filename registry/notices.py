"""Things that must never pass in silence: fallbacks, quarantines, missing tables. Logged once each, counted always."""

from __future__ import annotations

import logging
import threading
from collections import Counter

log = logging.getLogger("registry")
log.addHandler(logging.NullHandler())

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def notice(message: str, level: int = logging.WARNING) -> None:
    """Count a message, and log it the first time it is met."""
    with _lock:
        _counts[message] += 1
        first = _counts[message] == 1
    if first:
        log.log(level, message)


def counts() -> dict[str, int]:
    """Every notice so far with how often it was met."""
    with _lock:
        return dict(_counts)


def clear() -> None:
    """Forget all notices (they will be logged again when met again)."""
    with _lock:
        _counts.clear()
