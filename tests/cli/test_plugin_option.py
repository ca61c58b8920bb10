"""`--plugin FILE`, of each command that has it: variants that nobody installed count there."""

from __future__ import annotations

import json

import click
import pytest

from registry.cli import OK, USAGE, cli

NAME = "mine.listed"
FILE = f"""
from registry import Requires, Variant, hookimpl


def matmul(a, b, *, config):
    return a @ b


@hookimpl
def registry_variants():
    requires = Requires(arch=("any",), dtypes=("float32",), layouts=("nn", "nt"), ieee=True)
    return [Variant({NAME!r}, op="matmul", run=matmul, requires=requires, builds=lambda problem, config: [])]
"""
TABLE = f"op: matmul\narch: any\nrules:\n- use: [{NAME}]\n"
SHAPE = ("m=16,n=16,k=16", "--dtype", "float32")
COMMANDS = {
    "explain": ["explain", "matmul", "--shape", *SHAPE, "--device", "H100", "--variant", NAME],
    "inspect": ["inspect", NAME, "--shape", *SHAPE],
    "list": ["list", "--op", "matmul"],
    "tables lint": ["tables", "lint", "matmul.any.yaml"],
    "warm": ["warm", "matmul", "m=16,n=16,k=16,dtype=float32", "--device", "H100", "--variant", NAME],
}
OTHERS = {"profile", "report", "tune"}
"""Which have tests of their own."""


@pytest.fixture
def folder(tmp_path, monkeypatch, takes_back):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "matmul.any.yaml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def takers(group, context, before=()):
    """The names of all commands that take a plugin."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if any(parameter.name == "plugins" for parameter in command.params):
            yield " ".join((*before, name))
        elif isinstance(command, click.Group):
            found = list(takers(command, context, (*before, name)))
            yield from [name] if name == "explain" and found else found  # whose commands are those of ops


def test_these_are_all_that_take_one():
    assert {*takers(cli, click.Context(cli))} == {*COMMANDS, *OTHERS}


@pytest.mark.parametrize("how", ["apart", "joined"])
@pytest.mark.parametrize("command", COMMANDS)
def test_its_variants_count(kreg, folder, command, how):
    plugin = ["--plugin", "mine.py"] if how == "apart" else ["--plugin=mine.py"]
    code, out, err = kreg(*COMMANDS[command], *plugin, "--json")
    assert code == OK, err
    said = json.dumps(json.loads(out))
    assert ("unknown-variant" not in said) if command == "tables lint" else (NAME in said)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("list", "tables lint")])
def test_without_it_they_are_not_known(kreg, folder, command):
    code, _, err = kreg(*COMMANDS[command])
    assert code == USAGE and f"no variant {NAME!r}" in " ".join(err.split())


def test_inspect_takes_it_before_the_variant_too(kreg, folder):
    code, out, _ = kreg("inspect", "--plugin", "mine.py", *COMMANDS["inspect"][1:])
    assert code == OK and NAME in out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_there_is_not_is_named(kreg, folder, command):
    code, _, err = kreg(*COMMANDS[command], "--plugin", "other.py")
    assert (code, err) == (USAGE, "kreg: plugin: got other.py; allowed: a readable Python file\n")
