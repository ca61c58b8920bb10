"""Finds variants: built-ins from `registry.plugins`, third parties from entry points, notebooks through `register`.

Runs once, at first use. A plugin that fails is contained, kept with its error and shown; it never takes another along.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import threading
import traceback
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from registry.contract.capability import check_claims
from registry.contract.variant import Variant
from registry.errors import DeclarationError, DuplicateVariant, RegistryError

if TYPE_CHECKING:
    import pluggy

log = logging.getLogger("registry")

BUILTIN_PACKAGE = "registry.plugins"
ENTRY_POINT_GROUP = "kernel_registry"


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that could not be loaded, or a part of it that could not be used."""

    plugin: str
    error: str
    details: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class Catalog:
    """Everything discovery found. Immutable: registering makes a new one."""

    variants: dict[str, Variant] = field(default_factory=dict)
    tables: tuple[tuple[str, Path], ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    plugins: tuple[str, ...] = ()

    def of(self, op: str) -> dict[str, Variant]:
        """The variants of one op, by name, in alphabetical order."""
        return {name: v for name, v in sorted(self.variants.items()) if v.op == op}

    def with_variant(self, variant: Variant, origin: str) -> Catalog:
        """This catalog plus one variant; two of one name are an error that names both origins."""
        if not isinstance(variant, Variant):
            raise DeclarationError(f"{origin}: got {type(variant).__name__}; allowed: a Variant")
        check_claims(variant.requires, variant.op)
        known = self.variants.get(variant.name)
        if known is not None:
            raise DuplicateVariant(variant.name, known.origin, origin)
        return replace(self, variants={**self.variants, variant.name: replace(variant, origin=origin)})

    def with_failure(self, plugin: str, error: BaseException) -> Catalog:
        """This catalog plus one failed plugin, which is logged once, here."""
        text = f"{type(error).__name__}: {error}"
        log.warning("plugin %s failed and is left out: %s", plugin, text)
        details = "".join(traceback.format_exception(error))
        return replace(self, failures=(*self.failures, PluginFailure(plugin, text, details)))


def discover() -> Catalog:
    """Load every plugin once and collect what it declares."""
    catalog = Catalog()
    manager = new_manager()
    for name, load in _sources():
        try:
            plugin = load()
            _register_checked(manager, plugin, name)
        except Exception as error:
            catalog = catalog.with_failure(name, error)
            continue
        catalog = _collect(catalog, manager, plugin, name)
    return catalog


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the registry's hooks."""
    import pluggy

    from registry import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_commands(cli: Any) -> list[PluginFailure]:
    """Let each plugin add its commands to the command line; those that fail are reported, not raised."""
    failures = []
    for name, load in _sources():
        manager = new_manager()
        try:
            manager.register(load(), name=name)
            manager.hook.registry_commands(cli=cli)
        except Exception as error:
            failures.append(PluginFailure(name, f"{type(error).__name__}: {error}"))
    return failures


def _register_checked(manager: pluggy.PluginManager, plugin: Any, name: str) -> None:
    """Register one plugin; a hook that is misspelt, or takes arguments it cannot have, is that plugin's error alone."""
    manager.register(plugin, name=name)
    try:
        manager.check_pending()
    except Exception:
        manager.unregister(name=name)
        raise
    if not manager.get_hookcallers(plugin):
        raise DeclarationError(f"{name} has no hook: mark registry_variants with @registry.hookimpl")


def _collect(catalog: Catalog, manager: pluggy.PluginManager, plugin: Any, name: str) -> Catalog:
    """Call one plugin's hooks, on its own, so that its failure is its own."""
    hooks = manager.subset_hook_caller
    others = [p for p in manager.get_plugins() if p is not plugin]
    try:
        declared = [v for found in hooks("registry_variants", others)() for v in found]
        tables = [Path(path) for found in hooks("registry_tables", others)() for path in found]
        grown = catalog
        for variant in declared:
            grown = grown.with_variant(variant, name)
    except Exception as error:
        return catalog.with_failure(name, error)
    return replace(grown, tables=(*grown.tables, *((name, path) for path in tables)), plugins=(*grown.plugins, name))


def _sources() -> list[tuple[str, Any]]:
    """(name, loader) of every plugin, built-ins first, in a fixed order."""
    try:
        package: ModuleType = importlib.import_module(BUILTIN_PACKAGE)
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"{BUILTIN_PACKAGE} cannot be imported: kernel-registry is not installed; run: pip install -e ."
        ) from error
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    sources: list[tuple[str, Any]] = []
    for name in names:
        full = f"{BUILTIN_PACKAGE}.{name}"
        sources.append((full, lambda full=full: importlib.import_module(full)))
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        sources.append((f"{point.name} ({point.value})", point.load))
    return sources


class _Lazy:
    """The process-wide catalog: found at first use, grown by `register`, safe to ask for from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._catalog: Catalog | None = None

    def get(self) -> Catalog:
        catalog = self._catalog
        if catalog is None:
            with self._lock:
                if self._catalog is None:
                    self._catalog = discover()
                catalog = self._catalog
        return catalog

    def register(self, variant: Variant, origin: str) -> None:
        with self._lock:
            self._catalog = self.get().with_variant(variant, origin)

    def unregister(self, name: str) -> None:
        with self._lock:
            catalog = self.get()
            self._catalog = replace(catalog, variants={n: v for n, v in catalog.variants.items() if n != name})


catalog = _Lazy()
