"""Grouped products: `registry.grouped_mm(a, b, offs=offs)`, as a mixture of experts multiplies, with what surrounds it.

Each group g has its own product, accumulated in float32; which rows are a group's is known on the device alone:

    a [T, K]      b [E, K, N]    out[start:end] = a[start:end] @ b[g]           the forward, and the gradient of a
    a [E, M, K]   b [E, K, N]    out[g] = a[g] @ b[g]
    a [M, T]      b [T, N]       out[g] = a[:, start:end] @ b[start:end]        the gradient of b

where end = offs[g] and start is the end of the group before. Gradients are grouped products that dispatch too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.plan import observe
from registry.dispatch.scope import EMPTY, Scope, current
from registry.errors import InvalidArgument
from registry.ops.grouped_mm import arguments, costs
from registry.ops.grouped_mm.oracle import bounds, finish
from registry.ops.grouped_mm.problem import GroupedMmProblem
from registry.ops.grouped_mm.torch_op import define, through_torch
from registry.ops.op import Op, with_variant
from registry.ops.parts.masks import check_flag
from registry.ops.parts.products import (
    check_activation,
    check_out,
    check_out_dtype,
    check_writable,
    layout_letter,
    needs_copy,
    refuse_grad,
)
from registry.ops.tensors import asks_ieee, autocast, dtype_name, operand, plain_and_not_followed, written

_is_compiling = torch.compiler.is_dynamo_compiling
_deterministic = torch.are_deterministic_algorithms_enabled
Settings = tuple[str | None, bool, torch.dtype | None, str | None]
"""activation, gated, out_dtype, variant: all of a call but its tensors."""


class GroupedMm(Op):
    """A product for each group of rows, by the fastest legal kernel. `.explain(...)` says which one and why."""

    name = "grouped_mm"
    summary = "activation((a[rows] @ b[group]) * scales + bias), gated or not"
    problem_type = GroupedMmProblem
    tensors = ("a", "b")
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {
        "activation": ("activations", "activation"),
        "gated": ("gated", "gated"),
    }
    call_arguments: ClassVar[Mapping[str, str]] = {
        "offs": "",
        "rows": "gather",
        "out_dtype": "out_dtypes",
        "bias": "bias",
        "scale_a": "scaling",
        "scale_b": "scaling",
        "out": "out",
    }

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        variant: str | None = None,
    ) -> torch.Tensor:
        """The products of all groups: [T, N] for a of two dimensions and b of three, else [E, M, N].

        offs        int32 [E], where each group ends, on the device of a; rows beyond the last one become zeros.
                    Nothing waits for them to be read: on a GPU those outside of a, or below the one before, are
                    clamped, and registry.check() raises; on the CPU they are an error
        rows        int32 or int64 [T]: multiply a[rows] instead, without making it; likewise clamped, or an error
        bias        [E, N], added to each row of a group
        activation  None, "relu", "gelu" or "silu", after the bias
        gated       b, bias and scale_b have 2 N columns: activation(first half) * second half is the result
        out_dtype   default: the operands' dtype; bfloat16 for fp8
        scale_a/_b  float32, one value a row of a ([T] or [E, M]) and a column of b ([E, N])
        out         where to write the result; where it overlaps an input, by way of a temporary
        variant     run exactly this one, or raise IllegalVariant with its reasons
        """
        if gated is not False and gated is not True:
            check_flag("gated", gated)
        settings = (activation, gated, out_dtype, variant)
        if not _is_compiling():
            if rows is None and bias is None and scale_a is None and scale_b is None and out is None:
                plan = self.find_plan(settings, a, b) if offs is None else self.find_plan(settings, a, b, offs)
                if plan is not None:
                    if not a.is_cuda:
                        arguments.check_values(offs, rows, a, plan.default[1])
                    nothing = {"rows": None, "bias": None, "scale_a": None, "scale_b": None, "out": None}
                    result: torch.Tensor = plan.launch(a, b, offs=offs, out_dtype=plan.default[0], **nothing)
                    scope = current.get()
                    if scope is not EMPTY:
                        observe(scope, plan.decision)
                    return result
            if out is not None:
                try:
                    out = check_writable(out)
                except InvalidArgument as late:
                    self.refuse(late, settings, a, b, offs, rows, bias, scale_a, scale_b, out)
            if plain_and_not_followed(a, b, bias, offs, rows, scale_a, scale_b, out):
                if out is not None and needs_copy(out, a, b, offs, rows, bias, scale_a, scale_b):
                    result = self.launch(settings, a, b, offs, rows, bias, scale_a, scale_b)
                    check_out(out, tuple(result.shape), result.dtype, result.device)
                    return out.copy_(result)
                return self.launch(settings, a, b, offs, rows, bias, scale_a, scale_b, out)
        return through_torch(settings, a, b, offs, rows, bias, scale_a, scale_b, out)

    eager = staticmethod(plain_and_not_followed)

    def launch(
        self,
        settings: Settings,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Find or make the plan for these tensors and launch it."""
        plan = self.plans.by_facts(settings, a, b, offs, rows, bias, scale_a, scale_b, out)
        out_dtype, form = plan.default
        if not a.is_cuda:
            arguments.check_values(offs, rows, a, form)
        given = {"offs": offs, "rows": rows, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out": out}
        result: torch.Tensor = plan.launch(a, b, out_dtype=out_dtype, **given)
        if out is not None:
            written(out)
        scope = current.get()
        if scope is not EMPTY:
            observe(scope, plan.decision)
        return result

    def asked(self, settings: Settings, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        names = ("offs", "rows", "bias", "scale_a", "scale_b", "out")
        what: dict[str, Any] = dict(zip(("activation", "gated", "out_dtype", "variant"), settings, strict=True))
        a, b, *optional = tensors
        return self.problem_of(a, b, **dict(zip(names, optional, strict=False)), **what)

    def problem_of(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[GroupedMmProblem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments but of values on a device."""
        a, b, form = arguments.form_of(*autocast(a, b))
        groups = arguments.check_groups(offs, rows, a, b, form)
        columns, named = arguments.columns_of(b, gated), check_activation(activation)
        scaling = arguments.check_epilogue(bias, named, gated, scale_a, scale_b, a, b, form)
        result_dtype = check_out_dtype(out_dtype, a.dtype, arguments.FLOATS)
        shape = arguments.shape_of(a, offs, rows, columns, form)
        refuse_grad("scale_a", scale_a, a, b, bias)
        refuse_grad("out", out, a, b, bias)
        if out is not None:
            check_writable(out)
            check_out(out, shape, result_dtype, a.device)
            out = None if needs_copy(out, a, b, offs, rows, bias, scale_a, scale_b) else out  # copied afterwards
        operands = (operand("a", a), operand("b", b))
        letters = "".join(map(layout_letter, operands))
        problem = GroupedMmProblem(
            target=target if target is not None else Target.of(a.device),
            dtype=dtype_name(a.dtype),
            out_dtype=dtype_name(result_dtype),
            form=form,
            groups=groups,
            m=shape[-2],
            n=columns,
            k=a.shape[-1],
            layout=letters if len(letters) == 2 else "strided",
            gather=rows is not None,
            bias=bias is not None,
            activation=named,
            gated=gated,
            scaling=scaling,
            out=out is not None,
            ieee=asks_ieee(a.dtype),
            deterministic=_deterministic(),
            operands=operands,
        )
        return problem, with_variant(self.name, current.get(), variant)

    def refuse_values(self, a: torch.Tensor, b: torch.Tensor, **call: Any) -> None:
        if not a.is_cuda:
            arguments.check_values(call.get("offs"), call.get("rows"), a, arguments.FORMS[a.dim(), b.dim()])

    def default(self, problem: Problem) -> Any:
        """The dtype of the result, and the form."""
        assert isinstance(problem, GroupedMmProblem)
        return getattr(torch, problem.out_dtype), problem.form

    def empty(self, problem: GroupedMmProblem) -> bool:
        source_of_rows = all(size for fact in problem.operands for size in fact.shape)
        return not (problem.m and problem.n and problem.k and problem.groups and source_of_rows)

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        assert isinstance(problem, GroupedMmProblem)
        shape, _ = problem.result_shapes()["out"]

        def launch(a: torch.Tensor, b: torch.Tensor, *, out: Any, out_dtype: torch.dtype, **given: Any) -> Any:
            if not problem.bias:
                result = a.new_zeros(shape, dtype=out_dtype)
            else:
                what: dict[str, Any] = {"activation": problem.activation, "gated": problem.gated}
                result = self.reference(a, b, **given, **what).to(out_dtype)
            return result if out is None else out.copy_(result)

        return launch

    def reference(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """The oracle: one product after the other, in `dtype`, differentiable."""
        a, b, form = arguments.form_of(a, b)
        arguments.check_groups(offs, rows, a, b, form)
        columns, named = arguments.columns_of(b, gated), check_activation(activation)
        arguments.check_epilogue(bias, named, gated, scale_a, scale_b, a, b, form)
        a, b = a.to(dtype), b.to(dtype)
        if form == "batch":
            return finish(a @ b, bias, named, gated, scale_a, scale_b)
        assert offs is not None
        if form == "inner":
            found = [a[:, start:end] @ b[start:end] for start, end in bounds(offs, a.shape[1])]
            return torch.stack(found) if found else a.new_zeros(0, a.shape[0], columns)
        if rows is not None:
            at = rows.long().clamp(0, max(a.shape[0] - 1, 0))
            a, scale_a = a[at], None if scale_a is None else scale_a[at]
        parts, last = [], 0
        for g, (start, last) in enumerate(bounds(offs, a.shape[0])):
            of_group = [None if one is None else one[g] for one in (bias, scale_b)]
            scales = None if scale_a is None else scale_a[start:last]
            parts.append(finish(a[start:last] @ b[g], of_group[0], named, gated, scales, of_group[1]))
        return torch.cat([*parts, a.new_zeros(a.shape[0] - last, columns)])

    flops = staticmethod(costs.flops)
    bytes_moved = staticmethod(costs.bytes_moved)


grouped_mm = GroupedMm()
define(grouped_mm.launch, grouped_mm)
