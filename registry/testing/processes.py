"""The kit in a process of its own, which imports what this one does, whatever lies in the working directory."""

from __future__ import annotations

import os
import sys

_START = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_module('registry.testing', run_name='__main__')"


def command(*arguments: str) -> list[str]:
    """`python -m registry.testing`, as this process would find it."""
    return [sys.executable, "-c", _START.format(path=[place or os.getcwd() for place in sys.path]), *arguments]
