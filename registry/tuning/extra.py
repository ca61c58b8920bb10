"""Variants, and tables, of no installed plugin: a file or a module named on the command line, such as peers to be timed
beside."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from registry.contract.variant import Variant
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.discovery import Catalog, PluginFailed, collect, contained, new_manager
from registry.dispatch.fingerprint import fingerprint_of
from registry.dispatch.plan_cache import forget_plans
from registry.errors import InvalidArgument
from registry.hookspecs import hookimpl
from registry.notices import told

T = TypeVar("T")
_FROM: dict[str, str] = {}
"""The file or module that brought a variant here, by its name."""


def as_arguments(variant: Variant) -> tuple[str, ...]:
    """Arguments by which another process knows this variant, too, if no installed plugin brings it."""
    return ("--plugin", _FROM[variant.name]) if variant.name in _FROM else ()


def load_plugins(names: Iterable[str]) -> list[Variant]:
    """Import each file (*.py) or module and take in what its hooks give, as if it were installed: variants, once, and
    tables. A variant whose name is taken would be measured, or checked, by the other's code: it is refused unless the
    code is the same."""
    added, tables = [], list[tuple[str, Path]]()
    for name in names:
        module = _module(name)
        for hook in _unmarked(module):
            _warn(f"{name}: {hook} is not marked with @registry.hookimpl: once installed it would not load")
            hookimpl(getattr(module, hook))  # and is called all the same
        found = _own_code(name, functools.partial(collect, Catalog(), new_manager(), module, name))
        if not found.variants and not found.tables:  # no error: peers may be named that are not installed here
            _warn(f"{name}: registry_variants() gives no variants, so that nothing of this plugin takes part")
        tables += found.tables
        for variant in found.variants.values():
            origin, known = _origin(name), catalog.get().variants.get(variant.name)
            if known is None:
                catalog.register(variant, name)
                _FROM[variant.name] = origin
                added.append(variant)
            elif _FROM.get(variant.name) != origin and fingerprint_of(known) != fingerprint_of(variant):
                other = _FROM.get(variant.name, "an installed plugin")
                got = f"{name}: {variant.name}, which {other} declares with other code"
                raise InvalidArgument("plugin", got, "variants of names that are not taken")
    if tables and catalog.add_tables(tables):
        in_force.expire()
        forget_plans()
    return added


@functools.cache
def _warn(text: str) -> None:
    """Once, however often a command loads its plugins."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _unmarked(module: ModuleType) -> list[str]:
    """The hooks that a module has without a mark."""
    manager = new_manager()
    there = [hook for hook in vars(manager.hook) if callable(getattr(module, hook, None))]
    return [hook for hook in there if manager.parse_hookimpl_opts(module, hook) is None]


def _origin(name: str) -> str:
    return str(Path(name).resolve()) if name.endswith(".py") else name


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return _own_code(name, lambda: importlib.import_module(name))
    path = Path(name).resolve()
    label = f"registry_extra_{path.stem}_{abs(hash(str(path))):x}"
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidArgument("plugin", name, "a readable Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    if str(path.parent) not in sys.path:  # for modules beside the file; last, so that they stand in for no others
        sys.path.append(str(path.parent))
    try:
        _own_code(name, functools.partial(spec.loader.exec_module, module))
    except BaseException:
        del sys.modules[label]
        raise
    return module


def _own_code(name: str, run: Callable[[], T]) -> T:
    """What a plugin's code gives. Whatever it raises is an error that names the plugin."""
    try:
        with contained():
            return run()
    except PluginFailed as failed:
        raise InvalidArgument("plugin", name, f"one that loads ({told(failed.error)})") from failed.error
