"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

from registry.cli import main


@pytest.fixture
def kreg(capsys, monkeypatch):
    """Run a command, whose lines are as wide as on a common terminal; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        code = main(arguments)
        return (code, *capsys.readouterr())

    return run
