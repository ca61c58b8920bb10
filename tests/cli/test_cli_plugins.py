"""Commands that plugins bring to `kreg`, and what it says of plugins that fail."""

from __future__ import annotations

import json
import types

import click
import pytest

import registry
from registry import hookimpl
from registry.cli import FINDING, OK, USAGE
from registry.dispatch import discovery
from registry.dispatch.catalog import catalog


def squeezed(text):
    return " ".join(text.split())


def test_plugins_bring_commands_and_broken_ones_are_named(kreg, monkeypatch):
    module = types.ModuleType("acme")

    @hookimpl
    def registry_commands(cli):
        cli.add_command(click.Command("brew", callback=lambda: click.echo("coffee")))

    module.registry_commands = registry_commands

    def broken():
        raise ImportError("no beans")

    monkeypatch.setattr(discovery, "_loaders", lambda: [("acme", lambda: module), ("sad", broken)])
    monkeypatch.setattr(registry.cli.cli, "_plugins_loaded", False)
    monkeypatch.setattr(registry.cli.cli, "commands", {})
    code, out, err = kreg("brew")
    assert (code, out) == (OK, "coffee\n")
    assert "plugin sad failed: ImportError: no beans" in err
    assert "brew" in kreg("--help")[1]


def test_doctor_names_a_plugins_command_that_is_never_reached(kreg, monkeypatch):
    module = types.ModuleType("acme")
    module.registry_commands = hookimpl(lambda cli: cli.add_command(click.Command("list")))
    monkeypatch.setattr(discovery, "_loaders", lambda: [("acme", lambda: module), ("other", types.ModuleType)])
    report = json.loads(kreg("doctor", "--json")[1])
    said = "plugin acme: its command 'list' is never reached: kreg has one of that name"
    assert [text for text in report["notices"] if "command" in text] == [said]


def test_of_two_plugins_with_a_command_of_one_name_the_first_keeps_it(kreg, monkeypatch):
    def brewing(what):
        module = types.ModuleType(what)
        command = click.Command("brew", callback=lambda: click.echo(what))
        module.registry_commands = hookimpl(lambda cli: cli.add_command(command))
        return lambda: module

    monkeypatch.setattr(discovery, "_loaders", lambda: [(one, brewing(one)) for one in ("coffee", "tea")])
    monkeypatch.setattr(registry.cli.cli, "_plugins_loaded", False)
    monkeypatch.setattr(registry.cli.cli, "commands", {})
    assert kreg("brew")[:2] == (OK, "coffee\n")
    said = "plugin tea: its command 'brew' is never reached: coffee has one of that name"
    assert said in json.loads(kreg("doctor", "--json")[1])["notices"]


@pytest.mark.parametrize("wrong", [lambda: 3, None, "key"])
def test_a_plugin_whose_commands_are_none_costs_itself_alone(kreg, monkeypatch, wrong):
    good, bad = types.ModuleType("good"), types.ModuleType("bad")
    good.registry_commands = hookimpl(lambda cli: cli.add_command(click.Command("brew", callback=lambda: 0)))

    def registry_commands(cli):
        cli.add_command(click.Command("late"))
        cli.commands.pop("brew")
        cli.commands.update({5: click.Command("five")} if wrong == "key" else {"func": wrong})

    bad.registry_commands = hookimpl(registry_commands)
    monkeypatch.setattr(discovery, "_loaders", lambda: [("good", lambda: good), ("bad", lambda: bad)])
    monkeypatch.setattr(registry.cli.cli, "_plugins_loaded", False)
    monkeypatch.setattr(registry.cli.cli, "commands", {})
    code, out, err = kreg("--help")
    assert code == OK and "brew" in out and "late" not in out
    assert "plugin bad failed: DeclarationError: registry_commands: got " in err
    assert kreg("brew")[0] == OK


def test_doctor_names_a_plugin_whose_commands_fail(kreg, monkeypatch):
    module = types.ModuleType("acme")

    @hookimpl
    def registry_commands(cli):
        raise RuntimeError("no beans")

    module.registry_commands = registry_commands
    monkeypatch.setattr(discovery, "_loaders", lambda: [("acme", lambda: module)])
    code, out, _ = kreg("doctor")
    assert code == FINDING and "FAILED acme: RuntimeError: no beans" in squeezed(out)


@pytest.mark.parametrize(
    "arguments",
    [
        "explain attention --variant acme.fast",
        "inspect acme.fast",
        "tune attention --only acme.* --dry-run",
        "warm attention s=8,d=8 --variant acme.fast --device H100",
    ],
)
def test_a_name_that_a_failed_plugin_may_have_brought_says_how_it_failed(kreg, monkeypatch, arguments):
    broken = catalog.get().with_failure("acme", registry.DeclarationError("Requires.causal: got 'yes'"))
    monkeypatch.setattr(catalog, "_catalog", broken)
    code, _, err = kreg(*arguments.split())
    assert code == USAGE and "'acme." in err
    assert "what failed to load may have it: acme: DeclarationError: Requires.causal: got 'yes'" in squeezed(err)
