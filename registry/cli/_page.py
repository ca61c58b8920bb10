"""Printing: pages that read well at 80 columns and in a pipe (no colour, nothing cut off), and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from registry.notices import printable

WIDEST = 120
_ANSWER = "registry.cli.answer"
_STDOUT, _STDERR = 1, 2


def _set_apart(context: click.Context, parameter: click.Parameter, as_json: bool) -> bool:
    """With --json, stdout holds the answer alone: what plugins and their kernels print meanwhile goes to stderr."""
    if as_json:
        context.meta[_ANSWER] = context.with_resource(_kept_apart())
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return as_json


@contextlib.contextmanager
def _kept_apart() -> Iterator[TextIO]:
    """The stream of the answer. Descriptor 1 is stderr meanwhile, for C libraries and children know no sys.stdout."""
    try:
        kept = os.dup(_STDOUT) if sys.stdout.fileno() == _STDOUT else -1
        if kept >= 0:
            sys.stdout.flush()
            os.dup2(_STDERR, _STDOUT)
    except (AttributeError, OSError, ValueError):  # not the process's own, or closed
        kept = -1
    if kept < 0:
        yield sys.stdout
        return
    own = sys.stdout
    answer = open(kept, "w", encoding=own.encoding, errors=own.errors)  # noqa: SIM115
    try:
        yield answer
    finally:
        with contextlib.suppress(OSError):
            own.flush()  # what was printed to sys.__stdout__
        os.dup2(kept, _STDOUT)
        with contextlib.suppress(OSError):  # its reader may be gone, which is known by then
            answer.close()


json_option = click.option("--json", "as_json", is_flag=True, callback=_set_apart, help="Print JSON.")


def answer_stream() -> TextIO:
    """Where the answer of a command goes."""
    context = click.get_current_context(silent=True)
    found: TextIO = context.meta.get(_ANSWER) or sys.stdout if context else sys.stdout
    return found


def print_json(data: Any) -> None:
    """Plain data as indented JSON."""
    text, stream = json.dumps(data, indent=2, ensure_ascii=False, default=str), answer_stream()
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8", "surrogatepass")
    except UnicodeEncodeError:  # spelled out as JSON does it, not as the stream would
        text = json.dumps(data, indent=2, default=str)
    if not text.replace("\n", "").isprintable():  # JSON leaves some control characters as they are
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    click.echo(text, file=stream)


def _spelled_out(text: str) -> str:
    """Without what a terminal would obey, and what the output's encoding lacks, as of a file's name in the locale C."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


class Screen(Console):
    """A console that tells a reader who has gone, such as `head`, from an error."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Page:
    """Lines of labels and wrapped text. Colour is left out where the output is no terminal."""

    def __init__(self) -> None:
        self._console = Screen(highlight=False, markup=False, emoji=False)
        if self._console.width <= 0:  # COLUMNS=0, for which nothing would be printed at all
            self._console.width = WIDEST
        self._width = max(40, min(self._console.width, WIDEST))

    def line(self, text: str = "", style: str = "", indent: int = 0) -> None:
        """One paragraph, wrapped, its further lines set in."""
        self.row("", text, indent=indent, style=style, hanging=2)

    def title(self, text: str) -> None:
        self.line(text, style="bold")

    def row(
        self,
        label: str,
        text: str,
        *,
        indent: int = 2,
        label_width: int = 0,
        style: str = "",
        label_style: str = "cyan",
        hanging: int = 0,
    ) -> None:
        """A label and a text beside it, wrapped within its own column."""
        label = _spelled_out(label)
        first = " " * indent + (f"{label.ljust(label_width)}  " if label or label_width else "")
        further = " " * (len(first) + hanging)
        lines = []
        for number, part in enumerate(_spelled_out(str(text)).splitlines() or [""]):
            start = first if number == 0 else further
            lines.extend(self._wrap(part, start, further) or [start])
        painted = Text("\n".join(line.rstrip() for line in lines), style=style)
        if label:
            painted.stylize(label_style, indent, indent + len(label))
        self._console.print(painted, soft_wrap=True)

    def rows(self, rows: list[tuple[str, str]], *, indent: int = 2) -> None:
        """Several rows, their texts in one column."""
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            self.row(label, text, indent=indent, label_width=width)

    def gap(self) -> None:
        self._console.print()

    def _wrap(self, text: str, first: str, further: str) -> list[str]:
        room = max(self._width, len(further) + 20)
        return textwrap.wrap(
            text, room, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        )
