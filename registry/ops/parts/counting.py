"""Floating-point operations for torch.utils.flop_counter: each op's folder says its own (costs.py).

That module brings triton with it, which `import registry` must not. So the formulas are handed over when somebody
imports it, before a FlopCounterMode can be made; at once where somebody did already.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_waiting: dict[str, Callable[..., int]] = {}


def counted(op: str, formula: Callable[..., int]) -> None:
    """Have `torch.ops.registry.<op>` counted by a formula that takes what the torch op takes, and `out_val=`."""
    _waiting[op] = formula
    module = sys.modules.get(_COUNTER)
    if module is not None:
        _hand_over(module)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _hand_over(module: ModuleType) -> None:
    while _waiting:
        op, formula = _waiting.popitem()
        module.register_flop_formula(getattr(torch.ops.registry, op), get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    """Sees the one import, leaves it to those who know how, and goes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """Another's loader, after which the formulas are handed over."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        _hand_over(module)
