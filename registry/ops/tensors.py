"""Facts about torch tensors that every op needs: operands of a Problem, and whether the eager path may be taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import forward_ad

from registry.contract.problem import OperandFact, query
from registry.dispatch.precision import float32_precision
from registry.errors import InvalidArgument

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled
_Uninitialized = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_is_compiling = torch.compiler.is_compiling
_jit_trace = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled
_FakeTensor = torch._subclasses.FakeTensor


def _batching() -> Callable[[], bool]:
    """Tells of the mode in which torch batches gradients (is_grads_batched, vectorize): functorch does not show it, and
    its tensors say that they are plain ones."""
    try:
        mode: Any = torch._C._parse_dispatch_key("VmapMode")
        asks = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, mode)
        asks()
    except Exception:  # a private part of torch, which may vanish; that mode will have gone before it
        return bool
    return asks


_batches_gradients = _batching()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, whose class takes long to import."""
    return hasattr(tensor, "device_mesh")


def divided(tensor: Any, *dims: int) -> Any:
    """A distributed tensor made whole along those of these dimensions that its shards do not divide evenly, so that it
    can be flattened over them. Any other tensor as it is."""
    if type(tensor) in _PLAIN_TYPES or not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    for at, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)  # of Shard, and of nothing else
        if dim in dims:
            shards = math.prod(
                size for size, one in zip(tensor.device_mesh.shape, placements, strict=True) if one == placement
            )
            if tensor.shape[dim] % shards:
                placements[at] = Replicate()
    return tensor if placements == list(tensor.placements) else tensor.redistribute(placements=placements)


def plain(*tensors: torch.Tensor) -> bool:
    """Whether these are ordinary tensors outside of any mode, so that nobody but autograd needs to see the op.

    A lazily negated view is none: what its memory holds has the other sign, which torch's dispatcher sees to. The first
    tensor speaks for the device of all: others on another one are refused by the checks of every op.
    """
    if _is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.is_neg():
            return False
    return not (
        (tensors and tensors[0].is_meta)
        or _dispatch_modes()
        or _function_modes()
        or _any_autocast()
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
        or _batches_gradients()
        or jit_traced()
    )


def jit_traced() -> bool:
    """Whether torch.jit.trace is at work: sizes are tensors then, and gradients may be asked for later."""
    return _jit_trace() is not None


def untraced(value: Any) -> Any:
    """The plain number where torch.jit.trace has made a tensor of one, as of sizes and what is worked out from them.
    The trace holds that very number from then on, as torch's warning says."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and jit_traced():
        return value.item()
    return value


def surely(condition: Any) -> bool:
    """Whether a condition on the sizes of a graph that is being compiled is known to hold."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which takes half a second to import

    return bool(guard_or_false(condition))


def followed(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd follows one of these tensors, which may be None."""
    if _grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def plain_and_not_followed(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether operands are plain tensors that autograd does not follow; those after the first two may be None."""
    given = [a, b, *(one for one in others if one is not None)]
    return plain(*given) and not followed(*given)


def forward_mode() -> bool:
    """Whether tensors may carry tangents; so it is in `torch.func.jvp`, too."""
    return forward_ad._current_level >= 0


def differentiated() -> bool:
    """Whether functorch or forward-mode autograd may be at work, which the autograd of custom ops does not know."""
    return forward_mode() or (bool(torch._C._are_functorch_transforms_active()) and not _functionalized())


def _functionalized() -> bool:
    """Whether `torch.func.functionalize` is at work, and nothing else of functorch: it differentiates nothing, and no
    autograd.Function has a rule for it."""
    functorch = torch._C._functorch
    stack = () if _is_compiling() else functorch.get_interpreter_stack()
    return bool(stack) and all(one.key() == functorch.TransformType.Functionalize for one in stack)


def asked_for_later() -> bool:
    """Whether gradients may be asked for of tensors that do not say so now: they are traced, or their wrappers hide
    it."""
    return jit_traced() or _functionalized()


def no_derivative(what: str, instead: str) -> NotImplementedError:
    """The error of a derivative that nobody wrote, where autograd alone would say zero."""
    return NotImplementedError(f"{what} is not implemented; allowed: {instead}")


def have_tangents(*tensors: Any) -> bool:
    """Whether forward-mode autograd follows one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def refuse_tangents(what: str, *tensors: Any) -> None:
    """Raise where forward-mode autograd follows one of the tensors, for it would be lost."""
    if have_tangents(*tensors):
        raise no_derivative(f"forward-mode differentiation of {what}", "reverse mode")


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def known_dtype(name: str, dtype: str, allowed: Collection[torch.dtype]) -> torch.dtype:
    """The dtype of that name, for the argument `name` of a shape."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or found not in allowed:
        raise InvalidArgument(name, repr(dtype), ", ".join(sorted(map(dtype_name, allowed))))
    return found


def check_sizes(**sizes: int) -> None:
    """Raise for a size of a shape, by its name, that is not positive."""
    for name, value in sizes.items():
        if value < 1:
            raise InvalidArgument(name, value, "a positive integer")


def is_virtual(tensor: torch.Tensor) -> bool:
    """Whether this is a meta or a fake tensor, whose memory cannot be looked at."""
    return tensor.is_meta or isinstance(tensor, _FakeTensor)


def hidden(tensor: torch.Tensor) -> bool:
    """Whether functorch hides the values: vmap does; grad and jvp only follow them."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_functorch_wrapped_tensor(tensor)


def readable(tensor: torch.Tensor) -> bool:
    """Whether the values can be read for nothing: on the CPU, where no compiler, mode or vmap hides them."""
    if not tensor.is_cpu or type(tensor) not in _PLAIN_TYPES:
        return False
    return not (_is_compiling() or _dispatch_modes() or hidden(tensor))


def operand(name: str, tensor: torch.Tensor) -> OperandFact:
    """The memory facts of a tensor. A tensor without memory counts as allocated on an aligned base."""
    if is_virtual(tensor):
        address = int(tensor.storage_offset()) * tensor.element_size()
    else:
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            if not hidden(tensor):
                raise
            allowed = "a tensor with memory: a call inside runs on the tensors outside, so ask about those"
            raise InvalidArgument(name, "a tensor inside of torch.func.vmap", allowed) from None
    return OperandFact(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        base_alignment=(address | 16) & -(address | 16),
    )


def check_tensor(name: str, value: object) -> torch.Tensor:
    """The value if it is a dense tensor, else an error that names the argument."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(name, type(value).__name__, "a torch.Tensor")
    if isinstance(value, _Uninitialized):
        raise InvalidArgument(name, type(value).__name__, "a tensor with memory: lazy modules get it by a first call")
    if value.is_nested:
        raise InvalidArgument(name, "a nested tensor", "a dense (strided) tensor")
    if value.layout is not torch.strided:
        raise InvalidArgument(name, f"layout {value.layout}", "a dense (strided) tensor")
    return value


def described(tensor: torch.Tensor) -> str:
    """Shape and dtype, for the text of an error."""
    return f"shape {tuple(tensor.shape)} of {dtype_name(tensor.dtype)}"


def check_dims(name: str, value: object, dims: int, order: str) -> torch.Tensor:
    """The value if it is a dense tensor of so many dimensions, whose `order` an error says."""
    tensor = check_tensor(name, value)
    if tensor.dim() != dims:
        raise InvalidArgument(name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", f"{dims}: {order}")
    return tensor


def check_fits(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise for what is no dense tensor of this shape, dtype and device."""
    tensor = check_tensor(name, value)
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", f"shape {shape}")
    if tensor.dtype != dtype or tensor.device != device:
        got = f"{dtype_name(tensor.dtype)} on {tensor.device}"
        raise InvalidArgument(name, got, f"{dtype_name(dtype)} on {device}")


def is_its_own(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own; an expanded tensor has not."""
    if tensor.is_contiguous():
        return True
    # Each dimension must step over all that those of smaller strides reach. No sort: a graph's sizes may be symbols.
    dims = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for i, (stride, _) in enumerate(dims):
        reach = 0
        for j, (other, size) in enumerate(dims):
            if j != i and other <= stride:
                reach += other * (size - 1)
        if stride <= reach:
            return False
    return True


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share memory: whether what lies between their first and last bytes does. Those of two
    storages may, too: `torch.from_dlpack` and `torch.from_numpy` make another one of the same memory."""
    if is_virtual(one) or is_virtual(other):
        return False
    try:
        start, other_start = one.data_ptr(), other.data_ptr()
        if start <= other_start:
            return other_start < start + _reach(one)
        return start < other_start + _reach(other)
    except (RuntimeError, ValueError):  # whose memory nobody can look at
        return True


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last."""
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return elements * tensor.element_size()


def written(out: torch.Tensor) -> None:
    """Tell autograd that a kernel has written to `out`, as torch's own functions do: a backward that saved it must not
    go on with other numbers."""
    torch._C._increment_version((out,))


_AUTOCAST_FROM = frozenset((torch.float16, torch.bfloat16, torch.float32))


def autocast_dtype(tensor: object) -> torch.dtype | None:
    """What autocast wants the operands of a matrix product on this tensor's device to be; None where it is off."""
    device_type = tensor.device.type if isinstance(tensor, torch.Tensor) else ""
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast wants the operands of a matrix product; as they are where it is off.

    To be asked before they are checked: autocast is there so that operands may differ in dtype, and casts nothing else.
    """
    if (dtype := autocast_dtype(tensors[0])) is None:
        return tensors
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in _AUTOCAST_FROM else t for t in tensors)


def ieee_float32() -> bool:
    """Whether torch asks for float32 matrix products in full precision."""
    return float32_precision() != "tf32"


def asks_ieee(dtype: torch.dtype) -> bool:
    """Whether a problem of this dtype must be computed in full float32 precision."""
    return dtype is torch.float32 and ieee_float32()


def ieee_flag() -> Any:
    """Declare the field of a Problem that asks for it."""
    return query(
        "flag", claim="ieee", default=False, fix=lambda problem, claim: 'torch.set_float32_matmul_precision("high")'
    )
