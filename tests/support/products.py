"""What tests of the Gluon products ask of each of them, without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from compiled import reading, resources
from launch_support import bound, boxes, fake_gpu

from registry import Target, Variant
from registry.ops.matmul.calls import MATMUL
from registry.ops.matmul.problem import MatmulProblem

H200 = Target.named("H200")


def product(m: int, n: int, k: int, layout: str = "nt", **more: Any) -> MatmulProblem:
    return MatmulProblem.of_shape(H200, m=m, n=n, k=k, layout=layout, **more)


def call_of(host: Any, problem: MatmulProblem, config: Any) -> Any:
    """Its launch, the first of several."""
    call, *_ = host.call(problem, config, MATMUL.operands(problem), 1.0)
    return call


def fitting(variant: Variant, problem: MatmulProblem, config: Any) -> tuple[Any, Any]:
    """The first build of a config, which is legal, fits what it declares, and waits for no wgmma; and its switches."""
    assert not variant.reasons(problem) and not list(variant.requires.rule(problem, config))
    build, *_ = variant.builds(problem, config)
    found, declared = resources(build, problem.target), variant.requires
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"
    most = min(found.shared + 512, problem.target.shared_memory)
    assert found.shared <= declared.shared_memory(problem, config) <= most
    assert found.registers * found.threads <= declared.registers(problem, config) <= 65536
    return found, build.constants["cfg"]


def declared_configs_are_legal(
    variant: Variant,
    host: Any,
    candidates: Callable[[Any], list[Any]],
    most: int,
    draw: Callable[[random.Random], MatmulProblem],
) -> None:
    """Of problems drawn: the first so many that are worth trying are what is declared, all fit, and no grid is too
    large."""
    chance = random.Random(0)
    for problem in (draw(chance) for _ in range(200)):
        found = candidates(problem)
        assert found and not variant.reasons(problem) and variant.legal_configs(problem) == found[:most], problem
        for one in found:
            assert not list(variant.requires.rule(problem, one)), problem
            assert variant.requires.shared_memory(problem, one) <= problem.target.shared_memory, problem
            call = call_of(host, problem, one)
            assert call.grid[0] * call.cluster <= problem.target.sm_count


def gpu_for(*kernels: Any) -> Any:
    """A fixture: the GPU that is none, for launches of these kernels."""
    return pytest.fixture(lambda monkeypatch: (yield from fake_gpu(monkeypatch, *kernels)))


def launched(cuda: Any, call: Any, formats: tuple[str, ...], launch: Any = bound) -> tuple[Any, int, int]:
    """The boxes of a launch, the size of its grid, and that of its clusters."""
    return boxes(cuda, launch, call, *formats), cuda.last.grid[0], cuda.last.cluster


@reading
def _meetings(found):
    return found.ptx.count("barrier.cluster.wait")


meetings = _meetings
"""How often CTAs of a cluster wait for each other."""
