"""One key for one kernel, in every process: what was compiled ahead, or yesterday, is found again.

Triton names what it compiled by a hash of the kernel, all that it calls, and the constants that they read. Two things
in that hash hang on the process and not on the kernel. Constants of one name, read in two modules, are taken in the
order in which the modules' names lie in memory. And a kernel takes the constants of what it calls before that is
hashed itself, so it has them only if another kernel with the same callee was hashed before. Half of the kernels for
packed and paged attention were compiled anew for that reason, two seconds each, although a worker had compiled them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["settle_keys"]


@functools.cache
def settle_keys() -> bool:
    """Mend both, in this process, before a kernel of ours is hashed; False where Triton's inside is not as known."""
    from triton.runtime import jit

    try:
        finder: Any = jit.DependenciesFinder
        known = "(name, id(var_dict))" in inspect.getsource(finder.record_reference) and (
            "self.used_global_vals.update(func.used_global_vals)" in inspect.getsource(finder._update_hash)
        )
    except (AttributeError, OSError, TypeError):
        return False
    if known:
        vars(jit)["id"] = _by_module
        finder._update_hash = _callee_first(finder._update_hash)
    return known


def _by_module(names: Any) -> Any:
    """What stands in for the address of a module's names."""
    return str(names["__name__"]) if isinstance(names, dict) and "__name__" in names else id(names)


def _callee_first(update: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def hashed_first(finder: Any, called: Any) -> None:
        _ = called.cache_key
        update(finder, called)

    return hashed_first
