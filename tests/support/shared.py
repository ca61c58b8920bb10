"""What all processes of one test session share: the workers, and the runs that tests start.

A folder that the first of these processes makes and removes. Triton's cache lies in it, so a kernel that several tests
ask for is compiled once, and so do answers that cost seconds (`once`). Each process computes with one thread: the
workers are as many as the cores.

What a compiler made of a kernel is kept for all sessions: see kept_builds.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path

FOLDER = "KREG_TESTS_SHARED"
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # Of what torch makes of graphs nothing is vectorised: to ask what the compiler can do takes it ten seconds, twice.
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
}


def begin(environment: MutableMapping[str, str] = os.environ) -> Callable[[], None]:
    """Set the session up, or join the one that this process was started by. Returns what ends it.

    To be called before torch is imported, which looks for its threads then.
    """
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # else each of them compiles the tests, and this package, anew
    sys.dont_write_bytecode = False
    if FOLDER in environment:
        return lambda: None
    folder = tempfile.mkdtemp(prefix="kernel-registry-tests-")
    environment[FOLDER] = folder
    environment.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
    # Tests expect what the shipped tables choose, whatever this machine's user has tuned, or is tuning meanwhile.
    for name in [name for name in environment if name.startswith("REGISTRY_")]:
        del environment[name]
    environment["REGISTRY_CACHE"] = os.path.join(folder, "registry")

    def end() -> None:
        environment.pop(FOLDER, None)
        shutil.rmtree(folder, ignore_errors=True)

    return end


def once(question: str, answer: Callable[[], bytes]) -> bytes:
    """The answer to a question, found by the first process that asks while the others wait for it."""
    if FOLDER not in os.environ:  # no session: a script that shares code with the tests
        return answer()
    return _answer_in(Path(os.environ[FOLDER]), question, answer)


def folder(name: str, fill: Callable[[Path], object]) -> Path:
    """A folder to be read only, filled by the first process that asks: tests of a file may run in several."""
    if FOLDER not in os.environ:
        raise RuntimeError("a folder of the session, and there is none: run by pytest")
    path = Path(os.environ[FOLDER], name)

    def make() -> bytes:
        path.mkdir()
        fill(path)
        return b"made"

    once(f"the folder {name}", make)
    return path


def _answer_in(folder: Path, question: str, answer: Callable[[], bytes]) -> bytes:
    path = folder / hashlib.sha256(question.encode()).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            found = answer()
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_bytes(found)
            unfinished.rename(path)
    path.touch()
    return path.read_bytes()
