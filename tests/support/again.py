"""Runs a test file once more in a process of its own: under Triton's interpreter, or with another Triton.

A kernel is bound to the interpreter or to the compiler on import, so one process cannot have both; nor two Tritons.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NEWEST = os.environ.get("KREG_NEWEST_TRITON", "")
_WITHIN = "KREG_TESTS_NEWEST_WITHIN"

needs_newest_triton = pytest.mark.skipif(
    not NEWEST or _WITHIN in os.environ, reason="KREG_NEWEST_TRITON names no folder, or this is the run with it"
)


def run_interpreted(file: str) -> str:
    """What pytest printed; its failure is this test's."""
    return _run(file, "-x", TRITON_INTERPRET="1")


def run_with_newest_triton(file: str, only: str = "") -> str:
    """The same with the Triton in KREG_NEWEST_TRITON, of which the run does not start another."""
    if not Path(NEWEST, "triton", "__init__.py").is_file():
        pytest.fail(f"KREG_NEWEST_TRITON={NEWEST} holds no triton: `make test` installs one there", pytrace=False)
    path = os.pathsep.join(filter(None, (NEWEST, os.environ.get("PYTHONPATH", ""))))
    return _run(file, *(("-k", only) if only else ()), PYTHONPATH=path, **{_WITHIN: "1"})


def _run(file: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, file]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
