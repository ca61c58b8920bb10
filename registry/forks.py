"""What a process must not inherit when it is forked while other threads work: their locks, and what they had half done.

Only the thread that forks goes on in the child, where a lock that another one held would never be released.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["in_child", "new_lock"]

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_calls: list[Callable[[], object]] = []


def new_lock() -> Any:
    """A re-entrant lock, which is free in a child, unless the thread that forked holds it, and will release it."""
    made = threading.RLock()
    _locks.add(made)
    return made


def in_child(call: Callable[[], object]) -> None:
    """Have each child call this before it goes on, once all locks are free."""
    _calls.append(call)


def _begin() -> None:
    # Both methods are what `threading` and `logging` themselves have for this, in every Python since 3.9.
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()
    for call in _calls:
        call()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_begin)
