"""Calls of the torch ops in code that Inductor writes: straight to the kernel beneath the op.

`torch.ops.registry.matmul.default(...)` goes by torch's dispatcher and by autograd's Python to a function of Python,
which takes longer than to decide and to launch. Inductor has a table of how single operators are written; by it, a
graph calls `torch.ops.registry.in_graphs["matmul 3f2a90c1"](...)` with the same arguments. That is the function beneath
the op, and where all sizes were known to the compiler, it keeps what calls of these sizes came to. Somebody who watches
(a mode, the profiler) sees the op as before.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from registry.dispatch import traced
from registry.dispatch.scope import EMPTY, current
from registry.errors import InvalidArgument
from registry.notices import notice

VARIABLE = "REGISTRY_COMPILED_CALLS"
OF_OPS = "op"
"""Set to this, compiled graphs call the torch ops."""
MOST_SHORTCUTS = 8
"""How often one call of a graph is looked at anew: its tensors change in what a graph may leave open."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_scope = current.get
_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)

Shortcut = Callable[..., Callable[..., Any] | None]
"""Takes the op's arguments; gives what answers calls like this one, and says None to others."""


@dataclass(frozen=True)
class Kernel:
    """What is beneath a torch op."""

    op: Any
    function: Callable[..., Any]
    shortcut: Shortcut | None


KERNELS: dict[str, Kernel] = {}


def define_kernel(
    library: torch.library.Library, name: str, function: Callable[..., Any], shortcut: Shortcut | None = None
) -> None:
    """Give a torch op its kernel, on every device."""
    library.impl(name, function, "CompositeExplicitAutograd")
    KERNELS[name] = Kernel(getattr(torch.ops.registry, name).default, function, shortcut)
    traced.lend_again()


# --- what a graph calls -------------------------------------------------------------------------------------------


class _Calls(dict[str, Callable[..., Any]]):
    """By what they are called in graphs, some of which were written by another process."""

    def __missing__(self, called: str) -> Callable[..., Any]:
        name, _, sizes = called.partition(" ")
        kernel = KERNELS[name]
        call = kernel.op if not wanted() else _settled(kernel) if sizes and kernel.shortcut else _straight(kernel)
        self[called] = call
        return call


def _straight(kernel: Kernel) -> Callable[..., Any]:
    op, function = kernel.op, kernel.function

    def call(*given: Any) -> Any:
        if _dispatch_modes() or _function_modes() or _profiled():
            return op(*given)
        return function(*given)

    return call


def _settled(kernel: Kernel) -> Callable[..., Any]:
    op, function, shortcut = kernel.op, kernel.function, kernel.shortcut
    assert shortcut is not None
    known: Callable[..., Any] | None = None
    looked = 0

    def call(*given: Any) -> Any:
        nonlocal known, looked
        if _dispatch_modes() or _function_modes() or _profiled():
            return op(*given)
        if known is not None:
            found = known(*given)
            if found is not None:
                return found
        found = function(*given)  # first: a first launch may choose anew
        if looked < MOST_SHORTCUTS and _scope() is EMPTY:
            looked += 1
            known = shortcut(*given)
        return found

    return call


torch.ops.registry.in_graphs = _Calls()  # type: ignore[attr-defined]


# --- what a graph is told to call ---------------------------------------------------------------------------------


def wanted() -> bool:
    """Whether graphs call what is beneath the ops. A value that says nothing is a notice: a compiler asks here, in the
    middle of a graph."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", OF_OPS):
        notice(str(InvalidArgument(VARIABLE, repr(value), f"{OF_OPS}, or nothing, for which this is taken")))
    return value != OF_OPS


def lend() -> None:
    """Have Inductor write these calls. Raises where its table is not what it is in torch 2.11 to 2.13."""
    from torch._inductor.codegen import custom_extern_kernel_codegen, wrapper

    table = custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN
    line = wrapper.ExternKernelAllocLine
    ways = [list(inspect.signature(entry.python).parameters) for entry in table.values() if entry.python is not None]
    if ["node", "writeline"] not in ways or list(inspect.signature(line).parameters) != ["wrapper", "node"]:
        raise NotImplementedError("Inductor's table of how operators are written has changed")

    def written(node: Any, writeline: Any) -> None:
        if wanted():
            node.python_kernel_name = f"torch.ops.registry.in_graphs[{_called(node)!r}]"
        writeline(line(writeline.__self__, node))

    for kernel in KERNELS.values():
        name = f"torch.ops.{kernel.op.namespace}.{kernel.op.__name__}"
        table.setdefault(name, custom_extern_kernel_codegen.CustomCodegen(python=written))


traced.lenders.append((lend, "call the registry's ops by torch's dispatcher"))


def _called(node: Any) -> str:
    """The name of an op, and something of all that is known of a call; equal calls may share what they are."""
    name = str(node.op_overload.__name__).partition(".")[0]
    try:
        facts = [
            (*map(int, one.get_size()), "", *map(int, one.get_stride()), one.get_dtype(), one.get_device())
            for one in node.inputs
        ]
    except (TypeError, AttributeError, NotImplementedError):  # sizes that are not known yet
        return name
    return f"{name} {hashlib.sha256(repr((facts, node.constant_args)).encode()).hexdigest()[:8]}"
