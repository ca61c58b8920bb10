"""kernel-registry: one front door, many kernels.

import registry
out = registry.attention(q, k, v, causal=True)     # the fastest legal kernel for this GPU, dtype and shape
print(registry.attention.explain(q, k, v, causal=True))   # which one, and why not the others
"""

from typing import TYPE_CHECKING, Any

from registry.capability import Design, Reason, Requires
from registry.discovery import catalog as _catalog
from registry.dispatch import Candidate, Decision
from registry.errors import (
    CaptureError,
    DeclarationError,
    DuplicateVariant,
    IllegalVariant,
    InvalidArgument,
    KernelDoesNotFit,
    NoLegalVariant,
    RegistryError,
    UnknownOp,
    UnknownVariant,
)
from registry.hookspecs import hookimpl
from registry.op import Op, register, reload_tables, unregister
from registry.ops.attention import attention
from registry.ops.matmul import matmul
from registry.plans import Plan, forget_plans
from registry.problem import Problem
from registry.scope import prefer, record, use
from registry.target import Target
from registry.variant import Variant
from registry.version import __version__


def __getattr__(name: str) -> Any:
    """`registry.warm` is loaded when it is asked for: it brings process pools, which most programs never need."""
    if name == "warm":
        from registry.warming import warm

        return warm
    raise AttributeError(f"module 'registry' has no attribute {name!r}")


def variants() -> dict[str, Variant]:
    """Every variant that was found, by name."""
    return dict(_catalog.get().variants)


if TYPE_CHECKING:
    from registry.warming import warm

__all__ = [
    "Candidate", "CaptureError", "Decision", "DeclarationError", "Design", "DuplicateVariant", "IllegalVariant",
    "InvalidArgument", "KernelDoesNotFit", "NoLegalVariant", "Op", "Plan", "Problem", "Reason", "RegistryError",
    "Requires", "Target", "UnknownOp", "UnknownVariant", "Variant", "__version__", "attention", "forget_plans",
    "hookimpl", "matmul", "prefer", "record", "register", "reload_tables", "unregister", "use", "variants", "warm",
]  # fmt: skip
