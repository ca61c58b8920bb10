"""What compilers made of our kernels, kept as data in tests/builds: a test compiles only what is not known yet.

What is read from a build (registers, spills, loops of its machine code) hangs on nothing but the kernel's source and
all that it calls, its types and constants, the target and the version of Triton. Each answer is kept by a hash of
these, and by a hash of the code that read it; so a changed kernel, or a changed reading, is compiled again. To prove
the file honest, each session compiles a few builds although they are known: others each day.

`make builds` (that is `pytest --keep-builds`) writes tests/builds: what was asked in that run, and nothing else.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shared

FOLDER = Path(__file__).parents[1] / "builds"
SAMPLE = 2
SEED = "KREG_BUILDS_SEED"
KEEPING = "KREG_BUILDS_KEEP"
"""Set while tests/builds is written: every answer is noted, those known are taken without a proof."""

Facts = dict[str, dict[str, Any]]
"""Build -> what was asked of it -> the answer."""


def hashed(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]


@functools.cache
def _file(name: str) -> tuple[dict[str, str], Facts]:
    """The readings, each with a hash of its code; and what they found."""
    path = FOLDER / f"{name}.json"
    text = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"readings": {}, "builds": {}}
    return text["readings"], text["builds"]


def seed() -> str:
    return os.environ.get(SEED) or datetime.date.today().isoformat()


@functools.cache
def _sample(triton: str) -> frozenset[str]:
    """The builds of this Triton that are compiled today although they are known."""
    known = {build for path in FOLDER.glob("*.json") for build in _file(path.stem)[1] if build.split()[0] == triton}
    return frozenset(sorted(known, key=lambda build: hashed(seed(), build))[:SAMPLE])


def answer(file: str, build: str, fact: str, reading: str, find: Callable[[], Any]) -> Any:
    """What is kept in `file` of a build ("<version of Triton> <arch> <name> <hash>"), or found now.

    `reading` is a hash of the code that finds it. Answers are what JSON can hold.
    """
    readings, builds = _file(file)
    known = readings.get(fact) == reading and fact in builds.get(build, ())
    kept = builds[build][fact] if known else None
    keeping = KEEPING in os.environ
    if not known or (not keeping and build in _sample(build.split()[0])):
        found = json.loads(json.dumps(find()))
        if known and found != kept:
            raise AssertionError(
                f"tests/builds/{file}.json says of {build}: {fact} is {kept}. Compiled now it is {found}. "
                f"It was in the sample of {seed()} ({SEED}={seed()} asks for it again); `make builds` writes what is."
            )
        kept = found
    if keeping or not known:
        _note("kept" if keeping else "missing", [file, build, fact, reading, kept])
    return kept


def _note(kind: str, what: Any) -> None:
    """For the end of the session, which may have been asked in several processes."""
    if shared.FOLDER in os.environ:
        with open(Path(os.environ[shared.FOLDER], f"{kind}-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


def _noted(kind: str) -> list[Any]:
    files = sorted(Path(os.environ[shared.FOLDER]).glob(f"{kind}-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def missing() -> set[str]:
    """The builds that this session had to compile because tests/builds does not know them."""
    return {build for _, build, *_ in _noted("missing")}


def write() -> list[Path]:
    """tests/builds anew, from what the session asked."""
    files: dict[str, tuple[dict[str, str], Facts]] = {}
    for file, build, fact, reading, kept in _noted("kept"):
        readings, builds = files.setdefault(file, ({}, {}))
        if readings.setdefault(fact, reading) != reading:
            raise ValueError(f"{file}: two readings are called {fact}: each would forget what the other found")
        builds.setdefault(build, {})[fact] = kept
    if not files:  # nothing was run
        return []
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in files:
            path.unlink()
    for file, (readings, builds) in files.items():
        one = functools.partial(json.dumps, separators=(",", ":"), sort_keys=True)
        lines = ",\n".join(f"  {json.dumps(build)}: {one(builds[build])}" for build in sorted(builds))
        text = f'{{\n"readings": {json.dumps(readings, sort_keys=True)},\n"builds": {{\n{lines}\n}}\n}}\n'
        (FOLDER / f"{file}.json").write_text(text, encoding="utf-8")
    return [FOLDER / f"{file}.json" for file in sorted(files)]


def that_ask(items: list[Any]) -> list[Any]:
    """Of tests those in files that import something of compiled.py, here or in another process."""
    files = {item.path for item in items}
    asking = {
        path for path in files if re.search(r"from compiled import|\(.compiled.\)", path.read_text(encoding="utf-8"))
    }
    return [item for item in items if item.path in asking or item.name == "test_with_the_newest_triton"]
