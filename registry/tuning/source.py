"""A hash of the code behind a variant, so that a measurement is not taken for one of a kernel changed since."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

from registry.discovery import BUILTIN_PACKAGE
from registry.variant import Variant

MOST_FILES = 200


def source_hash(variant: Variant) -> str:
    """12 hex digits over the variant's files: its module, or its whole package; "" where nothing is known."""
    run: Any = variant.run
    while isinstance(run, functools.partial):
        run = run.func
    run = inspect.unwrap(run) if callable(run) else run
    paths = _files(variant.origin, getattr(run, "__module__", "") or "")
    return _hash_files(tuple(paths)) if paths else _hash_code(run)


def _files(origin: str, module: str) -> list[Path]:
    """The plugin's own files: those of its package, or the one file of a plugin module."""
    plugin = (
        origin.rpartition("(")[2].rstrip(")").partition(":")[0]
    )  # "acme (acme_kernels:plugin)" or the module itself
    names = [name for name in (plugin, module) if name in sys.modules]
    found: set[Path] = set()
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if not file or not Path(file).is_file():
            continue
        path = Path(file)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        if path.name == "__init__.py" or package.startswith(BUILTIN_PACKAGE + "."):
            found.update(sorted(path.parent.rglob("*.py"))[:MOST_FILES])
        else:
            found.add(path)
    return sorted(found)


def _hash_files(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _hash_code(run: Any) -> str:
    code = getattr(run, "__code__", None) or getattr(getattr(type(run), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return ""
    return hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest()[:12]
