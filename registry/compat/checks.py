"""What FlashAttention's functions take alike, each argument held to its kind before anything is made of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.parts.masks import check_flag, check_scale, check_softcap
from registry.ops.tensors import check_tensor, described, is_virtual, readable

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES = {
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "sinks": "s_aux",
    "scale": "softmax_scale",
    "window": "window_size",
    "return_lse": "return_attn_probs",
}
_ALSO = {"s_aux": "learnable_sink", "block_table": "page_table"}
"""Other names of the same arguments; an error says the one that was used."""


def named(function: Function) -> Function:
    """Errors name the arguments as these functions do."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InvalidArgument as error:
            raise renamed(error, _NAMES, kwargs) from None

    return call  # type: ignore[return-value]


def renamed(error: InvalidArgument, names: Mapping[str, str], given: Mapping[str, Any] = {}) -> InvalidArgument:
    """The same error of an argument by its name here."""
    name = names.get(error.argument, error.argument)
    also = _ALSO.get(name, "")
    return InvalidArgument(also if given.get(also) is not None else name, error.got, error.allowed)


# --- kinds of arguments ---------------------------------------------------------------------------------------------

_HINTS = frozenset(("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"))
_REFUSED = frozenset(
    (
        "qv",
        "q_descale",
        "attention_chunk",
        "rotary_seqlens",
        "cu_seqlens_q",
        "cu_seqlens_k_new",
        "max_seqlen_q",
        "score_mod",
        "mask_mod",
        "block_sparse_tensors",
    )
)


def only_hints(others: Mapping[str, Any], **given: Any) -> None:
    """Raise for arguments that would change the result and are not done; those at their defaults ask for nothing."""
    for name, value in {**others, **given}.items():
        if name not in _HINTS | _REFUSED | given.keys():
            raise TypeError(f"FlashAttention has no argument {name!r} that is known here")
        number = isinstance(value, (bool, int, float))
        if name not in _HINTS and not (value is None or (number and not value)):
            got = "a tensor" if isinstance(value, Tensor) else shown(value)
            raise InvalidArgument(name, got, "0" if number else "None: it is not done here")


def lengths(name: str, value: object, size: int | None, device: torch.device) -> Tensor:
    """The value if it is int32 [size] on the device; of any size but 0 where that is None."""
    tensor = check_tensor(name, value)
    fits = tensor.dim() == 1 and (tensor.numel() > 0 if size is None else tensor.shape[0] == size)
    if not fits or tensor.dtype is not torch.int32 or tensor.device != device:
        got = f"{described(tensor)} on {tensor.device}"
        raise InvalidArgument(name, got, f"int32 of shape {'[B + 1]' if size is None else (size,)} on {device}")
    return tensor


def refuse_beyond(name: str, values: Tensor, most: Tensor | int, what: str) -> None:
    """Raise for numbers below 0 or above the most, where they can be seen for nothing: on a CPU."""
    if not values.is_cpu or is_virtual(values) or not values.numel():
        return
    wrong = (values < 0) | (values > most)
    if torch.compiler.is_compiling():  # the graph looks at them
        torch._assert_async(~wrong.any(), f"{name}: got numbers out of bounds; allowed: {what}")
    elif wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        bound = most if isinstance(most, int) else int(most[at])
        raise InvalidArgument(name, f"{int(values[at])} at {list(at)}", f"0 to {bound}, {what}")


def refuse_tail(name: str, starts: Tensor, rows: int) -> None:
    """Raise for rows behind the last sequence, where they can be seen for nothing, by the numbers that were given."""
    if readable(starts) and int(starts[-1]) != rows:
        raise InvalidArgument(
            name, f"{int(starts[-1])} at the end", f"numbers that rise from 0 to {rows}, the rows there are"
        )


def deterministic(value: object) -> None:
    check_flag("deterministic", value)
    if value and not torch.are_deterministic_algorithms_enabled():
        raise InvalidArgument("deterministic", True, "False, or torch.use_deterministic_algorithms(True)")


def how(scale: Any, causal: object, window_size: object, softcap: Any) -> dict[str, Any]:
    """The masks and the scale, as the registry's ops take them."""
    if scale is not None:
        check_scale(scale)
    check_flag("causal", causal)
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(side is None or type(side) is int for side in sides):
        raise InvalidArgument("window_size", shown(window_size), "(left, right), -1 for unlimited")
    left, right = (-1 if side is None or side < 0 else side for side in sides)
    window = None if left == right == -1 else (left, right)
    cap = 0.0 if softcap is None else check_softcap(softcap)
    return {"scale": scale, "causal": causal, "window": window, "softcap": cap}


def one_of(name: str, value: Any, other: str, other_value: Any) -> Any:
    """The one of two names for the same argument that was used."""
    if value is not None and other_value is not None:
        raise InvalidArgument(other, f"a tensor beside {name}", f"{name} or {other}, which mean the same")
    return value if value is not None else other_value


def slopes(value: object) -> Tensor | None:
    if value is None:
        return None
    tensor = check_tensor("alibi_slopes", value)
    if tensor.dim() != 1:
        raise InvalidArgument("alibi_slopes", f"shape {tuple(tensor.shape)}", "[H]: the same for the whole batch")
    return tensor


def descale(name: str, value: object) -> Tensor | None:
    if value is None:
        return None
    tensor = check_tensor(name, value)
    if tensor.dim() == 2:
        allowed = "[1], [Hkv] or one a token and head: the same for the whole batch"
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", allowed)
    return tensor
