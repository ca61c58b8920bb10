"""A hash of the code behind a variant, so that a measurement is not taken for one of a kernel changed since."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import sys
import tokenize
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
        digest.update(path.name.encode() + b"\0" + _code_of(path.read_bytes()) + b"\0")
    return digest.hexdigest()[:12]


def _code_of(source: bytes) -> bytes:
    """The source without its comments, docstrings and empty lines, whose edits cost nobody a measurement. Not the
    syntax tree, which every Python spells in its own way: the hash is the same on all of them."""
    try:
        tree = ast.parse(source)
        comments = [t.start for t in tokenize.tokenize(io.BytesIO(source).readline) if t.type == tokenize.COMMENT]
    except (SyntaxError, tokenize.TokenError):
        return source
    lines: list[bytes] = source.splitlines()
    for row, column in comments:  # (columns count characters)
        lines[row - 1] = lines[row - 1].decode()[:column].encode()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            if not lines[first][: node.col_offset].strip() and not lines[last][node.end_col_offset :].strip():
                lines[first : last + 1] = [b""] * (last + 1 - first)
    return b"\n".join(line.rstrip() for line in lines if line.strip())


def _hash_code(run: Any) -> str:
    code = getattr(run, "__code__", None) or getattr(getattr(type(run), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return ""
    return hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest()[:12]
