"""Every error the registry raises on purpose. Each says what it got and what would have been allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Summarised(Protocol):
    """What an error needs of a Problem, which this module, below all others, cannot import."""

    def summary(self) -> str: ...


def _again(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An error with its message as it was; `__init__` would ask for what the message was made of."""
    return kind.__new__(kind, *args)


class Portable(Exception):
    """An exception that can be pickled whatever its `__init__` takes, so that a pool of processes can hand it on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), dict(self.__dict__)


class RegistryError(Portable):
    """Base of all errors raised by the registry."""


WIDEST = 200


def shown(value: object) -> str:
    """The repr of what a caller passed, for the text of an error: short, printable, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}, which cannot be shown"
    text = text if text.isprintable() else repr(" ".join(text.split()))[1:-1]
    return text if len(text) <= WIDEST else text[:WIDEST] + "..."


class InvalidArgument(RegistryError, ValueError):
    """A call that no kernel could answer: names the argument, what it got and what is allowed."""

    def __init__(self, argument: str, got: Any, allowed: str) -> None:
        self.argument, self.got, self.allowed = argument, got, allowed
        # By this name: torch.compile cannot trace the `__init__` of an exception, and would say so in place of this.
        self.args = (f"{argument}: got {got if isinstance(got, str) else shown(got)}; allowed: {allowed}",)


class UnknownVariant(RegistryError, LookupError):
    """A variant name that nothing declares."""

    def __init__(self, name: str, op: str, known: Sequence[str], failed: Sequence[str] = ()) -> None:
        self.name, self.op, self.known, self.failed = name, op, tuple(known), tuple(failed)
        whose = "any op" if op == "any" else f"op {op!r}"
        close = difflib.get_close_matches(name, self.known) if isinstance(name, str) else []
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        lost = f"what failed to load may have it: {'; '.join(failed)}; " if failed else ""
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(f"no variant {shown(name)} of {whose}; {lost}{meant}known: {listed}")


class UnknownOp(RegistryError, LookupError):
    """An op name that the registry does not have."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no op {name!r}; known: {', '.join(sorted(known))}")


class IllegalVariant(RegistryError, ValueError):
    """A variant was asked for by name but may not run this problem. Never answered by a fallback."""

    def __init__(self, variant: str, problem: Summarised, reasons: Sequence[Any]) -> None:
        self.variant, self.reasons = variant, tuple(reasons)
        self.problem: Any = problem
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"variant {variant!r} cannot run {problem.summary()}:{lines}")


class NoLegalVariant(RegistryError, RuntimeError):
    """No variant may run the problem. Lists every variant with all of its reasons."""

    def __init__(self, problem: Summarised, reasons: Mapping[str, Sequence[Any]]) -> None:
        self.problem: Any = problem
        self.reasons = {name: tuple(found) for name, found in reasons.items()}
        lines = []
        for name, found in sorted(self.reasons.items()):
            lines.append(f"\n  {name}")
            lines.extend(f"\n    - {reason}" for reason in found)
        super().__init__(f"no legal variant for {problem.summary()}:{''.join(lines) or ' no variant is registered'}")


class DeclarationError(RegistryError, ValueError):
    """A Variant, Requires or Design that cannot be right, found when it is declared."""


class DuplicateVariant(DeclarationError):
    """Two variants of one name: names both origins."""

    def __init__(self, name: str, first: str, second: str, hint: str = "") -> None:
        self.name, self.first, self.second = name, first, second
        super().__init__(f"variant {name!r} is declared twice: by {first} and by {second}{f'; {hint}' if hint else ''}")


class KernelDoesNotFit(RegistryError, RuntimeError):
    """For kernels outside Triton: raise it when a kernel fails to compile or fit, before anything was written."""


class CaptureError(RegistryError, RuntimeError):
    """Something that must not happen while a CUDA graph is being captured (compiling, tuning) was asked for."""


class DeviceComplaint(RegistryError, RuntimeError):
    """What kernels found wrong in device memory since the last `registry.check()`. Results since then are suspect."""

    def __init__(self, complaints: Sequence[str]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("; ".join(self.complaints))


class TableError(RegistryError, ValueError):
    """A dispatch table or errata file that cannot be used: which file, line and value, and what is wrong with it."""

    def __init__(self, file: str, line: int, path: str, problem: str, code: str = "malformed") -> None:
        self.file, self.line, self.path, self.problem, self.code = file, line, path, problem, code
        super().__init__(f"{file}:{line}: {path}: {problem}")
