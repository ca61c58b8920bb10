"""A launch that keeps a copy of an operand by its address is stale once that memory has other values."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants import original

from registry import Variant
from registry.ops.known import op_named
from registry.testing import check_variant

OPERANDS = {
    "attention": "q k v",
    "attention_backward": "grad_out q k v out lse grad_lse",
    "attention_varlen": "q k v cu_seqlens_q cu_seqlens_k seqused_k block_table k_scale v_scale sinks alibi_slopes",
    "grouped_mm": "a b offs rows bias scale_a scale_b",
    "matmul": "a b bias scale_a scale_b",
}
EACH = [(kernel, name) for kernel, names in OPERANDS.items() for name in names.split()]
Keep = Callable[[torch.Tensor], Any]


def keeping(kernel: str, operand: str, keep: Keep) -> Variant:
    """The right kernel, whose launches copy this operand once for each answer of `keep`."""
    right = original(kernel)
    names = list(inspect.signature(right.run).parameters)

    def prepare(problem: Any, config: Any) -> Any:
        launch, kept = op_named(right.op).bind(right, problem, config), {}

        def stale(*tensors: Any, **given: Any) -> Any:
            given |= dict(zip(names, tensors, strict=False))
            found = given.get(operand)
            if found is not None:
                key = keep(found)
                if key not in kept:
                    kept[key] = found.clone()
                given[operand] = kept[key]
            positional = [given.pop(name) for name in names[: len(tensors)]]
            return launch(*positional, **given)

        return stale

    return dataclasses.replace(right, prepare=prepare)


def complaints(variant: Variant) -> list[str]:
    report = check_variant(variant, only=lambda name: name.startswith("called again"))
    assert report.cases
    return [case.detail for case in report.failures]


@pytest.mark.parametrize(("kernel", "operand"), EACH)
def test_an_operand_that_is_kept_by_its_address(kernel: str, operand: str) -> None:
    found = complaints(keeping(kernel, operand, torch.Tensor.data_ptr))
    assert any("with other values in the same memory" in text for text in found), found


def test_one_that_is_kept_by_its_address_and_version() -> None:
    """Kernels that write into a tensor leave its version as it was."""
    found = complaints(keeping("matmul", "b", lambda tensor: (tensor.data_ptr(), tensor._version)))
    assert any("with other values in the same memory" in text for text in found), found


@pytest.mark.parametrize("kernel", OPERANDS)
def test_a_copy_of_each_call_is_none_of_an_earlier_one(kernel: str) -> None:
    calls = iter(range(10**6))
    assert not complaints(keeping(kernel, OPERANDS[kernel].split()[0], lambda tensor: next(calls)))
