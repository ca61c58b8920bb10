"""The product by its definition."""

from __future__ import annotations

from collections.abc import Callable

import torch

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]]


_FUNCTIONS = {"": lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation by its definition in torch."""
    return _FUNCTIONS[activation](x)
