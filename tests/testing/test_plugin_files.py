"""The kit holds variants of a file that nobody installed to all that it holds others to, and the file brings what an
installed plugin does."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import registry
from registry import InvalidArgument, Target
from registry.dispatch import in_force
from registry.testing import checks
from registry.tuning.extra import load_plugins

MINE = """
import registry

@registry.hookimpl
def registry_variants():
    claims = registry.Requires(arch=("sm90",), dtypes=("float32",))
    return [registry.Variant("test.of_a_file", "matmul", lambda a, b, *, config: a @ b, claims)]
"""


@pytest.mark.usefixtures("takes_back")
def test_another_process_is_told_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (variant,) = load_plugins([os.path.relpath(tmp_path / "mine.py")])
    asked = []

    def run(command, **how):
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(checks.subprocess, "run", run)
    subject = SimpleNamespace(variant=variant, target=Target.named("H100"))
    assert not checks.builds_compile_elsewhere(subject, None).complaints
    (command,) = asked
    assert command[command.index("--plugin") + 1] == str((tmp_path / "mine.py").resolve())


@pytest.mark.usefixtures("takes_back")
def test_a_name_that_is_taken_by_other_code_is_refused(tmp_path):
    """Else the kit would hold the other's code to its checks, and say that all is well."""
    for name, result in (("mine", "a @ b"), ("other", "(a @ b) * 0")):
        (tmp_path / f"{name}.py").write_text(MINE.replace("a @ b", result))
    assert len(load_plugins([str(tmp_path / "mine.py")] * 2)) == 1
    with pytest.raises(InvalidArgument, match="test.of_a_file, which .*mine.py declares with other code"):
        load_plugins([str(tmp_path / "other.py")])
    (tmp_path / "built_in.py").write_text(MINE.replace("test.of_a_file", "torch_matmul"))
    with pytest.raises(InvalidArgument, match="torch_matmul, which an installed plugin declares"):
        load_plugins([str(tmp_path / "built_in.py")])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"x"', "got str; allowed: a Variant"),
        ("None", "got NoneType; allowed: a Variant"),
        ("made", "variant 'test.of_a_file' is declared twice: by .*mine.py and by .*mine.py"),
    ],
)
def test_what_an_installed_plugin_is_refused_for_a_file_is_too(tmp_path, given, said):
    text = MINE.replace("return [", "made = ").replace("claims)]", f"claims)\n    return [made, {given}]")
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InvalidArgument, match=said):
        load_plugins([str(tmp_path / "mine.py")])


@pytest.mark.parametrize(("given", "said"), [("registry.Variant(*own, claims)", "Variant"), ("len(own)", "int")])
def test_a_hook_that_gives_no_list_is_named(tmp_path, given, said):
    head, _, _ = MINE.partition("    return")
    own = '    own = "test.of_a_file", "matmul", lambda a, b, *, config: a @ b'
    (tmp_path / "mine.py").write_text(f"{head}{own}\n    return {given}\n")
    with pytest.raises(InvalidArgument, match=f"registry_variants: got {said}; allowed: a list"):
        load_plugins([str(tmp_path / "mine.py")])


TABLES = """
@registry.hookimpl
def registry_tables():
    return [Path(__file__).with_name("matmul.any.yaml")]
"""


@pytest.mark.usefixtures("takes_back")
@pytest.mark.parametrize("claims", [True, False], ids=["and variants", "alone"])
def test_the_tables_of_a_file_are_in_force(tmp_path, claims):
    """Those that were read before it are read again, and what was planned by them is planned anew."""
    ours = MINE if claims else "import registry"
    (tmp_path / "mine.py").write_text(f"from pathlib import Path\n{ours}\n{TABLES}")
    (tmp_path / "matmul.any.yaml").write_text("op: matmul\narch: any\nrules:\n- use: [torch_matmul]\n")
    before = [table.file for table in in_force.tables().tables]
    for _ in range(2):
        load_plugins([str(tmp_path / "mine.py")])
    (own,) = (table for table in in_force.tables().tables if table.file not in before)
    assert own.file == str(tmp_path / "matmul.any.yaml") and own.layer.name == "PLUGIN"


@pytest.mark.usefixtures("takes_back")
def test_a_table_of_a_file_decides(tmp_path):
    text = MINE.replace('("float32",))', '("float32",), layouts=("nn",), ieee=True)').replace("sm90", "any")
    (tmp_path / "mine.py").write_text(f"from pathlib import Path\n{text}\n{TABLES}")
    (tmp_path / "matmul.any.yaml").write_text("op: matmul\narch: any\nrules:\n- use: [test.of_a_file]\n")
    asked = registry.matmul.problem_type.of_shape(Target.named("cpu"), m=16, n=16, k=16, dtype="float32")
    assert registry.matmul.explain(asked).variant != "test.of_a_file"
    load_plugins([str(tmp_path / "mine.py")])
    assert registry.matmul.explain(asked).variant == "test.of_a_file"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('["matmul.any.yaml"]', "registry_tables: got 'matmul.any.yaml'; allowed: whole paths"),
        ("None", "registry_tables: got None; allowed: a list"),
    ],
)
def test_tables_that_an_installed_plugin_is_refused_for_are_refused(tmp_path, given, said):
    (tmp_path / "mine.py").write_text(f"{MINE}\n@registry.hookimpl\ndef registry_tables():\n    return {given}\n")
    with pytest.raises(InvalidArgument, match=said):
        load_plugins([str(tmp_path / "mine.py")])


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "registry.cli", "list", "--op", "matmul"],
        ["-m", "registry.testing", "--variant", "test.of_a_file", "--target", "cpu", "--only", "every claim*"],
    ],
    ids=["kreg", "kit"],
)
def test_a_file_imports_what_lies_beside_it(tmp_path, command):
    """From whatever folder a command is called in, and whatever process runs its kernels."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside_mine.py").write_text("def product(a, b, *, config):\n    return a @ b\n")
    text = MINE.replace("lambda a, b, *, config: a @ b", "product").replace("sm90", "cpu")
    text = text.replace('("float32",))', '("float32",), layouts=("nn",), ieee=True)')
    (tmp_path / "mine" / "mine.py").write_text(f"from beside_mine import product\n{text}")
    command = [sys.executable, *command, "--plugin", "mine/mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "test.of_a_file" in done.stdout, done.stdout + done.stderr


@pytest.mark.usefixtures("takes_back")
def test_what_lies_beside_a_file_stands_in_for_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "this.py").write_text("raise SystemExit('imported in place of the standard library')")
    (tmp_path / "mine.py").write_text(f"import this\n{MINE}")
    load_plugins([str(tmp_path / "mine.py")])
    assert sys.path[-1] == str(tmp_path.resolve())
