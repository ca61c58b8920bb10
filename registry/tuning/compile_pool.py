"""Compiles contestants ahead, several at a time, each in a process of its own that can be killed."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.tuning.child import Child, WorkerDied, WorkerFailed
from registry.tuning.machine import target_data
from registry.tuning.plan import Contestant, Planned

HIDE_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass
class _Job:
    planned: Planned
    contestant: Contestant
    finished: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] | None = None
    """None where nothing was compiled ahead; then the first launch does it."""


class CompilePool:
    """Workers that compile what `submit` names; `result` waits for one answer."""

    def __init__(
        self, target: Target, processes: int | None = None, plugins: Sequence[str] = (), timeout: float = 180.0
    ) -> None:
        self._target, self._plugins, self._timeout = target, tuple(plugins), timeout
        self._count = processes if processes is not None else max(1, min(12, (os.cpu_count() or 2) - 2))
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._children: list[Child] = []

    def submit(self, plans: Iterable[Planned]) -> int:
        """Queue every contestant that names its builds. Returns how many there are."""
        variants = catalog.get().variants
        for planned in plans:
            for contestant in planned.contestants:
                if variants[contestant.variant].builds is not None and self._target.arch != "cpu":
                    job = _Job(planned, contestant)
                    self._jobs[planned.key, contestant.key] = job
                    self._queue.put(job)
        for _ in range(min(self._count, len(self._jobs)) - len(self._threads)):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()
        return len(self._jobs)

    def result(self, planned: Planned, contestant: Contestant, timeout: float = float("inf")) -> dict[str, Any] | None:
        """The answer for a contestant, waiting for it; None where it was never queued, or is not there in time."""
        job = self._jobs.get((planned.key, contestant.key))
        if job is None:
            return None
        job.finished.wait(None if timeout == float("inf") else max(timeout, 0.0))
        return job.answer

    def stop(self) -> None:
        """Give up what is queued and end the workers."""
        self._stopping = True
        for _ in self._threads:
            self._queue.put(None)
        for job in self._jobs.values():
            job.finished.set()
        for child in self._children:
            child.kill()  # its own thread then reads the end of its answers, and cleans up
        for thread in self._threads:
            thread.join(timeout=30)

    def _work(self) -> None:
        child = Child("cpu", plugins=self._plugins, environment=HIDE_GPU)
        self._children.append(child)
        while (job := self._queue.get()) is not None and not self._stopping:
            try:
                job.answer = child.ask(self._command(job), self._timeout)
            except WorkerDied as error:
                job.answer = {"ok": False, "why": f"compiler {error.why}", "detail": error.detail}
            except (WorkerFailed, OSError) as error:
                job.answer = None if self._stopping else {"ok": False, "why": "error", "detail": str(error)}
            finally:
                job.finished.set()
        child.stop()

    def _command(self, job: _Job) -> dict[str, Any]:
        return {
            "do": "compile",
            "case": job.planned.case.data(),
            "variant": job.contestant.variant,
            "config": job.contestant.config,
            "target": target_data(self._target),
        }
