"""A GPU takes for nothing what is no normal float32: the kit holds sums of such against no kernel."""

from __future__ import annotations

import pytest
import torch

import registry
from registry.ops.attention_varlen.conformance_backward import VarlenBackwardKit
from registry.ops.attention_varlen.op import attention_varlen
from registry.ops.parts.judging import judge
from registry.ops.parts.sizes import size_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("sink, passes", [(-85.0, True), (-60.0, False)])
def test_a_gradient_of_sinks_may_lack_terms_that_are_no_normal_numbers(sink, passes):
    kit, requires = VarlenBackwardKit(), registry.variants()["torch_varlen_math_backward"].requires
    axes = kit.axes(requires, size_for(CPU, "quick", False))
    spec = {axis: values[0] for axis, values in axes.items()} | {"sinks": True, "dtype": "float32"}
    sample = kit.make(spec, CPU, 0)
    sample.arguments["sinks"].fill_(sink)
    _, q, k, v, out, lse = sample.tensors
    arguments = {name: value for name, value in sample.arguments.items() if name != "grad_lse"}
    saved = attention_varlen.reference(q, k, v, **arguments, return_lse=True)
    out.copy_(saved[0])
    lse.copy_(saved[1])
    expected = kit.expected(sample)
    found = {part.output: part.want.to(part.dtype) for part in expected}
    assert not judge(found, expected).complaints
    found["dsinks"] = torch.zeros_like(found["dsinks"])
    assert bool(judge(found, expected).complaints) is not passes
