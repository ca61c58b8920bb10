"""What matmul means, whatever runs it: torch.matmul's shapes, strides, epilogues, gradients."""

from __future__ import annotations

import math

import pytest
import torch

import registry
from registry.dispatch.precision import float32_precision
from registry.ops.parts.memory import conditions

SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((6, 1, 3, 4), (2, 4, 5)),
    ((1, 3, 4), (1, 4, 5)),
    ((2, 1, 3, 4), (1, 5, 4, 2)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_shapes_are_torchs(a, b):
    a, b = torch.randn(a), torch.randn(b)
    expected = torch.matmul(a, b)
    found = registry.matmul(a, b)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    out = torch.full_like(expected, float("nan"))
    assert registry.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_gradients_are_torchs(a, b):
    a, b = (
        torch.randn(a, dtype=torch.float64, requires_grad=True),
        torch.randn(b, dtype=torch.float64, requires_grad=True),
    )
    expected = torch.autograd.grad((torch.matmul(a, b) ** 2).sum(), (a, b))
    found = torch.autograd.grad((registry.matmul(a, b) ** 2).sum(), (a, b))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "strided"])
def test_layouts_need_no_copy(layout):
    def matrix(letter, rows, columns):
        if letter == "n":
            return torch.randn(rows, columns)
        return torch.randn(columns, rows).t() if letter == "t" else torch.randn(rows, 2 * columns)[:, ::2]

    letters = layout if len(layout) == 2 else ("s", "n")
    a, b = matrix(letters[0], 6, 8), matrix(letters[1], 8, 10)
    problem = registry.matmul.explain(a, b).problem
    assert problem.layout == layout
    torch.testing.assert_close(registry.matmul(a, b), a @ b)


def test_a_folded_batch_is_one_tall_matrix():
    problem = registry.matmul.explain(torch.randn(2, 3, 4), torch.randn(4, 5)).problem
    assert (problem.m, problem.batch, problem.batched) == (6, 1, False)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_epilogue(activation, grad):
    a, b, bias = (torch.randn(*s, requires_grad=grad) for s in ((3, 4), (4, 5), (5,)))
    functions = {
        None: lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
    }
    expected = functions[activation](a @ b + bias)
    found = registry.matmul(a, b, bias=bias, activation=activation)
    torch.testing.assert_close(found, expected)
    if grad:
        ours = torch.autograd.grad(found.sum(), (a, b, bias))
        theirs = torch.autograd.grad(expected.sum(), (a, b, bias))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_dispatch_too():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with registry.record() as recorder:
        registry.matmul(a, b).sum().backward()
    assert recorder.counts == {"matmul": {"torch_matmul": 3}}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_fp8(dtype, rowwise):
    a, b = torch.randn(6, 16).to(dtype), torch.randn(16, 8).to(dtype)
    scale_a = torch.rand(6) if rowwise else torch.tensor(0.5)
    scale_b = torch.rand(8) if rowwise else torch.tensor(2.0)
    found = registry.matmul(a, b, scale_a=scale_a, scale_b=scale_b)
    assert found.dtype is torch.bfloat16
    expected = registry.matmul.reference(a, b, scale_a=scale_a, scale_b=scale_b)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


STRIDED = {
    "dense": lambda: torch.randn(2, 3, 16),
    "transposed": lambda: torch.randn(3, 2, 16).transpose(0, 1),
    "a slice": lambda: torch.randn(2, 5, 16)[:, :3],
    "expanded": lambda: torch.randn(1, 3, 16).expand(2, 3, 16),
    "columns": lambda: torch.randn(2, 16, 3).mT,
    "no inner size": lambda: torch.randn(2, 3, 0),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("how", STRIDED)
def test_rows_are_counted_whatever_their_strides(how, gated):
    a = STRIDED[how]()
    b, scales = torch.randn(a.shape[-1], 8), {"scale_a": torch.rand(6), "scale_b": torch.rand(8)}
    wanted = registry.matmul.reference(a, b, **scales, gated=gated).float()
    torch.testing.assert_close(registry.matmul(a, b, **scales, gated=gated), wanted)
    for call in (registry.matmul, registry.matmul.explain, registry.matmul.reference):
        with pytest.raises(registry.InvalidArgument, match=r"scale_a: got shape \(3,\); allowed: \(\) or \(6,\)"):
            call(a, b, **scales | {"scale_a": torch.rand(3)}, gated=gated)


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("rowwise", [False, True])
def test_the_reference_takes_what_the_call_takes(a, b, rowwise):
    rows = 1 if len(a) == 1 else a[-2] if len(b) > 2 else math.prod(a[:-1])
    columns = 1 if len(b) == 1 else b[-1]
    scales = (torch.rand(rows), torch.rand(columns)) if rowwise else (torch.tensor(0.5), torch.tensor(2.0))
    given = {"scale_a": scales[0], "scale_b": scales[1], "bias": torch.randn(columns), "activation": "relu"}
    a, b = torch.randn(a), torch.randn(b)
    found, wanted = registry.matmul(a, b, **given), registry.matmul.reference(a, b, **given)
    assert found.shape == wanted.shape == torch.matmul(a, b).shape
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)


def test_int8_accumulates_in_int32():
    a = torch.randint(-128, 128, (5, 300), dtype=torch.int8)
    b = torch.randint(-128, 128, (300, 7), dtype=torch.int8)
    found = registry.matmul(a, b)
    assert found.dtype is torch.int32
    assert torch.equal(found, (a.long() @ b.long()).int())


def test_out_dtype():
    a, b = torch.randn(4, 64).bfloat16(), torch.randn(64, 4).bfloat16()
    found = registry.matmul(a, b, out_dtype=torch.float32)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_a_scaled_product_of_float64_has_the_accuracy_of_float64():
    a, b = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    scales = {"scale_a": torch.rand(8), "scale_b": torch.rand(4)}
    got = registry.matmul(a, b, **scales)
    want = a @ b * (scales["scale_a"].double().reshape(-1, 1) * scales["scale_b"].double())
    assert torch.allclose(got, want, rtol=1e-13, atol=1e-13)


STRAIGHT = {
    "two dimensions": ((8, 16), (16, 8)),
    "a batch of rows": ((2, 4, 16), (16, 8)),
    "a batch of products": ((3, 8, 16), (3, 16, 8)),
    "broadcast": ((2, 1, 8, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", STRAIGHT.values(), ids=STRAIGHT)
def test_what_comes_down_to_torchs_product_goes_straight_there(shapes, dtype):
    """By a guard that holds for calls like the first: others, and other precisions, are decided."""
    registry.matmul.plans.clear()
    a, b = (torch.randn(shape).to(dtype) for shape in shapes)
    results = [registry.matmul(a, b) for _ in range(3)]
    assert all(torch.equal(one, torch.matmul(a, b)) for one in results)
    (known,) = registry.matmul.plans.straight.values()
    assert known[1] is torch.matmul and known[2] == (None if dtype != torch.float32 else float32_precision())
    registry.matmul.plans.straight.clear()
    with registry.use("torch_matmul"):
        registry.matmul(a, b)
    registry.matmul(a, b, activation="relu")
    registry.matmul(a, b, out_dtype=dtype)
    registry.matmul(a.clone().requires_grad_(), b)
    assert not registry.matmul.plans.straight, "none of these is that call"


def test_a_straight_call_under_another_precision_is_decided():
    a, b = torch.randn(2, 4, 16), torch.randn(16, 8)
    registry.matmul.plans.clear()
    registry.matmul(a, b)
    ((key, (guard, _, precision)),) = registry.matmul.plans.straight.items()
    never = lambda a, b: pytest.fail("it was chosen under another precision")  # noqa: E731
    registry.matmul.plans.straight[key] = guard, never, precision
    try:
        with conditions(ieee=False):
            assert torch.equal(registry.matmul(a, b), torch.matmul(a, b))
            with torch.autocast("cpu", torch.bfloat16):
                assert registry.matmul(a, b).dtype == torch.bfloat16
    finally:
        registry.matmul.plans.clear()
