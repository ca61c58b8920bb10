"""No garbage collection while a hundred thousand small objects are made that all stay: it would look in vain."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def none_looked_for() -> Iterator[None]:
    """It would take as long as what is done inside, or longer, for torch alone has made as many objects before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
