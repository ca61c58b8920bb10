"""Padded and repeated copies: interpreted on a CPU, with what a CPU has behind them; on GPUs the conformance kit holds
the variants themselves. See test_triton_fa2_interpreter.py for why the file runs itself.
"""

import dataclasses

import pytest
import torch
from again import INTERPRETED

import registry
from registry.contract.target import Target
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem
from registry.plugins import triton_padded

H200 = Target.named("H200")
MASKS = {"causal": True, "window": None, "softcap": 0.0}


def explained(problem):
    op = registry.attention.backward if isinstance(problem, AttentionBackwardProblem) else registry.attention
    return op.explain(problem)


def tensors(d, dv, heads_kv=2):
    shapes = (2, 4, 33, d), (2, heads_kv, 40, d), (2, heads_kv, 40, dv)
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2).contiguous().transpose(1, 2) for shape in shapes]


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on the CPU under the interpreter only")
@pytest.mark.parametrize(("d", "dv", "heads_kv"), [(59, 59, 4), (59, 59, 2), (3, 13, 1), (40, 41, 2), (258, 258, 2)])
def test_copies_give_what_the_oracle_gives(d, dv, heads_kv):
    q, k, v = tensors(d, dv, heads_kv)
    config = {"then": "torch_math"}
    with registry.use("torch_cpu"):  # what is asked of the call is not asked of its copies
        out, lse = triton_padded.attention(q, k, v, **MASKS, return_lse=True, scale=0.2, config=config)
    right, right_lse = registry.attention.reference(q, k, v, causal=True, scale=0.2, return_lse=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse, check_dtype=False, rtol=1e-5, atol=1e-5)
    assert out.stride() == torch.empty(2, 33, 4, dv).transpose(1, 2).stride(), "memory order of q"
    grad_out = torch.randn_like(out)
    given = {**MASKS, "grad_lse": None, "deterministic": False, "scale": 0.2, "config": {"then": "torch_math_backward"}}
    grads = triton_padded.backward(grad_out, q, k, v, out, lse, **given)
    torch.testing.assert_close(grads, registry.attention.backward.reference(grad_out, q, k, v, causal=True, scale=0.2))


@pytest.mark.parametrize(
    ("shape", "picked"),
    [
        ({"d": 59, "causal": True}, "triton_padded"),
        ({"d": 59, "softcap": 3.0, "hkv": 2}, "triton_padded"),
        ({"d": 72, "dv": 59}, "triton_padded"),
    ],
)
def test_they_stand_before_stored_scores(shape, picked):
    for kind, ending in ((AttentionProblem, ""), (AttentionBackwardProblem, "_backward")):
        decision = explained(kind.of_shape(H200, b=2, hq=8, s=2048, **shape))
        assert decision.variant == picked + ending
        assert decision.config["then"] not in ("", "torch_math", "torch_math_backward")


def test_wide_heads_of_groups_are_repeated_for_gradients_of_float32_alone():
    """Of 16 bits there are kernels that take heads over 256 as they are."""
    wide = {"b": 2, "hq": 8, "s": 2048, "d": 512, "hkv": 2}
    assert explained(AttentionProblem.of_shape(H200, **wide)).variant == "gluon_stored"
    assert explained(AttentionBackwardProblem.of_shape(H200, **wide)).variant == "gluon_stored_backward"
    exact = explained(AttentionBackwardProblem.of_shape(H200, **wide, dtype="float32"))
    assert (exact.variant, exact.config["then"]) == ("triton_padded_backward", "torch_efficient_backward")


def test_the_copies_are_asked_for_all_that_the_call_asks_for():
    """A kernel that is not told of a gradient of the LSE leaves it out."""
    for kind in AttentionProblem, AttentionBackwardProblem:
        asked = {"causal": True, "softcap": 3.0, "lse": True, "deterministic": True}
        problem = kind.of_shape(H200, b=2, hq=8, s=2048, d=59, **asked)
        if kind is AttentionBackwardProblem:
            problem = dataclasses.replace(problem, grad_lse=True)
        copies = triton_padded._of_copies(problem)
        sizes = {"head_dim", "head_dim_v", "operands", "layout"}
        for field in {f.name for f in dataclasses.fields(problem)} - sizes:
            assert getattr(copies, field) == getattr(problem, field), field


def test_they_run_where_nothing_takes_the_tensors_as_they_are():
    decision = explained(AttentionProblem.of_shape(H200, b=2, hq=8, s=2048, d=64))
    assert decision.variant != "triton_padded"
    refused = next(c for c in decision.candidates if c.variant == "triton_padded")
    assert "no multiple of 8" in str(refused.reasons[0])


def test_a_copy_is_made_for_operands_that_begin_anywhere():
    """As q, k and v do that are parts of one tensor: a launch for aligned ones is compiled again at every call, and no
    CUDA graph takes it."""
    qkv = torch.empty(2, 64, 3, 3, 59, dtype=torch.bfloat16)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    problem, _ = registry.attention.problem_of(q, k, v, target=H200)
    made = []
    triton_padded._Copies(problem, lambda call: made.append(call))
    begins = {operand.name: operand.base_alignment for operand in problem.operands}
    assert begins["q"] == 16 > begins["k"]
    assert [call.arguments["x"].alignment for call in made[:3]] == [begins[name] for name in "qkv"]
