"""Making a hundred thousand small objects, none of which is garbage, without looking for it among them meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def none_looked_for() -> Iterator[None]:
    """Looking would take as long as what is done inside, or longer: torch alone has made that many before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
