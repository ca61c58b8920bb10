"""Tests that need a process of their own: under Triton's interpreter, or with another Triton.

A kernel is bound to the interpreter or to the compiler on import, so one process cannot have both; nor two Tritons.
test_again.py runs each kind once more, all in one process, which imports torch once:

- a file that asks for `INTERPRETED` is run with TRITON_INTERPRET=1, where it defines other tests;
- a file that says `WITH_NEWEST_TRITON = r"..."` is run with the Triton in KREG_NEWEST_TRITON, as to the tests whose
  names that pattern is found in.

One of them alone: `TRITON_INTERPRET=1 pytest FILE`, `PYTHONPATH=.venv/triton-newest pytest FILE`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import forked
import pytest
from ran import printed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEWEST = os.environ.get("KREG_NEWEST_TRITON", "")
_WITHIN = "KREG_TESTS_NEWEST_WITHIN"
WITHIN_ANOTHER = _WITHIN in os.environ or INTERPRETED
_TESTS = Path(__file__).parents[1]

needs_newest_triton = pytest.mark.skipif(
    not NEWEST or _WITHIN in os.environ or sys.version_info < (3, 11),
    reason="KREG_NEWEST_TRITON names no folder, this is the run with it, or it is made for Python 3.11 and newer",
)


def files_that(pattern: str) -> list[str]:
    """The test files with a line that begins so; the largest first, which take longest, so that parts are alike."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted(_TESTS.rglob("test_*.py"))}
    asking = [path for path, text in found.items() if re.search(f"^{pattern}", text, re.M)]
    return [str(path) for path in sorted(asking, key=lambda path: -len(found[path]))]


def run_interpreted(*files: str) -> str:
    """What pytest printed; its failure is this test's."""
    return _run(*files, TRITON_INTERPRET="1")


def run_with_newest_triton(*files: str, **environment: str) -> str:
    """The same with the Triton in KREG_NEWEST_TRITON."""
    if not Path(NEWEST, "triton", "__init__.py").is_file():
        pytest.fail(f"KREG_NEWEST_TRITON={NEWEST} holds no triton: `make test` installs one there", pytrace=False)
    path = os.pathsep.join(filter(None, (NEWEST, os.environ.get("PYTHONPATH", ""))))
    return _run(*files, PYTHONPATH=path, **{_WITHIN: "1"}, **environment)


def chosen(items: list[pytest.Item]) -> list[pytest.Item]:
    """In the run with the newest Triton those that a file chose for it."""
    if _WITHIN not in os.environ:
        return items
    patterns = ((item, getattr(getattr(item, "module", None), "WITH_NEWEST_TRITON", "")) for item in items)
    return [item for item, pattern in patterns if re.search(pattern, item.name)]


def _run(*files: str, **environment: str) -> str:
    command = (forked.python(), "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-x", "-rs", *files)
    said = printed(*command, env={**os.environ, **environment})
    assert " passed" in said
    return said
