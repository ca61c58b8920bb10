"""Variants whose kernels failed to compile or to fit, and how such a failure is told from others."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping

from registry import notices
from registry.contract.capability import Reason
from registry.contract.problem import Problem
from registry.errors import KernelDoesNotFit

Held = Mapping[tuple[str, Hashable], str]
"""(variant, problem class) -> the error."""


class Quarantine:
    """Variants whose kernel failed to compile or to fit, by problem class. Kept for the life of the process, or
    until another variant is registered in its place."""

    def __init__(self) -> None:
        self.held: Held = {}
        """Replaced, never changed, so that a decision can keep what it was made under."""

    def add(self, variant: str, problem: Problem, error: BaseException) -> None:
        text = notices.what_failed(error)
        self.held = {**self.held, (variant, problem.kind()): text}
        notices.notice(f"{variant} is quarantined for {problem.summary()}: {text}")

    def reason(self, variant: str, problem: Problem) -> Reason | None:
        return quarantine_reason(self.held, variant, problem)

    def items(self) -> list[tuple[str, Hashable, str]]:
        return [(variant, kind, text) for (variant, kind), text in self.held.items()]

    def drop(self, variant: str) -> None:
        """Let go of a variant of this name: another one has it from now on."""
        self.held = {key: text for key, text in self.held.items() if key[0] != variant}

    def clear(self) -> None:
        self.held = {}


def quarantine_reason(held: Held, variant: str, problem: Problem) -> Reason | None:
    """Why a variant is kept from a problem, if it is."""
    text = held.get((variant, problem.kind())) if held else None
    return Reason("quarantine", "compiles", text, "a kernel that compiles and fits") if text else None


quarantine = Quarantine()


@functools.cache
def compile_failures() -> tuple[type[BaseException], ...]:
    """The errors that mean 'did not compile or fit, nothing was launched'. Triton is only asked if it is loaded."""
    found: list[type[BaseException]] = [KernelDoesNotFit]
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return tuple(found)
    return (*found, CompilationError, OutOfResources, PTXASError)


def did_not_compile(error: BaseException) -> bool:
    """Whether an error means that a kernel did not compile or fit, so that nothing was launched.

    A pass of Triton's compiler that fails raises a plain RuntimeError, which only its text tells from others.
    """
    return isinstance(error, compile_failures()) or (
        isinstance(error, RuntimeError) and str(error).startswith("PassManager::run failed")
    )
