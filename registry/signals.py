"""Exceptions that signals raise. They may come up in the middle of anything, and are no fault of the code there."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["held_back", "interrupts"]


def interrupts(error: BaseException) -> bool:
    """Whether this is Ctrl-C, or what the handler of a signal raised, as for a timeout or an end that was asked for. It
    goes on to who called, where what code raises by itself is contained."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers, seen = _handlers(), set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        at = one.__traceback__
        while at is not None:
            if at.tb_frame.f_code in handlers:
                return True
            at = at.tb_next
        one = one.__cause__ or one.__context__
    return False


def _handlers() -> set[Any]:
    """The code of all that is written in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            call = getattr(type(handler), "__call__", None)  # noqa: B004 - of an object that may be called
            found |= {getattr(handler, "__code__", None), getattr(call, "__code__", None)}
    return found - {None}


@contextlib.contextmanager
def held_back() -> Iterator[list[int]]:
    """Hold Ctrl-C back inside the block, for code that cannot be interrupted and begun anew, as an import of Triton.
    The list has what was held back, for the caller to raise. Pressed a second time, it interrupts at once."""
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield held
        return

    def hold(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
