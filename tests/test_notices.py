"""Notices are seen where nobody configured logging, once, and not again where a command shows them itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from ran import install_plugin

import registry
from registry import notices

pytestmark = pytest.mark.usefixtures("quick_python")

SCRIPT = """
import torch, registry
q = torch.randn(1, 2, 8, 8)
for _ in range(2):
    with registry.prefer("torch_flash"):
        registry.attention(q, q, q)
"""


def run(*arguments, **environment):
    command, everything = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=True)


def test_a_plain_script_sees_a_fallback_once():
    assert run("-c", SCRIPT).stderr.count("preferred torch_flash is illegal") == 1


def test_whoever_configures_logging_has_them_there():
    quiet = "import logging; logging.getLogger('registry').setLevel(logging.ERROR)"
    kept = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(name)s: %(message)s')"
    assert run("-c", quiet + SCRIPT).stderr == ""
    done = run("-c", kept + SCRIPT)
    assert done.stderr == "" and done.stdout.startswith("registry: preferred torch_flash is illegal")


@pytest.mark.parametrize(
    ("command", "shown"), [("explain matmul --device cpu", True), ("tables lint FILE", False), ("list", False)]
)
def test_a_command_says_it_once(tmp_path, command, shown):
    install_plugin(tmp_path, "broken_plugin", "raise ImportError('no such thing')")
    (tmp_path / "mine.yaml").write_text("op: matmul\narch: cpu\nrules: [{use: [nobody_has_this]}]\n")
    arguments = [str(tmp_path / "mine.yaml") if one == "FILE" else one for one in command.split()]
    done = run("-m", "registry.cli", *arguments, PYTHONPATH=str(tmp_path), REGISTRY_TABLES=str(tmp_path))
    said = {True: done.stdout, False: done.stderr}
    assert (said[shown].count("no such thing"), said[not shown].count("no such thing")) == (1, 0)
    assert (done.stdout + done.stderr).count("nobody_has_this") == (command != "list")


def test_the_doctor_says_it_once(tmp_path):
    """Each in the section that it belongs to: notices are what else there was."""
    install_plugin(tmp_path, "broken_plugin", "raise ImportError('no such thing')")
    (tmp_path / "mine.yaml").write_text("op: matmul\narch: cpu\nrules: [{use: [nobody_has_this]}]\n")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "bad.yaml").write_text("op: matmul\narch: cpu\nrules: 7\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "REGISTRY_CACHE": str(tmp_path),
        "REGISTRY_TABLES": str(tmp_path / "mine.yaml"),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "registry.cli", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    for what in ("no such thing", "nobody_has_this", "bad.yaml:3"):
        assert done.stdout.count(what) == 1, what


def test_a_declaration_that_fails_for_each_shape_is_said_once(declare, capsys):
    def limit(problem, config):
        raise ValueError("no such field")

    declare("test.broken", op="matmul", run=lambda a, b, *, config: a @ b, rule=limit, layouts=("nn",))
    for rows in range(1, 9):
        registry.matmul.explain(torch.ones(rows, 8), torch.ones(8, 8), variant="torch_matmul").candidates  # noqa: B018
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("the declaration of test.broken failed for matmul on cpu (cpu): dtype=float32, m=1, ")
    assert notices.counts() == {said: 8}


def test_texts_that_tell_of_each_call_come_to_an_end(capsys):
    for number in range(2 * notices.MOST):
        notices.notice(f"call {number} is odd", cause=("odd", number))
    notices.notice("call 7 is odd", cause=("odd", 7))
    found = notices.counts()
    assert len(found) == len(capsys.readouterr().err.splitlines()) == notices.MOST + 1
    assert (found["call 7 is odd"], found[notices.FURTHER]) == (2, notices.MOST)


def test_of_a_long_text_both_ends_are_kept():
    assert notices.both_ends("short", 20) == "short"
    found = notices.both_ends("ValueError: " + "x" * 500 + " mine.py:7", 60)
    assert len(found) <= 60 and found.startswith("ValueError: ") and " ... " in found and found.endswith(" mine.py:7")


def test_the_last_line_of_an_error_is_what_a_compiler_says():
    """Not the mark under the line of code that it is about."""
    code, cause = ValueError("at 3:4:\n    tl.store(out)\n    ^"), TypeError("in all\nno such operand")
    assert notices.last_line(code) == "ValueError: ^", "there is no more to say"
    code.__cause__ = cause
    assert notices.last_line(code) == "TypeError: no such operand"
    assert notices.last_line(ValueError("at 3:4:\n    ^\n unknown_name is not defined\n")) == (
        "ValueError: unknown_name is not defined"
    )
    assert notices.last_line(ValueError()) == "ValueError: no message"
    code.__cause__ = code
    assert notices.last_line(code) == "ValueError: ^"
