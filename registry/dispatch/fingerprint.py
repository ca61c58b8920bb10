"""A hash of the code behind a variant, so that a measurement is not taken for one of a kernel changed since."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from registry.contract.variant import Variant
from registry.dispatch.discovery import BUILTIN_PACKAGE

MOST_FILES = 200


def fingerprint_of(variant: Variant) -> str:
    """12 hex digits over the variant's files: its module, or its whole package; "" where nothing is known."""
    paths = files_of(variant)
    return _hash_files(tuple(paths)) if paths else _hash_code(_bare(variant))


def files_of(variant: Variant) -> list[Path]:
    """The files of the variant's plugin; none where they are not known."""
    return _files(variant.origin, getattr(_bare(variant), "__module__", "") or "")


def _bare(variant: Variant) -> Any:
    """The function that runs, without what is around it."""
    run: Any = variant.run
    while isinstance(run, functools.partial):
        run = run.func
    return inspect.unwrap(run) if callable(run) else run


def _files(origin: str, module: str) -> list[Path]:
    """The plugin's own files: those of its package, or the one file of a plugin module."""
    plugin = origin.rpartition("(")[2].rstrip(")").partition(":")[0]  # of "acme (acme_kernels:plugin)", or the module
    ours = module.startswith("registry.") and not module.startswith(f"{BUILTIN_PACKAGE}.")  # `run` made by the toolbox
    names = [name for name in (plugin, "" if ours else module) if name in sys.modules]
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


_LAYOUT = frozenset((tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER))


@functools.lru_cache(maxsize=4 * MOST_FILES)
def _code_of(source: bytes) -> bytes:
    """The tokens of a source without what cannot change a kernel: comments, docstrings, imports (whatever a kernel
    imports has a home of its own, and may move), marks of `toolbox.scopes`, which a plain build leaves out, line breaks
    inside of brackets and commas before a closing one.

    Not the syntax tree, which every Python spells in its own way: the hash is the same on all of them.
    """
    try:
        tree = ast.parse(source)
        tokens = [t for t in _whole_strings(source) if t.type not in _LAYOUT]
    except (SyntaxError, tokenize.TokenError):
        return source
    lines = source.splitlines()
    dropped = [node for node in ast.walk(tree) if _changes_nothing(node) and _alone(node, lines)]
    rows = {row for node in dropped for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    kept = [token for token in tokens if token.start[0] not in rows or token.type in (tokenize.INDENT, tokenize.DEDENT)]
    words: list[str] = []
    for token in kept:
        if token.string in (")", "]", "}") and words and words[-1] == ",":
            words.pop()
        marks = {tokenize.NEWLINE: "\n", tokenize.INDENT: "\t", tokenize.DEDENT: "\b"}
        words.append(marks.get(token.type, token.string))
    return "\0".join(words).encode()


_BEGIN = {getattr(tokenize, name, -1) for name in ("FSTRING_START", "TSTRING_START")}
_END = {getattr(tokenize, name, -1) for name in ("FSTRING_END", "TSTRING_END")}


def _whole_strings(source: bytes) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a source, each f-string as one, as before Python 3.12, which takes them apart."""
    lines = io.TextIOWrapper(io.BytesIO(source), "utf-8").readlines()
    begun: list[tokenize.TokenInfo] = []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type in _BEGIN:
            begun.append(token)
        elif begun and token.type in _END:
            first = begun.pop()
            if not begun:
                text = _between(lines, first.start, token.end)
                yield tokenize.TokenInfo(tokenize.STRING, text, first.start, token.end, first.line)
        elif not begun:
            yield token


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    rows = lines[start[0] - 1 : end[0]]
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][start[1] :]
    return "".join(rows)


def _changes_nothing(node: ast.AST) -> TypeGuard[ast.stmt]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return True
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("scopes.enter", "scopes.leave")


def _alone(node: ast.stmt, lines: list[bytes]) -> bool:
    """Whether nothing else stands on the statement's lines."""
    first, last = lines[node.lineno - 1], lines[(node.end_lineno or node.lineno) - 1]
    after = last[node.end_col_offset :].strip()
    return not first[: node.col_offset].strip() and (not after or after.startswith(b"#"))


def _hash_code(run: Any) -> str:
    code = getattr(run, "__code__", None) or getattr(getattr(type(run), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return ""
    return hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest()[:12]
