"""What a variant that builds nothing is: the code of its plugin that it comes to (carry.py)."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any


def code_beside_declarations(variant: Any) -> str:
    """The plugin's own code, but for the hook that declares its variants, docstrings and comments. Of a plugin of one
    file it is what the variant runs, and all that this names: another variant may have other code beside it."""
    run = inspect.unwrap(variant.run)
    file = Path(inspect.getfile(run))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    for tree in trees:
        tree.body = [one for one in tree.body if getattr(one, "name", "") != "registry_variants"]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.Module)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    if files == [file]:
        roots = {getattr(one, "__qualname__", "") for one in (run, variant.prepare) if one is not None}
        trees[0].body = list(reached(trees[0].body, roots))
    return "\n".join(map(ast.unparse, trees))


def reached(body: list[ast.stmt], roots: set[str]) -> list[ast.stmt]:
    """The statements of a module that bind these names, or names that those use, and so on, and all that bind none;
    all there are, where one of the names is bound nowhere (what a function made, say)."""
    binds = [names_in(statement, (ast.Store,)) for statement in body]
    if not roots <= set().union(*binds):
        return body
    used, found = set(roots), set[int]()
    while more := {at for at, bound in enumerate(binds) if at not in found and (not bound or bound & used)}:
        found |= more
        used |= set().union(*(names_in(body[at], (ast.Load, ast.Store)) for at in more))
    return [body[at] for at in sorted(found)]


def names_in(statement: ast.stmt, how: tuple[type, ...]) -> set[str]:
    """Names that a statement of a module binds (Store), and those that it uses anywhere within (Load)."""
    found: set[str] = set()
    if ast.Store in how and isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        found.add(statement.name)
        how = tuple(one for one in how if one is not ast.Store)  # what it binds within is its own
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, how):
            found.add(node.id)
        elif isinstance(node, ast.alias) and ast.Store in how:
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not statement and ast.Store in how:
            found.add(node.name)
    return found
