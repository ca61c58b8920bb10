"""Processes that answer commands and can be killed: one that hangs or falls costs the command at hand, and is replaced.

    with Child("registry.tuning.worker", {"do": "hello", ...}) as child:
        answer = child.ask({"do": "compile", ...}, timeout=180.0)

A `CompilePool` asks several at once. Commands and answers are plain data, a JSON line each; a worker's module has a
function `answerer()` that gives what answers them. What it prints is kept, and quoted where it dies.

Not multiprocessing, which would run the caller's script again. A worker has the caller's path and this very package,
whatever lies in the working directory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.errors import Portable, RegistryError

__all__ = ["Child", "CompilePool", "WorkerDied", "WorkerFailed"]

HIDE_GPU = {"CUDA_VISIBLE_DEVICES": ""}
START_TIMEOUT = 120.0
"""The environment of a worker that only compiles."""
LOG_BYTES, LOG_TAIL = 16 << 20, 64 << 10
"""What a worker may have printed before all but the end is dropped."""
_BOOT = """
import sys
sys.path[:] = [place for place in sys.path if place]
import importlib.util, json
path, places, module, commands, answers = json.loads(sys.argv[1])
sys.path[:] = path
spec = importlib.util.spec_from_file_location("registry", places[0] + "/__init__.py", submodule_search_locations=places)
sys.modules["registry"] = registry = importlib.util.module_from_spec(spec)
spec.loader.exec_module(registry)
from registry.toolbox.compile_pool import serve
serve(module, commands, answers)
"""


class WorkerDied(Portable):
    """The worker is gone: it hung and was killed, or it fell. `why` and `detail` go into the record."""

    def __init__(self, why: str, detail: str) -> None:
        self.why, self.detail = why, detail
        super().__init__(f"{why}: {detail}")


class WorkerFailed(RegistryError):
    """A worker could not be started at all."""


class Child:
    """One worker process. Usable again after it died: the next `ask` starts another.

    module  the worker's, with a function `answerer()`
    hello   the first command of each process; its answer becomes `welcome`
    """

    def __init__(self, module: str, hello: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._module, self._hello = module, dict(hello)
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self.welcome: dict[str, Any] = {}

    @property
    def running(self) -> bool:
        return self._process is not None

    def ask(self, command: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a command and wait for its answer. WorkerDied where none comes."""
        self.start()
        self.send(command)
        return self.receive(timeout)

    def start(self) -> None:
        """Make sure that a worker runs and has answered the hello."""
        if self._process is not None:
            return
        command_in, self._commands = os.pipe()
        self._answers, answer_out = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _tail)
        self._buffer = b""
        path = [place or os.getcwd() for place in sys.path]
        boot = json.dumps([path, list(sys.modules["registry"].__path__), self._module, command_in, answer_out])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, boot],
            pass_fds=(command_in, answer_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        os.close(command_in)
        os.close(answer_out)
        try:
            self.send(self._hello)
            self.welcome = self.receive(START_TIMEOUT)
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
            ready = select.select([self._answers], [], [], min(max(left, 0.0), 1.0))[0] if left > 0 else []
            self._trim_log()
            if not ready and left > 1.0:
                continue
            if not ready:
                log = self._end(kill=True)
                raise WorkerDied("hung", f"no answer in {timeout:.0f} s; killed{log}")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                log = self._end(kill=False)
                raise WorkerDied("crashed", f"{self._last_words}{log}")
            self._buffer += chunk
        self._trim_log()
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if answer.get("fatal"):
            self._end(kill=True)
        return answer

    def kill(self) -> None:
        """End the worker from another thread than the one that asks it, which will find it dead."""
        process = self._process
        if process is not None:
            _kill_group(process)

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
            _kill_group(process)
        try:
            code = process.wait(timeout=20)
            _kill_group(process)  # what it started itself
        except subprocess.TimeoutExpired:
            _kill_group(process)
            self._last_words = "would not die: the device may be stuck"
            return ""
        self._last_words = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        return self._tail()

    def _trim_log(self) -> None:
        """Drop the beginning of a log that grew too long. The worker's end of the file moves along with ours."""
        log = self._log.fileno()
        size = os.fstat(log).st_size
        if size > LOG_BYTES:
            end = os.pread(log, LOG_TAIL, size - LOG_TAIL)
            os.lseek(log, 0, os.SEEK_SET)
            os.ftruncate(log, 0)
            os.write(log, end)

    def _tail(self) -> str:
        log = self._log.fileno()
        text = os.pread(log, LOG_TAIL, max(0, os.fstat(log).st_size - LOG_TAIL)).decode(errors="replace").strip()
        self._log.close()
        return f"; it printed: ...{text[-500:]}" if text else ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a worker and what it started: it leads a group of its own."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@dataclass
class _Job:
    key: Hashable
    command: Mapping[str, Any]
    finished: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] | None = None


class CompilePool:
    """Several children that work through what `submit` names, in that order but for what `first` puts ahead; `result`
    waits for one answer."""

    def __init__(self, make: Callable[[], Child], processes: int | None = None, timeout: float = 180.0) -> None:
        self._make, self._timeout = make, timeout
        self.count = processes if processes is not None else max(1, min(12, (os.cpu_count() or 2) - 2))
        self._jobs: dict[Hashable, _Job] = {}
        self._waiting: OrderedDict[Hashable, _Job] = OrderedDict()
        self._changed = threading.Condition()
        """Guards what waits and what was answered; told of each new job, each answer, and the end."""
        self._answered: list[Hashable] = []
        self._threads: list[threading.Thread] = []
        self._children: list[Child] = []
        self._stopping = False

    def submit(self, commands: Mapping[Any, Mapping[str, Any]]) -> None:
        """Queue commands by key."""
        with self._changed:
            for key, command in commands.items():
                self._waiting[key] = self._jobs[key] = _Job(key, command)
            self._changed.notify_all()
        for _ in range(min(self.count, len(self._jobs)) - len(self._threads)):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def first(self, keys: Sequence[Hashable]) -> None:
        """Of what is queued, these next, in this order."""
        with self._changed:
            for key in reversed(keys):
                if key in self._waiting:
                    self._waiting.move_to_end(key, last=False)

    def ready(self, key: Hashable) -> bool:
        """Whether `result` would not wait."""
        return key not in self._jobs or self._jobs[key].finished.is_set()

    def news(self) -> dict[Any, dict[str, Any]]:
        """The answers since this was last asked, by key."""
        with self._changed:
            keys, self._answered = self._answered, []
        return {key: answer for key in keys if (answer := self._jobs[key].answer) is not None}

    def wait(self, keys: Collection[Hashable], timeout: float = float("inf")) -> None:
        """Until one of these is ready, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: any(map(self.ready, keys)), None if timeout == float("inf") else timeout)

    def result(self, key: Hashable, timeout: float = float("inf")) -> dict[str, Any] | None:
        """The answer to a command, waiting for it; None where it was never queued, or is not there in time."""
        job = self._jobs.get(key)
        if job is None:
            return None
        job.finished.wait(None if timeout == float("inf") else max(timeout, 0.0))
        return job.answer

    def stop(self) -> None:
        """Give up what is queued and end the children."""
        with self._changed:
            self._stopping = True
            for job in self._jobs.values():
                job.finished.set()
            self._changed.notify_all()
        for child in self._children:
            child.kill()  # its own thread then reads the end of its answers, and cleans up
        for thread in self._threads:
            thread.join(timeout=30)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _work(self) -> None:
        child = self._make()
        self._children.append(child)
        while (job := self._next()) is not None:
            try:
                job.answer = child.ask(job.command, self._timeout)
            except WorkerDied as error:
                job.answer = {"ok": False, "why": f"compiler {error.why}", "detail": error.detail}
            except (WorkerFailed, OSError) as error:
                job.answer = None if self._stopping else {"ok": False, "why": "error", "detail": str(error)}
            finally:
                with self._changed:
                    job.finished.set()
                    self._answered.append(job.key)
                    self._changed.notify_all()
        child.stop()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            return None if self._stopping else self._waiting.popitem(last=False)[1]


# --- the worker's side --------------------------------------------------------------------------------------------


def serve(module: str, commands: int, answers: int) -> None:
    """Answer commands until they end, or until an answer is `fatal`: this process can not go on."""
    _die_with_parent()
    answer = importlib.import_module(module).answerer()
    with os.fdopen(commands, encoding="utf-8") as incoming, os.fdopen(answers, "w", encoding="utf-8") as outgoing:
        for line in incoming:
            found = answer(json.loads(line))
            outgoing.write(json.dumps(found) + "\n")
            outgoing.flush()
            if found.get("fatal"):
                break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a broken device can hang the driver's own clean-up


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, also while a kernel hangs."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
