"""kernel-registry: one front door, many kernels.

import registry
out = registry.attention(q, k, v, causal=True)  # runs the fastest legal kernel for this GPU, dtype and shape
print(registry.attention.explain(q, k, v, causal=True))  # which one, and why not the others
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from registry.contract.capability import Design, Reason, Requires
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog as _catalog
from registry.dispatch.decision import Candidate, Decision
from registry.dispatch.plan import Plan
from registry.dispatch.plan_cache import forget_plans
from registry.dispatch.scope import prefer, record, use
from registry.errors import (
    CaptureError,
    DeclarationError,
    DeviceComplaint,
    DuplicateVariant,
    IllegalVariant,
    InvalidArgument,
    KernelDoesNotFit,
    NoLegalVariant,
    RegistryError,
    UnknownOp,
    UnknownVariant,
)
from registry.installed import warn_of_foreign as _warn_of_foreign
from registry.ops.known import register, reload_tables, unregister
from registry.ops.op import OPS as _OPS
from registry.ops.op import Op
from registry.toolbox.complaints import check
from registry.version import __version__

if TYPE_CHECKING:
    from registry.hookspecs import hookimpl
    from registry.ops.attention.op import attention
    from registry.ops.attention_varlen.op import attention_varlen
    from registry.ops.grouped_mm.op import grouped_mm
    from registry.ops.matmul.op import matmul
    from registry.trying import try_out
    from registry.warming import warm

_warn_of_foreign(__path__[0])

_LOADED_WHEN_USED = {"hookimpl": "registry.hookspecs", "try_out": "registry.trying", "warm": "registry.warming"}
"""Names whose modules bring what most programs never need: pluggy, process pools."""


def variants() -> dict[str, Variant]:
    """Every known variant, by name."""
    return dict(_catalog.get().variants)


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_USED:
        return getattr(import_module(_LOADED_WHEN_USED[name]), name)
    if name in _OPS:  # an op is one folder: it needs no line here, but for those who check types
        return globals().setdefault(name, _OPS[name])
    raise AttributeError(f"module 'registry' has no attribute {name!r}")


__all__ = [
    "Candidate",
    "CaptureError",
    "Decision",
    "DeclarationError",
    "DeviceComplaint",
    "Design",
    "DuplicateVariant",
    "IllegalVariant",
    "InvalidArgument",
    "KernelDoesNotFit",
    "NoLegalVariant",
    "Op",
    "Plan",
    "Problem",
    "Reason",
    "RegistryError",
    "Requires",
    "Target",
    "UnknownOp",
    "UnknownVariant",
    "Variant",
    "__version__",
    "attention",
    "attention_varlen",
    "check",
    "forget_plans",
    "grouped_mm",
    "hookimpl",
    "matmul",
    "prefer",
    "record",
    "register",
    "reload_tables",
    "try_out",
    "unregister",
    "use",
    "variants",
    "warm",
]
