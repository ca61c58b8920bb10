"""float8 is added by few bits in tensor cores: a kernel says that its sums leave them in time, and the kit sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import registry
from registry import IllegalVariant, Requires, Target, Variant
from registry.ops.grouped_mm.conformance import GroupedMmKit
from registry.ops.grouped_mm.oracle import bounds
from registry.ops.grouped_mm.problem import GroupedMmProblem
from registry.ops.matmul.conformance import MatmulKit
from registry.ops.matmul.problem import MatmulProblem
from registry.ops.parts.judging import judge
from registry.ops.parts.kit import Kit
from registry.ops.parts.sizes import size_for
from registry.testing import check_variant

INSTRUCTION, BITS = 32, 12
"""Values of K that an instruction adds, and how many bits of a sum are left after it, by an H200's errors."""
SPECS = {
    "matmul": (MatmulKit(), {"sizes": (24, 48, 4096), "bias": "", "layout": "nt"}),
    "grouped_mm": (GroupedMmKit(), {"sizes": (3, 40, 48, 4096), "form": "rows", "spread": "random", "layout": "nt"}),
}


def added_by_tensor_cores(a: torch.Tensor, b: torch.Tensor, promoted_every: int) -> torch.Tensor:
    """a @ b as Hopper adds float8, its sums moved to float32 every so many values of K."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], promoted_every):
        own = torch.zeros_like(total)
        for k in range(start, min(start + promoted_every, a.shape[1]), INSTRUCTION):
            own += a[:, k : k + INSTRUCTION].float() @ b[k : k + INSTRUCTION].float()
            mantissa, exponent = torch.frexp(own)
            own = torch.ldexp(torch.trunc(torch.ldexp(mantissa, torch.tensor(BITS))), exponent - BITS)
        total += own
    return total


def product(op: str, tensors: Any, arguments: Any, promoted_every: int) -> torch.Tensor:
    a, b = tensors
    if op == "matmul":
        return added_by_tensor_cores(a, b, promoted_every)
    spans = bounds(arguments["offs"], a.shape[0])
    rows = [added_by_tensor_cores(a[x:y], b[g], promoted_every) for g, (x, y) in enumerate(spans)]
    return torch.cat([*rows, torch.zeros(a.shape[0] - spans[-1][1], b.shape[-1])])


def spec_of(kit: Kit, requires: Requires, given: dict[str, Any]) -> dict[str, Any]:
    axes = kit.axes(requires, size_for(torch.device("cpu"), "quick", False))
    return {axis: values[0] for axis, values in axes.items()} | given


@pytest.mark.parametrize("op", SPECS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("every", "passes"), [(128, True), (4096, False)])
def test_sums_that_stay_in_the_tensor_cores_are_found(
    op: str, dtype: str, out_dtype: str, every: int, passes: bool
) -> None:
    kit, given = SPECS[op]
    requires = next(v for v in registry.variants().values() if v.op == op and v.name.startswith("torch_")).requires
    spec = spec_of(kit, requires, {**given, "dtype": dtype, "out_dtype": out_dtype})
    sample = kit.make(spec, torch.device("cpu"), 7)
    found = product(op, sample.tensors, sample.arguments, every).to(getattr(torch, out_dtype))
    assert judge({"out": found}, kit.expected(sample)).ok is passes


def test_sums_of_float8_do_not_cancel_and_have_both_signs() -> None:
    kit, given = SPECS["matmul"]
    requires = registry.variants()["torch_matmul"].requires
    sample = kit.make(spec_of(kit, requires, {**given, "dtype": "float8_e4m3fn"}), torch.device("cpu"), 3)
    a, b = (tensor.float() for tensor in sample.tensors)
    assert torch.allclose((a @ b).abs(), a.abs() @ b.abs())
    assert (a @ b).min() < 0 < (a @ b).max()


def test_every_kernel_for_float8_claims_it_and_no_other() -> None:
    for variant in registry.variants().values():
        if variant.op in SPECS:
            takes = any(dtype.startswith("float8") for dtype in variant.requires.dtypes)
            assert variant.requires.promoted is takes, variant.name


@pytest.mark.parametrize("kind", [MatmulProblem, GroupedMmProblem])
def test_it_is_asked_of_float8_alone(kind: type[Any]) -> None:
    target = Target.named("H100")
    assert kind.of_shape(target, dtype="float8_e4m3fn").promoted
    assert kind.of_shape(target, dtype="float8_e5m2").promoted
    assert not kind.of_shape(target, dtype="bfloat16").promoted


def test_who_does_not_claim_it_refuses_float8_by_name_and_the_kit_looks(declare: Callable[..., Variant]) -> None:
    def run(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, config: Any) -> torch.Tensor:
        return (a.float() @ b.float()).to(out_dtype)

    claims = {"dtypes": ("bfloat16", "float8_e4m3fn"), "out_dtypes": ("bfloat16",), "layouts": ("nn", "nt", "tn", "tt")}
    variant = declare("test.fast", op="matmul", run=run, ieee=False, **claims)
    a, b = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((4, 32), (32, 8)))
    with pytest.raises(IllegalVariant, match="promoted: got True"):
        registry.matmul(a, b, variant="test.fast")
    report = check_variant(variant, only=lambda name: name == "refuses float8 sums")
    assert {case.name for case in report.cases} == {"refuses float8 sums"} and report.passed, str(report)
