"""What the compiler makes of a build, found once in a test session however many tests and processes ask."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import shared
import triton

from registry.toolbox import builds
from registry.toolbox.builds import Build, Resources, compile_build, gpu_target, inspect


def resources(build: Build, arch: Any = "sm90") -> Resources:
    """`inspect(compile_build(build, arch))`, with one run of ptxas instead of two: what it says is kept."""
    options = sorted((name, repr(value)) for name, value in build.options.items())
    question = f"{triton.__version__} {build.source(arch).hash()} {gpu_target(arch)} {options}"
    return pickle.loads(shared.once(question, lambda: pickle.dumps(_resources(build, arch))))


def _resources(build: Build, arch: Any) -> Resources:
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_build(build, arch)
    with _ptxas_said(said.getvalue()):
        return inspect(compiled)


@contextlib.contextmanager
def _ptxas_said(log: str) -> Iterator[None]:
    """Spare `inspect` its own run of ptxas, unless the build came from Triton's cache and ptxas has said nothing."""
    run = builds._tool
    if "ptxas info" in log:
        builds._tool = lambda name, *arguments: log if name.startswith("ptxas") else run(name, *arguments)
    try:
        yield
    finally:
        builds._tool = run
