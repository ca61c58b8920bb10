"""--plugin: the variants of a file or module that nobody installed, for each command that knows variants by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

_FLAG = "--plugin"
plugin_option = click.option(
    _FLAG, "plugins", multiple=True, metavar="FILE", help="Also the variants of this file or module."
)
"""For registry.tuning.extra.load_plugins, which a command calls before it asks for a variant."""


def plugins_in(arguments: Iterable[str]) -> Iterator[str]:
    """Those that arguments name which cannot be parsed yet, for the options that there are hang on the variant."""
    words = iter(arguments)
    for word in words:
        flag, given, value = word.partition("=")
        if flag == _FLAG and (given or (value := next(words, ""))):
            yield value
