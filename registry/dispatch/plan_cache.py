"""Plans kept under a key for the calls that follow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

MEMO_LIMIT = 4096
"""Plans kept per op; the oldest quarter goes when it is full."""


class Memo:
    """Bounded map from keys to plans, or what stands for one. Reads take no lock; the oldest quarter makes room."""

    def __init__(self, limit: int = MEMO_LIMIT) -> None:
        self.limit = limit
        self._plans: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self.get = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan of a key, made under the lock so that no two threads make it twice."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = make()
                if len(self._plans) >= self.limit:
                    for old in list(self._plans)[: max(1, self.limit // 4)]:
                        del self._plans[old]
                self._plans[key] = plan
            return plan

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()


_memos: list[Memo] = []


def watch_memo() -> Memo:
    """A new memo that `forget_plans` knows of."""
    memo = Memo()
    _memos.append(memo)
    return memo


def forget_plans() -> None:
    """Drop every memoised plan: after variants or tables changed."""
    for memo in _memos:
        memo.clear()
