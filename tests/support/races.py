"""Threads that do the same at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(work: Callable[[int], Any], count: int, meanwhile: Callable[[], Any] | None = None) -> list[Any]:
    """What work(0), work(1), ... give, each in a thread of its own, while one more does `meanwhile` again and again.
    What any of them raises is raised."""
    done = threading.Event()

    def churn() -> None:
        while meanwhile is not None and not done.is_set():
            meanwhile()

    with ThreadPoolExecutor(count + 1) as pool:
        churning = pool.submit(churn)
        try:
            return list(pool.map(work, range(count)))
        finally:
            done.set()
            churning.result()
