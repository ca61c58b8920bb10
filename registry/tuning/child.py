"""The parent's end of a worker process: start, ask with a time limit, kill, and say what it died of."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any


class WorkerDied(Exception):
    """The worker is gone: it hung and was killed, or it fell. `why` and `detail` go into the record."""

    def __init__(self, why: str, detail: str) -> None:
        self.why, self.detail = why, detail
        super().__init__(f"{why}: {detail}")


class WorkerFailed(Exception):
    """A worker could not be started at all, so no sweep is possible."""


class Child:
    """One worker process. Usable again after it died: the next `ask` starts another."""

    def __init__(
        self,
        device: str,
        mode: str = "events",
        plugins: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._hello = {"do": "hello", "device": device, "mode": mode, "plugins": list(plugins)}
        self._environment = dict(environment or {})
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self.welcome: dict[str, Any] = {}
        self.starts = 0

    @property
    def running(self) -> bool:
        return self._process is not None

    def ask(self, command: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a command and wait for its answer. WorkerDied where none comes."""
        self.start()
        self.send(command)
        return self.receive(timeout)

    def start(self) -> None:
        """Make sure that a worker runs, with all plugins loaded."""
        if self._process is not None:
            return
        command_in, self._commands = os.pipe()
        self._answers, answer_out = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _tail)
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "registry.tuning.worker", str(command_in), str(answer_out)],
            pass_fds=(command_in, answer_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        os.close(command_in)
        os.close(answer_out)
        self.starts += 1
        try:
            self.send(self._hello)
            self.welcome = self.receive(self._start_timeout)
        except WorkerDied as error:
            raise WorkerFailed(f"the worker process does not start: {error}") from None
        if not self.welcome["ok"]:
            self.stop()
            raise WorkerFailed(f"the worker process does not start: {self.welcome['detail']}")

    def send(self, command: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the missing answer says more
            os.write(self._commands, json.dumps(command).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next answer."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready = select.select([self._answers], [], [], max(left, 0.0))[0] if left > 0 else []
            if not ready:
                log = self._end(kill=True)
                raise WorkerDied("hung", f"no answer in {timeout:.0f} s; killed{log}")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                log = self._end(kill=False)
                raise WorkerDied("crashed", f"{self._last_words}{log}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if answer.get("fatal"):
            self._end(kill=True)
        return answer

    def kill(self) -> None:
        """End the worker from another thread than the one that asks it, which will find it dead."""
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()

    def stop(self) -> None:
        """End the worker, if one runs."""
        if self._process is not None:
            self._end(kill=True)

    def _end(self, kill: bool) -> str:
        """Close everything and return the end of what the worker printed, as a phrase."""
        assert self._process is not None
        process, self._process = self._process, None
        for end in (self._commands, self._answers):
            with contextlib.suppress(OSError):
                os.close(end)
        if kill:
            with contextlib.suppress(OSError):
                process.kill()
        try:
            code = process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                process.kill()
            self._last_words = "would not die: the device may be stuck"
            return ""
        self._last_words = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        return self._tail()

    def _tail(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        self._log.close()
        return f"; it printed: ...{text[-500:]}" if text else ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
