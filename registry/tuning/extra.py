"""Variants of no installed plugin: a file or a module named on the command line, such as peers to be timed beside."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument


def load_plugins(names: Iterable[str]) -> list[Variant]:
    """Import each file (*.py) or module and register the variants that its `registry_variants()` gives, once."""
    added = []
    for name in names:
        module = _module(name)
        declare = getattr(module, "registry_variants", None)
        if declare is None:
            raise InvalidArgument("plugin", name, "a module with a function registry_variants()")
        for variant in declare():
            if variant.name not in catalog.get().variants:
                catalog.register(variant, name)
                added.append(variant)
    return added


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    label = f"registry_extra_{path.stem}_{abs(hash(str(path))):x}"
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidArgument("plugin", name, "a readable Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    spec.loader.exec_module(module)
    return module
