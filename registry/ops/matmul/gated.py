"""Products that end with a gate, activation(a @ w1) * (a @ w3): w1 and w3 stand side by side in b.

The op of grouped products has kernels that end so, and never write what lies between; one product is one group to it.
Where none of them was measured to be the fastest for such sizes, and under autograd, modes and autocast, a plain
product runs, with torch's operations after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from registry.dispatch.decision import Decision
from registry.dispatch.scope import current, named_for
from registry.errors import IllegalVariant, InvalidArgument, NoLegalVariant, shown
from registry.ops.matmul import arguments, costs
from registry.ops.op import OPS
from registry.ops.parts.counting import counted
from registry.ops.parts.products import (
    activate,
    check_activation,
    check_out,
    check_out_dtype,
    check_writable,
    needs_copy,
    refuse_grad,
)
from registry.ops.tensors import autocast, differentiated, dtype_name, is_distributed, plain
from registry.toolbox.capturing import capturing
from registry.toolbox.lasting import lasting_zeros

OP = "grouped_mm"
FEW = 64
"""Rows below which a plain product runs: there are kernels made for few rows, which none that ends with a gate was held
against."""

_library = torch.library.Library("registry", "FRAGMENT")
_library.define(
    "matmul_gated(Tensor a, Tensor b, Tensor? bias, str activation, ScalarType out_dtype, Tensor? scale_a, "
    "Tensor? scale_b, str? variant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _Asked(NamedTuple):
    """A call after the checks of its arguments."""

    a: torch.Tensor
    b: torch.Tensor
    """Of two or three dimensions."""
    shape: tuple[int, ...]
    """Of the result."""
    activation: str
    out_dtype: torch.dtype


def product(
    a: Any,
    b: Any,
    *,
    gated: Any,
    bias: Any = None,
    activation: Any = None,
    out_dtype: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out: Any = None,
    variant: str | None = None,
) -> torch.Tensor:
    """What `registry.matmul` returns for `gated=True`."""
    asked = _checked(gated, a, b, bias, activation, out_dtype, scale_a, scale_b, out)
    inputs = [tensor for tensor in (a, b, bias) if tensor is not None]
    named = _named(variant)
    more = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    compiling = torch.compiler.is_compiling()  # then nobody can ask here which variants there are
    followed = needs_grad or differentiated()
    # How a gated product is sharded nobody says: its parts are products, of which that is known.
    whole = not any(is_distributed(tensor) for tensor in inputs)
    if compiling and whole and not followed and not torch.is_autocast_enabled(asked.a.device.type):
        tensors = asked.a, asked.b, bias, asked.activation, asked.out_dtype, scale_a, scale_b
        result = torch.ops.registry.matmul_gated(*tensors, named)
    elif not compiling and named is not None and _makes_groups(named):
        result = _as_a_group(asked, named, **more)
    elif followed or not plain(*inputs, *(tensor for tensor in (scale_a, scale_b, out) if tensor is not None)):
        result = _in_parts(asked, variant, **more)
    elif out is not None and _as_it_is(asked) == out.shape and not needs_copy(out, *inputs, scale_a, scale_b):
        return _launched(asked, variant, out=out, **more)
    else:
        result = _launched(asked, variant, **more)
    found: torch.Tensor = result.reshape(asked.shape)
    return found if out is None else out.copy_(found)  # type: ignore[no-any-return]


def explain(a: Any, b: Any, *, gated: Any, variant: str | None = None, target: Any = None, **call: Any) -> Decision:
    """What such a call would run, and why: a grouped product, or the plain one that its parts begin with."""
    settings = [call.get(name) for name in ("bias", "activation", "out_dtype", "scale_a", "scale_b", "out")]
    asked = _checked(gated, a, b, *settings)
    more = {name: call.get(name) for name in ("bias", "scale_a", "scale_b")}
    named = _named(variant)
    groups = OPS[OP]
    of_groups = named if named is not None and _makes_groups(named) else None
    if _may_be_a_group(asked, variant) or of_groups is not None:
        operands, how = _group(asked, **more)
        try:
            found: Decision = groups.explain(*operands, **how, variant=of_groups, target=target)
        except (InvalidArgument, NoLegalVariant, IllegalVariant):
            if of_groups is not None:
                raise
        else:
            if of_groups is not None or _is_best(found):
                return found
    plain_call = {name: value for name, value in call.items() if name not in ("activation", "out")}
    return OPS["matmul"].explain(a, b, **plain_call, variant=variant, target=target)


def _checked(
    gated: Any, a: Any, b: Any, bias: Any, activation: Any, out_dtype: Any, scale_a: Any, scale_b: Any, out: Any
) -> _Asked:
    if gated is not True:
        raise InvalidArgument("gated", shown(gated), "True or False")
    a, b = arguments.check_operands(*autocast(a, b))
    result = check_out_dtype(out_dtype, a.dtype, arguments.OUT_DTYPES)
    if result is torch.int32:
        raise InvalidArgument("out_dtype", dtype_name(result), "a floating dtype, for a product with a gate")
    columns = check_columns(b)
    if bias is not None:
        arguments.check_bias(bias, a, b, result)
    named = check_activation(activation)
    a2, b2, shape = arguments.as_matrices(a, b, scale_a)
    arguments.check_scales(scale_a, scale_b, a2, b2)
    asked = _Asked(a2, b2, (*shape[:-1], columns // 2), named, result)
    refuse_grad("scale_a", scale_a, a, b, bias)
    refuse_grad("out", out, a, b, bias)
    if out is not None:
        check_out(check_writable(out), asked.shape, result, a.device)
    return asked


def check_columns(b: torch.Tensor) -> int:
    """The columns of b, of which one half gates the other."""
    columns = b.shape[-1] if b.dim() > 1 else 1
    if columns % 2:
        raise InvalidArgument("b", f"{columns} columns", "an even number, the gates and then what they gate")
    return columns


def _as_it_is(asked: _Asked) -> tuple[int, ...]:
    """The shape that the product of the operands has, whose batches were folded; torch resizes an `out` of another."""
    return (*asked.a.shape[:-1], asked.shape[-1])


def _named(variant: str | None) -> str | None:
    """The variant that a call or a block asks for, of either op."""
    return variant if variant is not None else named_for(OP, None) or named_for("matmul", None)


def _makes_groups(variant: str) -> bool:
    return type(variant) is str and variant in OPS[OP].variants


def _in_parts(asked: _Asked, variant: str | None, *, out: Any = None, **more: Any) -> torch.Tensor:
    """A plain product, and what follows it by torch."""
    both = OPS["matmul"](asked.a, asked.b, out_dtype=asked.out_dtype, variant=variant, **more)  # type: ignore[operator]
    gate, up = both.chunk(2, -1)
    gate = activate(gate, asked.activation)
    return gate * up if out is None else torch.mul(gate, up, out=out)


def _launched(asked: _Asked, variant: str | None, *, out: Any = None, **more: Any) -> torch.Tensor:
    """An eager call that nobody follows: as a group where a kernel for that is known to be the best."""
    if _may_be_a_group(asked, variant):
        operands, how = _group(asked, _some_end, **more)
        settings = (asked.activation, True, asked.out_dtype, None)
        tensors = [*operands, *(how.get(name) for name in ("offs", "rows", "bias", "scale_a", "scale_b")), out]
        groups: Any = OPS[OP]
        try:
            best = _is_best(groups.plans.by_facts(settings, *tensors).decision)
        except (InvalidArgument, NoLegalVariant, IllegalVariant):
            best = False
        if best:
            if tensors[2] is not None:
                tensors[2] = _end(asked.a)
            found: torch.Tensor = groups.launch(settings, *tensors)
            return found
    return _in_parts(asked, variant, out=out, **more)


def _as_a_group(asked: _Asked, variant: str | None, **more: Any) -> torch.Tensor:
    """By a variant that was asked for."""
    operands, how = _group(asked, **more)
    found: torch.Tensor = OPS[OP](*operands, **how, variant=variant)  # type: ignore[operator]
    return found


def _may_be_a_group(asked: _Asked, variant: str | None) -> bool:
    """Whether it is worth to ask: with rows enough, of dtypes that go together, where no plain product is asked for."""
    a, b = asked.a, asked.b
    if variant is not None or a.dtype != b.dtype or a.dtype is torch.int8:
        return False
    scope = current.get()
    wanted = scope.forced_for(OP) is not None or bool(scope.preferred)
    return wanted or (a.shape[:-1].numel() >= FEW and scope.forced_for("matmul") is None)


def _is_best(decision: Decision) -> bool:
    """Whether a kernel that is compiled here was measured to be the best of all that make groups, or is wanted."""
    variant = OPS[OP].variants.get(decision.variant)
    if variant is None or variant.builds is None:
        return False
    scope = current.get()
    wanted = scope.forced_for(OP) is not None or decision.variant in scope.preferred
    return wanted or decision.evidence is not None


def _end(a: torch.Tensor) -> torch.Tensor:
    """Where the only group ends. Made for each call: a tensor that is kept could be one of a captured graph."""
    return torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)


_ends: dict[torch.device, torch.Tensor] = {}


def _some_end(a: torch.Tensor) -> torch.Tensor:
    """One to find a plan with, which reads no values."""
    found = _ends.get(a.device)
    if found is None and a.is_cuda and capturing():
        return _end(a)
    if found is None:
        found = _ends[a.device] = lasting_zeros(1, device=a.device)
    return found


def _group(
    asked: _Asked, ends: Callable[[torch.Tensor], torch.Tensor] = _end, /, *, bias: Any, scale_a: Any, scale_b: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """The same call as one group of all rows; as a batch of groups where there is a batch."""
    a, b = asked.a, asked.b
    how: dict[str, Any] = {"activation": asked.activation, "gated": True, "out_dtype": asked.out_dtype}
    if a.dim() == 2:
        how["offs"] = ends(a)
        b = b[None]
    groups = b.shape[0]
    if bias is not None:
        how["bias"] = bias.expand(groups, -1)
    if scale_a is not None:
        how["scale_a"] = scale_a.expand(a.shape[:-1])
        how["scale_b"] = scale_b.expand(groups, b.shape[-1])
    return (a, b), how


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    variant: str | None,
) -> torch.Tensor:
    asked = _Asked(a, b, (*a.shape[:-1], b.shape[-1] // 2), activation, out_dtype)
    more = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    with torch.no_grad():
        if variant is not None and _makes_groups(variant):
            return _as_a_group(asked, variant, **more).contiguous()
        return _launched(asked, variant, **more).contiguous()


def _fake(a: torch.Tensor, b: torch.Tensor, bias: Any, activation: str, out_dtype: Any, *rest: Any) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1] // 2), dtype=out_dtype)


_library.impl("matmul_gated", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("registry::matmul_gated", _fake, lib=_library)
counted("matmul_gated", lambda *given, out_val: 2 * costs.torch_product(*given, out_val=out_val))
