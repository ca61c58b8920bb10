"""Things that must never pass in silence: fallbacks, quarantines, missing tables. Logged once each, counted always.

They go to the logger `registry`, to which we add no handler, not even a NullHandler: where nobody configured logging,
Python prints them on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

from registry.forks import new_lock

__all__ = [
    "both_ends",
    "clear",
    "clip",
    "counts",
    "drop_output",
    "last_line",
    "notice",
    "printable",
    "shown",
    "shown_by_caller",
    "text_of",
    "told",
    "what_failed",
]

log = logging.getLogger("registry")

WIDEST = 1000
"""Characters of a phrase: a list of what is allowed fits, a listing of a compiler does not."""

MOST = 1000
"""Different messages: a text that tells of each call must fill neither a log nor the memory of who serves for weeks."""
FURTHER = f"{MOST} different notices: further ones are counted, and shown no more"

_OTHERS = {"registry", "torch", "triton", "pluggy", *sys.stdlib_module_names}

_lock = new_lock()
_counts: Counter[str] = Counter()
_firsts: dict[Hashable, str] = {}
"""By its cause, the message that was met first."""


def notice(message: str, cause: Hashable = None) -> None:
    """Count a message, and log it the first time. All messages of one `cause` count as the first of them."""
    message = printable(message)
    with _lock:
        message = _firsts.get(cause, message)
        if message not in _counts and len(_counts) >= MOST:
            message = FURTHER
        elif cause is not None:
            _firsts[cause] = message
        _counts[message] += 1
        first = _counts[message] == 1
    if first:
        log.warning(message)


@contextlib.contextmanager
def shown_by_caller() -> Iterator[None]:
    """Around a command that shows notices itself: they are counted, and not logged a second time."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def what_failed(error: BaseException) -> str:
    """An exception in one phrase, short and printable, whatever it does when it is asked for its text."""
    kind = type(error).__name__
    try:
        said = f"{error}"
        text = f"{kind}: {said}" if said else kind
    except BaseException as worse:
        if isinstance(worse, KeyboardInterrupt):
            raise
        text = f"{kind}, which cannot be shown ({type(worse).__name__})"
    return _phrase(text)


def told(error: BaseException) -> str:
    """An error, and the last line of a plugin's own code on its way: where its author has to look."""
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_plugins(str(frame.f_globals.get("__name__", "")))
    ]
    return what_failed(error) + (f" ({places[-1]})" if places else "")


def last_line(error: BaseException) -> str:
    """The kind of an error and its last line, where compilers say what is wrong; where that is a mark under a line of
    code, those of what it came from."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        lines = text_of(error).strip().splitlines()
        if not lines or lines[-1].strip(" ^") or error.__cause__ is None:
            break
        error = error.__cause__
    return f"{type(error).__name__}: {lines[-1].strip() if lines else 'no message'}"


def _is_plugins(module: str) -> bool:
    return module.startswith("registry.plugins.") or module.partition(".")[0] not in _OTHERS


def shown(value: object) -> str:
    """A value in one phrase, short and printable, whatever it does when it is asked for its text."""
    return _phrase(text_of(value))


def text_of(value: object) -> str:
    """All that a value says, with its lines, or that it cannot be shown."""
    try:
        return f"{value!s}"
    except BaseException as worse:
        if isinstance(worse, KeyboardInterrupt):
            raise
        return f"a {type(value).__name__} that cannot be shown ({type(worse).__name__})"


def _phrase(text: str) -> str:
    return clip(text if text.isprintable() else " ".join(text.split()), WIDEST)


def printable(text: str) -> str:
    """The text with its control characters spelled out, all but line ends and tabs: a terminal would obey them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def clip(text: str, limit: int) -> str:
    """The text on one line and of bounded length: what others write must not write our messages."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= limit else shown[:limit] + "..."


def both_ends(text: str, limit: int) -> str:
    """At most so many characters: of an error what it says first, and where it came from, which it says last."""
    if len(text) <= limit:
        return text
    half = (limit - len(_LEFT_OUT)) // 2
    return text[:half] + _LEFT_OUT + text[-half:]


_LEFT_OUT = " ... "


def drop_output() -> None:
    """Throw away what is still to be printed, for its reader, such as `head`, has gone: the interpreter would complain
    of that when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def counts() -> dict[str, int]:
    """Every notice so far with how often it was met."""
    with _lock:
        return dict(_counts)


def clear() -> None:
    """Forget all notices (they will be logged again when met again)."""
    with _lock:
        _counts.clear()
        _firsts.clear()
