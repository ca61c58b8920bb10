"""The kit holds variants of a file that nobody installed to all that it holds others to."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from registry import InvalidArgument, Target
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
