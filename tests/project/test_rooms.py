"""The order of the rooms: each imports only what comes before it, and nothing imports in a circle.

All import statements count: those inside of functions, which run later, and those for types, which never run.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import registry

ROOT = Path(__file__).parents[2]
ROOMS = [
    *("version", "installed", "errors", "forks", "signals", "notices", "garbage", "disk"),
    *("contract", "hookspecs", "toolbox", "tables", "dispatch", "ops", "tuning", "report", "profiling", "testing"),
    *("warming", "trying", "doctor", "pytest_plugin", "cli"),
    "",  # registry/__init__.py, the front door
    *("compat", "integrations"),  # doors for other people's code
]
"""The folders and files of the registry, those that need nothing first."""
DOORS = ("compat", "integrations")
"""Rooms that are opt-in: nothing imports them, and they do not import each other."""
OLDEST = (3, 10)


def files() -> dict[str, Path]:
    """Each module of the package by its name."""
    found = {}
    for name, folder in (("registry", ROOT / "registry"), ("registry.plugins", ROOT / "plugins")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = path
    return found


@functools.cache
def imports(name: str) -> list[tuple[str, str]]:
    """What a module imports of the package, lazily and for types too, and where."""
    path, found = FILES[name], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write imports in full"
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
            asked = [full if full in FILES else str(node.module) for full in asked]
        else:
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        found += [(module, where) for module in asked if module in FILES and module != name]
    return found


FILES = files()
PLUGINS = [name for name in FILES if name.startswith("registry.plugins.")]
GENERIC = [name for name in FILES if not name.startswith("registry.plugins")]


def part(name: str, depth: int) -> str:
    """The part of a module's name at a depth: part("registry.ops.matmul.op", 2) is "matmul"."""
    return (*name.split("."), *[""] * depth)[depth]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other: whatever is left when those without imports go, and go again."""
    left = {name: set(wanted) for name, wanted in graph.items()}
    for turned in (False, True):
        if turned:  # and what only leads into a circle, by going through it backwards
            left = {name: {other for other in left if name in left[other]} for name in left}
        while ends := {name for name in left if not left[name]}:
            left = {name: wanted - ends for name, wanted in left.items() if name not in ends}
    return [[name, *sorted(left[name])] for name in sorted(left)]


def test_every_room_has_its_place():
    assert {part(name, 1) for name in GENERIC} == set(ROOMS)


def test_contributing_shows_these_rooms_in_this_order():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| room in `registry/`")[2]
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    shown = [[name.rstrip("/") for name in re.findall(r"`([^`]+)`", row)] for row in rows]
    assert {name for row in shown for name in row} == {room for room in ROOMS if room}
    places = [sorted(ROOMS.index(name) for name in row) for row in shown]
    assert [place for row in places for place in row] == sorted(place for row in places for place in row)


def test_no_room_imports_a_later_one():
    for name in GENERIC:
        for to, where in imports(name):
            assert ROOMS.index(part(to, 1)) <= ROOMS.index(part(name, 1)), f"{where} imports {to}"


def test_nothing_imports_a_door():
    for name in FILES:
        doors = {to for to, _ in imports(name) if part(to, 1) in DOORS and part(to, 1) != part(name, 1)}
        assert not doors, f"{name} imports {doors}"


def test_no_import_circle():
    assert not circles({name: {to for to, _ in imports(name)} for name in FILES})


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"], ["c", "b"]]


def test_an_op_is_imported_by_itself_and_the_front_door_alone():
    folders = {f"registry.ops.{path.parent.name}" for path in (ROOT / "registry" / "ops").glob("*/op.py")}
    assert len(folders) > 1
    for name in GENERIC:
        for to, where in imports(name):
            op = ".".join(to.split(".")[:3])
            if op in folders and name not in {"registry"}:
                assert name == op or name.startswith(op + "."), f"{where} imports {to}"


def test_a_plugin_imports_the_registry_and_itself_alone():
    for name in PLUGINS:
        for to, where in imports(name):
            allowed = (
                to in ("registry", "registry.errors")
                or part(to, 1) in ("contract", "toolbox")
                or (part(to, 1) == "ops" and part(to, 3))
                or (part(to, 1) == "plugins" and part(to, 2) == part(name, 2))
            )
            assert allowed, f"{where} imports {to}"


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Texts that stand alone as a statement: they say something and do nothing."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_generic_code_names_no_variant():
    variants = set(registry.variants())
    for name in GENERIC:
        tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
        texts = {node for node in ast.walk(tree) if isinstance(node, ast.Constant)} - docstrings(tree)
        assert not {node.value for node in texts} & variants, name


def test_no_two_public_classes_share_a_name():
    folders = ("registry", "plugins", "tools", "benchmarks")
    defined: dict[str, list[str]] = {}
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(defined) > 90
    assert not {name: places for name, places in defined.items() if len(places) > 1}


@pytest.mark.parametrize("folder", ["registry", "plugins", "tests", "tools", "benchmarks", "examples"])
def test_the_oldest_python_can_read_it(folder):
    for path in (ROOT / folder).rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)
