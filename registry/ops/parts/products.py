"""What matrix products of every kind share: dtypes, activations, layout letters, and how their memory is judged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from registry.contract.capability import Reason, Requires, Rule
from registry.contract.meeting import as_it_is, asked_by, of_words
from registry.contract.problem import OperandFact, Query
from registry.errors import InvalidArgument, shown
from registry.ops.tensors import check_fits, check_tensor, dtype_name, is_its_own, known_dtype, overlap

FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
FP8_NAMES = frozenset(map(dtype_name, FP8))
LAYOUTS = ("nn", "nt", "tn", "tt")
"""Whether a row ("n") or a column ("t") of each operand is contiguous."""

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
ACTIVATIONS = tuple(name for name in _FUNCTIONS if name)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation by its definition in torch."""
    return _FUNCTIONS[activation](x)


def check_activation(activation: object) -> str:
    if activation is None:
        return ""
    if not isinstance(activation, str) or (activation and activation not in ACTIVATIONS):
        raise InvalidArgument("activation", shown(activation), "None, " + ", ".join(ACTIVATIONS))
    return str(activation)


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The operands' dtype, but int32 for int8 and bfloat16 for fp8, whose results would not fit."""
    return torch.int32 if dtype is torch.int8 else torch.bfloat16 if dtype in FP8 else dtype


def check_out_dtype(out_dtype: object, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> torch.dtype:
    """The dtype of the result, for operands of `dtype`."""
    if out_dtype is None:
        return default_out_dtype(dtype)
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in allowed:
        raise InvalidArgument("out_dtype", shown(out_dtype), "None, " + ", ".join(sorted(map(dtype_name, allowed))))
    return out_dtype


def named_out_dtype(out_dtype: str | None, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> str:
    """The same by names, of a shape."""
    return dtype_name(known_dtype("out_dtype", out_dtype, allowed) if out_dtype else default_out_dtype(dtype))


def layout_letter(fact: OperandFact) -> str:
    """ "n" where a row is contiguous, "t" where a column is, "" where neither."""
    rows, columns = fact.shape[-2:]
    if fact.strides[-1] == 1 or columns == 1:
        return "n"
    return "t" if fact.strides[-2] == 1 or rows == 1 else ""


def check_writable(out: object) -> torch.Tensor:
    """What no plan knows of an `out`: that it may be written to, now."""
    tensor = check_tensor("out", out)
    if not is_its_own(tensor):
        got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise InvalidArgument("out", got, "a tensor whose elements share no memory")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("out", "a tensor that requires grad", "one that does not, or a call under no_grad()")
    return tensor


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """`out` must be a tensor of the result's shape, dtype and device."""
    check_fits("out", out, shape, dtype, device)


def refuse_grad(name: str, given: object, *inputs: torch.Tensor | None) -> None:
    """Raise for an argument that has no place in a graph, where autograd would follow the inputs."""
    if given is not None and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        raise InvalidArgument(name, "given, for operands that require grad", "None, or operands under torch.no_grad()")


def refuse_its_grad(name: str, given: torch.Tensor) -> None:
    """Raise for an argument that has no gradient, where autograd would follow it."""
    if given.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(name, "a tensor that requires grad", "one that does not, for it is given none")


def needs_copy(out: torch.Tensor, *given: Any) -> bool:
    """Whether a kernel that writes to `out` might overwrite what it has yet to read."""
    if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or out.is_nested:
        return False  # which the checks refuse
    return any(isinstance(tensor, torch.Tensor) and overlap(out, tensor) for tensor in given)


# --- rules of a Problem's fields --------------------------------------------------------------------------------------


_RESULTS = {dtype_name(dtype): dtype_name(default_out_dtype(dtype)) for dtype in (torch.int8, *FP8)}


@of_words("dtype")
def same_dtype(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """Equal to a's dtype, or of a result to what it is where nobody asks for another; or among the dtypes claimed for
    this field."""
    got, claim, usual = getattr(problem, name), requires.claim(how.claim) or (), problem.dtype
    if name == "out_dtype":
        usual = _RESULTS.get(usual, usual)
    if got != usual and got not in claim:
        yield Reason("unclaimed", name, got, ", ".join(dict.fromkeys((usual, *claim))))


def _aligned(requires: Requires, rule: Rule, name: str, how: Query) -> Callable[[Any], bool]:
    return functools.partial(
        _lie_well, requires.base_alignment, requires.stride_alignment, as_it_is(requires, rule, name, how)
    )


def _lie_well(base: int, unit: int, asked: Callable[[Any], bool], problem: Any) -> bool:
    """By what is known of each operand at a glance, where one dimension alone is contiguous, its rows or its columns;
    else the rule is asked."""
    for one in problem.operands:
        strides = one.strides
        if one.base_alignment < base or (
            unit != 1
            and (
                one.stride_alignment % unit
                or strides.count(1) != 1
                or not (strides[-1] == 1 or (strides[-2] == 1 and one.shape[-1] != 1))
            )
        ):
            return asked(problem)
    return True


@asked_by(_aligned)
def alignment(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """Of each operand's base, and of every stride but that of its contiguous dimension (which dimension that is, is the
    business of the layout claim). A stride of one element in another dimension counts: it walks over the same memory.
    """
    base, unit = requires.base_alignment, requires.stride_alignment
    for one in problem.operands:
        if one.base_alignment < base:
            fix = f"call .clone() on {one.name}: its storage offset breaks the alignment"
            got, allowed = f"{one.base_alignment} bytes", f"multiples of {base} bytes"
            yield Reason("alignment", "base_alignment", got, allowed, fix, one.name)
        if unit == 1:  # which divides all
            continue
        inner = len(one.shape) - (2 if one.shape[-1] != 1 and one.strides[-1] != 1 else 1)
        for dim, (extent, elements) in enumerate(zip(one.shape, one.strides, strict=True)):
            stride = elements * one.itemsize
            if dim != inner and extent > 1 and stride % unit:
                fix = f"pad {one.name}: its stride of {stride} bytes in dimension {dim} is no multiple of {unit}"
                yield Reason(
                    "alignment", "stride_alignment", f"{stride} bytes", f"multiples of {unit} bytes", fix, one.name
                )


def contiguous_rows(problem: Any, claim: Any) -> str | None:
    """The copies, as few as there can be, that make a claimed layout of this one. A copy has contiguous rows."""
    letters = problem.layout if problem.layout in LAYOUTS else "  "
    ways = [
        [name for name, was, to in zip("ab", letters, layout, strict=True) if was != to]
        for layout in claim
        if all(to in (was, "n") for was, to in zip(letters, layout, strict=False))
    ]
    names: list[str] = min(ways, key=len, default=[])
    return f"call .contiguous() on {' and '.join(names)}" if names else None


def pitch_of(columns: int, out_dtype: str, alignments: Iterable[int]) -> int:
    """Bytes, up to 16, that divide every row's distance from the next, in the operands, whose strides are aligned so,
    and the result: what decides which of a library's kernels can run."""
    result: int = columns * getattr(torch, out_dtype).itemsize | 16
    return min([*alignments, result & -result])


def made_up(name: str, shape: tuple[int, ...], letter: str, dtype: torch.dtype) -> OperandFact:
    """A freshly allocated operand: matrices of these rows and columns, or one for each of what stands before them."""
    *several, rows, columns = shape
    strides = (columns, 1) if letter == "n" else (1, rows)
    outer = (rows * columns,) * len(several)
    return OperandFact(name, dtype_name(dtype), shape, (*outer, *strides), dtype.itemsize)
