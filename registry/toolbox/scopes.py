"""Named spans of time inside a kernel, for `kreg profile`: what each warp does when.

    scopes.enter("softmax")
    ...
    scopes.leave("softmax")

in any Gluon kernel, a third party's too. They are Proton's own intra-kernel records. Unless an instrumented build is
asked for they put nothing into the kernel: the machine code is the same as without them. Spans of different names may
overlap; one of a name is left before it is entered again. Three words lead the name of a span that means something to
the figures beside a timeline:

    "wait K"     the warp stands still until something arrives
    "async PV"   the matrix unit works on a product that was issued; what else the warp does meanwhile overlaps with it
    "work ..."   instructions of the warp's own (or any other name)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import sys
from typing import Any

from triton.language.core import builtin

WAIT, ASYNC = "wait ", "async "


def _record(start: bool, name: Any, semantic: Any) -> None:
    """Into an instrumented build; into every other one nothing, and Proton is not even imported for it."""
    flags = sys.modules.get("triton.profiler.flags")
    if flags is None or not flags.flags.instrumentation_on:
        return
    from triton.profiler import language

    language.record(start, name, semantic)


@builtin
def enter(name, _semantic=None):
    """The span begins here."""
    _record(True, name, _semantic)


@builtin
def leave(name, _semantic=None):
    """The span ends here."""
    _record(False, name, _semantic)
