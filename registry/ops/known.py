"""Finds the ops, each by its folder here, and changes what is known to all of them: variants and tables."""

from __future__ import annotations

import importlib
import pkgutil

from registry import garbage, ops
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.plan_cache import forget_plans
from registry.dispatch.quarantine import quarantine
from registry.dispatch.tried import tried
from registry.errors import InvalidArgument, shown
from registry.ops.op import OPS, Op, op_named

__all__ = ["all_ops", "op_named", "register", "reload_tables", "unregister"]

REGISTERED = "registry.register"


def _find() -> None:
    """Import every op at once, so that declarations and tables of each can be read; what is heavy comes later."""
    with garbage.none_looked_for():
        for module in pkgutil.iter_modules(ops.__path__):
            if module.ispkg:
                importlib.import_module(f"registry.ops.{module.name}")


_find()


def all_ops() -> dict[str, Op]:
    """Every op by name."""
    return dict(OPS)


def register(variant: Variant, *, replace: bool = False) -> Variant:
    """Add a variant for the life of the process, as from a notebook. `replace=True` replaces one added before."""
    if not isinstance(variant, Variant):
        raise InvalidArgument("variant", shown(variant), 'a Variant("vendor.name", op=..., run=..., requires=...)')
    op_named(variant.op)
    catalog.register(variant, REGISTERED, replace=replace)
    _forget(variant.name)
    return variant


def unregister(variant: Variant | str) -> None:
    """Take back a variant that `register` added: the variant, or its name."""
    name = variant.name if isinstance(variant, Variant) else variant
    if not isinstance(name, str):
        raise InvalidArgument("variant", shown(variant), "a Variant that was registered, or its name")
    catalog.unregister(name)
    _forget(name)


def _forget(variant: str) -> None:
    """Drop what was found out about the variant that had this name until now."""
    tried.drop(variant)
    quarantine.drop(variant)
    forget_plans()


def reload_tables() -> None:
    """Read all dispatch tables again; on an error the tables in force stay as they are."""
    from registry.dispatch import in_force  # reads YAML: not for an import

    in_force.reload()
    forget_plans()
