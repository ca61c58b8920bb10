"""The catalog of this process: what discovery finds at first use, and what `register` adds and takes back."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from registry.contract.declared import check_declaration
from registry.contract.variant import Variant
from registry.dispatch.discovery import Catalog, discover
from registry.errors import DeclarationError, DuplicateVariant, RegistryError
from registry.forks import in_child, new_lock
from registry.signals import held_back

WAIT_S = 120.0
"""How long a thread waits for another one that loads the plugins: an import of theirs may wait for this thread."""


class _Lazy:
    """The process-wide catalog: found at first use, grown by `register`, safe to ask for from any thread.

    Plugins' code runs while `_lock` is held, and may call back, or wait for an import in which another thread asks for
    this very lock. So `register` takes it only to begin a discovery, and nobody waits for ever.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._swap = new_lock()
        self._catalog: Catalog | None = None
        self._finder: int | None = None
        """The thread that loads the plugins, while it does."""
        self._torn = False
        """Whether that thread is gone, and has left modules half made behind: this process is a fork from then."""
        self._by_plugin: list[Variant] = []
        """What the plugin that is being loaded has registered."""
        self._waiting: list[tuple[Variant, str]] = []
        """What was registered before the catalog was there."""
        self._added: dict[str, int] = {}
        """What `register` added, with its number among those of its name."""
        self._times: Counter[str] = Counter()

    def get(self) -> Catalog:
        catalog = self._catalog
        return self._find() if catalog is None else catalog

    def _find(self) -> Catalog:
        if self._finder == threading.get_ident():
            raise RegistryError(
                "a plugin asks for the registry's variants while plugins are being loaded: "
                "it may call registry.register there, and ops later"
            )
        if self._torn:
            raise RegistryError(
                "this process was forked while another thread was loading plugins, whose modules are half made here: "
                "call registry.variants() once before threads start, or before the fork"
            )
        if not self._lock.acquire(timeout=WAIT_S):
            raise RegistryError(
                f"another thread has been loading plugins for {WAIT_S:g} s, and may be waiting for this one: call "
                "registry.variants() once before threads start, and no op in the body of a module"
            )
        try:
            catalog = self._catalog
            if catalog is None:
                self._finder = threading.get_ident()
                with held_back() as interrupted:
                    try:
                        found = discover(self._by_plugin)
                    finally:
                        self._finder = None
                    with self._swap:
                        catalog = self._catalog = self._with_waiting(found)
                if interrupted:
                    raise KeyboardInterrupt
            return catalog
        finally:
            self._lock.release()

    def in_child(self) -> None:
        """Who loads plugins in the process that was forked does not go on here, unless it is who forked."""
        if self._finder not in (None, threading.get_ident()):
            self._finder, self._torn = None, True

    def _with_waiting(self, found: Catalog) -> Catalog:
        waiting, self._waiting = self._waiting, []
        for variant, origin in waiting:
            try:
                found = found.with_variant(variant, origin)
                self._count(variant.name)
            except DeclarationError as error:
                found = found.with_failure(f"{origin} of {variant.name}", error)
        return found

    def register(self, variant: Variant, origin: str, *, replace: bool = False) -> None:
        """Add a variant. While plugins are loaded, or in a module's body before that, it waits until they are."""
        if self._finder == threading.get_ident():
            self._by_plugin.append(variant)
            return
        if self._catalog is None and (self._finder is not None or _importing()):
            check_declaration(variant)
            with self._swap:
                if self._catalog is None:
                    if replace:
                        self._waiting = [(v, o) for v, o in self._waiting if v.name != variant.name]
                    self._waiting.append((variant, origin))
                    return
        catalog = self.get()
        with self._swap:
            catalog = self._catalog or catalog
            known = catalog.variants.get(variant.name)
            if known is not None and known.origin == origin and variant.name in self._added:
                if not replace:
                    raise DuplicateVariant(variant.name, origin, origin, "replace=True puts this one in its place")
                catalog = _without(catalog, variant.name)
            self._catalog = catalog.with_variant(variant, origin)
            self._count(variant.name)

    def _count(self, name: str) -> None:
        self._times[name] += 1
        self._added[name] = self._times[name]

    def add_tables(self, tables: Iterable[tuple[str, Path]]) -> bool:
        """Add tables of a plugin that nobody installed; whether there was one that is not known yet."""
        known = self.get()
        with self._swap:
            before = known = self._catalog or known
            for origin, path in tables:
                if path not in [there for _, there in known.tables]:
                    known = known.with_tables(origin, [path])
            self._catalog = known
            return known is not before

    def registrations(self) -> dict[str, int]:
        """What `register` added, with its number among those of its name: another of that name may do otherwise."""
        return dict(self._added)

    def unregister(self, name: str) -> None:
        """Take back what `register` added, and nothing else. A name that is not there is gone already."""
        with self._swap:
            self._waiting = [(variant, origin) for variant, origin in self._waiting if variant.name != name]
        catalog = self.get()
        with self._swap:
            catalog = self._catalog or catalog
            if name in catalog.variants and name not in self._added:
                where = catalog.variants[name].origin
                raise DeclarationError(
                    f"unregister: got {name!r}, which {where} declares; allowed: what registry.register added"
                )
            self._catalog = _without(catalog, name)
            self._added.pop(name, None)

    def take_out(self, name: str) -> bool:
        """Make room for a stand-in, whoever declares that name; whether `register` did. For the conformance kit."""
        self.get()
        with self._swap:
            self._catalog = _without(self.get(), name)
            return name in self._added

    def put_back(self, variant: Variant, added: bool) -> None:
        """Undo `take_out`."""
        with self._swap:
            self._catalog = self.get().with_variant(variant, variant.origin)
            if added:
                self._count(variant.name)


def _without(catalog: Catalog, name: str) -> Catalog:
    return replace(catalog, variants={n: v for n, v in catalog.variants.items() if n != name})


def _importing() -> bool:
    """Whether a module's body is being run, in which a discovery would find that module half made."""
    specs = [getattr(module, "__dict__", {}).get("__spec__") for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)


catalog = _Lazy()
in_child(catalog.in_child)
