"""Facts about torch tensors that every op needs: operands of a Problem, and whether the eager path may be taken."""

from __future__ import annotations

import torch

from registry.contract.problem import OperandFact
from registry.errors import InvalidArgument

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling


def plain(*tensors: torch.Tensor) -> bool:
    """Whether these are ordinary tensors outside of any mode, so that nobody but autograd needs to see the op."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta:
            return False
    return not (
        _is_compiling() or _dispatch_modes() or _function_modes() or _any_autocast() or _functorch_level() is not None
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def is_virtual(tensor: torch.Tensor) -> bool:
    """Meta and fake tensors, whose memory cannot be asked."""
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def operand(name: str, tensor: torch.Tensor) -> OperandFact:
    """The memory facts of a tensor. A tensor without memory counts as allocated on an aligned base."""
    if is_virtual(tensor):
        address = int(tensor.storage_offset()) * tensor.element_size()
    else:
        address = tensor.data_ptr()
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
    if value.layout is not torch.strided:
        raise InvalidArgument(name, f"layout {value.layout}", "a dense (strided) tensor")
    return value


_AUTOCAST_FROM = frozenset((torch.float16, torch.bfloat16, torch.float32))


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast wants the operands of a matrix product; as they are where it is off."""
    device_type = tensors[0].device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if t.dtype in _AUTOCAST_FROM else t for t in tensors)


def ieee_float32() -> bool:
    """Whether torch asks for float32 matrix products in full precision."""
    return torch.get_float32_matmul_precision() == "highest"
