"""A Python that has imported torch and Triton already: what tests start as a process of its own, in no time.

`python()` is an executable to be given to subprocess in place of sys.executable, for `-c`, `-m` or a script. It asks a
process of this session, which has imported what takes long and nothing of ours, to copy itself (fork); the copy takes
over directory, environment, search path and all open files, and ends as a Python of its own would. What ends the
executable ends the copy. Where that process cannot be reached the executable becomes an ordinary Python. Who brings a
Triton of its own, or may want the interpreter, which Triton asks about as it is imported, is a copy from before it was.

Not for tests of what a start costs, of signals, or of settings that Python or torch read as they start.
"""

from __future__ import annotations

import array
import ast
import atexit
import contextlib
import gc
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import shared

HEAVY = ("torch", "numpy")
LATER = (
    "torch._dynamo",
    "triton.experimental.gluon.language",
    "yaml",
    "msgspec",
    "click",
    "rich.console",
    "rich.table",
)
DECIDING = [["-m", "pytest"], ["-m", "registry.testing"]]
"""Who may ask for Triton's interpreter as they run, which has to be known before Triton is imported."""
KERNELS = Path(__file__).parents[2] / "plugins"
LONGEST_START_S = 60.0
REAL = sys.executable
"""The Python of this process, whatever sys.executable is said to be by then."""

SHIM = """#!{python} -IS
import os, sys
argv, real = sys.argv[1:], {python!r}
try:
    import array, json, signal, socket
    if argv[0] not in ("-c", "-m") and argv[0].startswith("-"):
        raise OSError("an option of Python's own")
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) < 3 or os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:
            pass
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    early = {early} or "TRITON_INTERPRET" in os.environ or argv[:2] in {deciding}
    early = early or any(os.path.exists(f"{{folder}}/triton") for folder in folders)
    asked = json.dumps([argv, dict(os.environ), os.getcwd(), fds]).encode()
    server = socket.socket(socket.AF_UNIX)
    server.connect({path!r} + (".early" if early else ""))
    server.sendmsg([len(asked).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    server.sendall(asked)
except (OSError, IndexError):
    os.execv(real, [real, *argv])
answer = server.makefile().readline()
status = int(answer) if answer else 256 * 70
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


def python(early: bool = False) -> str:
    """The path of the executable, or of one that has imported torch and numpy alone.

    The first who asks starts the processes to be copied.
    """
    if shared.FOLDER not in os.environ or not hasattr(os, "pidfd_open") or len(REAL) > 100:
        return REAL
    folder = shared.folder("forked", _start)
    return str(folder / ("early" if early else "python"))


def shim(path: str, early: bool = False) -> str:
    return SHIM.format(python=REAL, path=path, early=early, deciding=DECIDING)


def _start(folder: Path) -> None:
    path, here = str(folder / "socket"), str(Path(__file__).parent)
    for name, early in (("python", False), ("early", True)):
        (folder / name).write_text(shim(path, early))
        (folder / name).chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    code = f"import sys; sys.path.insert(0, {here!r}); import forked; sys.path.remove({here!r}); forked.serve({path!r})"
    with open(folder / "log", "wb") as log:
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": "/", "start_new_session": True}
        subprocess.Popen([REAL, "-c", code], env=plain, **how)
    until = time.monotonic() + LONGEST_START_S
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.05)


def serve(path: str) -> None:
    """Copy this process for each that asks, until the one that started it has ended."""
    base = sys.path[1:]  # without the folder of `-c`
    for name in ("forked", "shared"):
        sys.modules.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _import(HEAVY)
    _remember_sources()
    parent = os.getppid()
    if os.fork() == 0:
        path, parent = f"{path}.early", os.getppid()
    else:
        _import(LATER)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    while os.getppid() == parent:
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(asking, base)
        asking.close()


def _remember_sources() -> None:
    """Triton asks of each kernel where its source ends, for which a Python before 3.13 takes a third of a second."""
    find, known = inspect.getblock, dict[tuple[str, ...], int]()
    for path in KERNELS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for one in ast.walk(ast.parse(text)):
            if isinstance(one, ast.FunctionDef) and one.decorator_list:
                rest = lines[one.decorator_list[0].lineno - 1 :]
                known[tuple(rest)] = len(find(rest))

    def getblock(lines: list[str]) -> list[str]:
        end = known.get(tuple(lines))
        return lines[:end] if end else find(lines)

    inspect.getblock = getblock


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)


def _keep(asking: socket.socket, base: list[str]) -> None:
    """Start the copy that was asked for, and wait for its end or for that of the one who asks."""
    head, sent, _, _ = asking.recvmsg(8, socket.CMSG_SPACE(4 * 250))
    fds = array.array("i")
    for _, _, data in sent:
        fds.frombytes(data[: len(data) - len(data) % 4])
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += asking.recv(1 << 20)
    argv, environment, folder, numbers = json.loads(text)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.setsid()
        asking.close()
        _take_over(list(fds), numbers)
        _end(lambda: _become(argv, environment, folder, base))
    ended = os.pidfd_open(child)
    if asking in select.select([ended, asking], [], [])[0]:
        os.killpg(child, signal.SIGKILL)  # with all that it has started
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):
        asking.sendall(f"{status}\n".encode())
    os._exit(0)


def _end(run: Callable[[], None]) -> NoReturn:
    """As a Python ends, without clearing the memory of all that was imported: that takes half a second."""
    status = 0
    try:
        run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else ended.code is not None
        if status is True:
            print(ended.code, file=sys.stderr)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120  # as Python does
    os._exit(status & 255)


def _take_over(fds: list[int], numbers: list[int]) -> None:
    """The files, by the numbers that they have where they come from."""
    high = [os.dup2(fd, 500 + i) for i, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=False):
        os.dup2(fd, number)
        os.close(fd)


def _become(argv: list[str], environment: dict[str, str], folder: str, base: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    shim = Path(environment.get(shared.FOLDER, ""), "forked", "python")
    if shim.is_file():
        sys.executable = str(shim)  # processes that it starts in turn are copies as well
    paths = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if argv[0] == "-m":
        import runpy

        sys.argv = [argv[1], *argv[2:]]
        sys.path[:] = [folder, *paths, *base]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    if argv[0] == "-c":
        first, code, sys.argv = "", compile(argv[1], "<string>", "exec"), ["-c", *argv[2:]]
    else:
        script = main.__file__ = argv[0]
        first, code, sys.argv = (
            str(Path(script).resolve().parent),
            compile(Path(script).read_bytes(), script, "exec"),
            argv,
        )
    sys.path[:] = [first, *paths, *base]
    exec(code, main.__dict__)
