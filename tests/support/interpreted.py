"""Runs a test file once more with TRITON_INTERPRET=1, in a process of its own: interpreting and compiling cannot share
one, for a kernel is bound to one of them on import."""

from __future__ import annotations

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file: str) -> str:
    """What pytest printed; its failure is this test's."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
