"""What a process that is forked while other threads work must not take over from them: locks, and what is half done.

Only the thread that forks goes on in the child. A lock that another one held there would never be released.
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
    """A lock that a child finds free, unless its own thread holds it and will release it: so it is a re-entrant one."""
    made = threading.RLock()
    _locks.add(made)
    return made


def in_child(call: Callable[[], object]) -> None:
    """Have a child do this before it goes on, with all locks free."""
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
