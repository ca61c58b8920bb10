"""Every block of code in README.md and docs/ runs, or is held to what it shows.

Python blocks of a page run in order, in one namespace, on the CPU. A comment above a block says what it is otherwise:

    <!-- given: python -->       what must be there first, and is not shown
    <!-- needs: module -->       skipped, and said so, where that is not installed
    <!-- from: path ... -->      an excerpt, shortened: every name in it must still be in those files
    <!-- $ command -->           the output of that command, which test_docs.py makes anew

Commands in console blocks are not run; each must be one that exists, with options that it takes.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tokenize
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import click
import pytest

from registry.cli._main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>given|needs|from|\$):? (?P<said>.*?) -->\n+)?^( *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.S | re.M,
)
KNOWN = {"python", "console", "text", "toml", "yaml"}
OTHER_PROGRAMS = {"cd", "echo", "pip"}


@dataclass
class Block:
    language: str
    code: str
    mark: str | None
    said: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text[: match.start("code")].count("\n")
        found.append(Block(match["language"], match["code"], match["mark"], match["said"] or "", line))
    assert len(found) == len(re.findall(r"^ *```\w", text, re.M)), "a comment above a block that is not understood"
    return found


@pytest.fixture
def untouched(monkeypatch, tmp_path, takes_back):
    """A folder to write into, and no variants left behind."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, untouched):
    namespace, skipped = {}, []
    for block in blocks(page):
        if block.language != "python" or block.mark == "from":
            continue
        if block.mark == "needs" and importlib.util.find_spec(block.said) is None:
            skipped.append(f"{page.name}:{block.line}: {block.said} is not installed")
            continue
        if block.mark == "given":
            exec(block.said, namespace)
        padded = "\n" * block.line + block.code  # so that errors name the line of the page
        exec(compile(padded, str(page), "exec"), namespace)
    if skipped:
        pytest.skip("; ".join(skipped))


def names(code: str) -> set[str]:
    tokens = tokenize.generate_tokens(StringIO(code).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_excerpts_are_of_what_is_there(page):
    for block in blocks(page):
        if block.mark != "from":
            continue
        compile(block.code, str(page), "exec")
        sources = [(ROOT / path).read_text(encoding="utf-8") for path in block.said.split()]
        missing = names(block.code) - set().union(*map(names, sources))
        assert not missing, f"{page.name}:{block.line}: {sorted(missing)} not in {block.said}"


def check_command(command: str) -> None:
    """Raise if this is no command of ours, or not with these options."""
    program, *arguments = shlex.split(command, comments=True)
    while "=" in program:  # what is set for the command
        program, *arguments = arguments
    if program == "kreg":
        for word in arguments:  # files that are asked for are there
            if re.fullmatch(r"[\w./]+\.(json|jsonl|txt|yaml|py)", word):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        last: click.Command = cli
        while isinstance(last, click.Group):
            name = arguments.pop(0)
            found = last.get_command(click.Context(last), name)
            assert found is not None, f"kreg has no command {name}"
            last = found
        last.make_context(name, arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in arguments if "=" not in word]
        assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in targets), command
    elif program in ("python", "sh"):
        is_module = arguments[0] == "-m"
        found = importlib.util.find_spec(arguments[1]) if is_module else (ROOT / arguments[0]).exists()
        assert found, command
    elif program == "pytest":
        folders = [word for word in arguments if re.fullmatch(r"[a-z_/]+", word)]
        assert all((ROOT / folder).exists() for folder in folders if "/" in folder or folder == "benchmarks"), command
    else:
        assert program in OTHER_PROGRAMS, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_commands(page, untouched):
    for block in blocks(page):
        assert block.language in KNOWN, f"{page.name}:{block.line}: nobody checks {block.language}"
        if block.language != "console":
            continue
        for line in block.code.splitlines():
            if line.startswith("$ "):
                for command in re.split(r" && ", line[2:]):
                    check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_toml_is_toml(page):
    import tomllib

    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.code)


def test_output_is_shown_below_its_command():
    for page in PAGES:
        for block in blocks(page):
            assert block.language != "text" or block.mark == "$", f"{page.name}:{block.line}: output of what?"


def test_what_is_wrong_is_found():
    for command in ("kreg nothing", "kreg explain attention --no-such", "make nothing", "sh nothing.sh", "rm x"):
        with pytest.raises(Exception):  # noqa: B017
            check_command(command)
