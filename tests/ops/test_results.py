"""What a result is written to, and what it and a bias may be of."""

from __future__ import annotations

import pytest
import torch

import registry
from registry import InvalidArgument


def t(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


# --- out --------------------------------------------------------------------------------------------------------------

BAD_OUT = {
    "sparse": lambda: torch.zeros(4, 4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([t(4), t(4)], layout=torch.jagged),
    "expanded": lambda: torch.zeros(4, 1).expand(4, 4),
    "overlapping itself": lambda: torch.zeros(7).as_strided((4, 4), (1, 1)),
    "requires grad": lambda: torch.zeros(4, 4, requires_grad=True),
    "a number": lambda: 5,
}


@pytest.mark.parametrize("case", BAD_OUT)
def test_out_must_be_writable(case):
    a = t(4, 4)
    messages = []
    for warm in (False, True):
        if warm:
            registry.matmul(a, a.clone(), out=torch.empty(4, 4))
        for call in (registry.matmul, registry.matmul.explain):
            with pytest.raises(InvalidArgument) as caught:
                call(a, a.clone(), out=BAD_OUT[case]())
            messages.append(str(caught.value))
    assert len(set(messages)) == 1 and caught.value.argument == "out"
    with torch.no_grad():
        leaf = torch.zeros(4, 4, requires_grad=True)
        torch.testing.assert_close(registry.matmul(a, a, out=leaf), a @ a)


def test_out_may_overlap_an_input():
    memory, b = t(8, 4), t(4, 4)
    a, out = memory[:4], memory[2:6]
    wanted = a @ b
    torch.testing.assert_close(registry.matmul(a, b, out=out), wanted)
    for shape in ((4, 4), (3, 4, 4), (2, 3, 4, 4)):
        for name in ("a", "b"):
            given = {"a": t(*shape), "b": t(*shape)}
            wanted = given["a"] @ given["b"]
            assert registry.matmul(**given, out=given[name]) is given[name]
            torch.testing.assert_close(given[name], wanted)
    bias = memory[0]
    wanted = memory[4:] @ b + bias
    torch.testing.assert_close(registry.matmul(memory[4:], b, bias=bias, out=memory[:4]), wanted)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["a", "b"])
def test_out_may_overlap_what_another_storage_holds(name, warm):
    """What is taken by DLPack or from NumPy; torch's own product sees no overlap there, and is wrong."""
    registry.forget_plans()
    given = {"a": t(4, 4), "b": t(4, 4)}
    wanted = given["a"] @ given["b"]
    if warm:
        registry.matmul(**given, out=torch.empty(4, 4))
    torch.testing.assert_close(registry.matmul(**given, out=torch.from_dlpack(given[name])), wanted)


def test_out_beside_the_inputs_in_one_buffer_is_no_overlap():
    memory = t(12, 4)
    explained = registry.matmul.explain(memory[:4], memory[4:8], out=memory[8:])
    assert explained.problem.out
    assert not registry.matmul.explain(memory[:4], memory[4:8], out=memory[6:10]).problem.out


# --- dtypes of bias and result ----------------------------------------------------------------------------------------


def test_a_bias_is_of_the_results_kind():
    whole, real = torch.ones(4, 4, dtype=torch.int8), t(4, 4)
    for a, bias in (
        (whole, torch.full((4,), 0.75)),
        (real, torch.ones(4, dtype=torch.int64)),
        (real, real[0].to_sparse()),
    ):
        for call in (registry.matmul, registry.matmul.explain):
            with pytest.raises(InvalidArgument, match="bias"):
                call(a, a, bias=bias)
    found = registry.matmul(whole, whole, bias=torch.full((4,), 0.75), out_dtype=torch.float32)
    assert torch.all(found == 4.75)
    assert torch.all(registry.matmul(whole, whole, bias=torch.full((4,), 7, dtype=torch.int32)) == 11)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("scale_a", {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(0.5)}),
        ("scale_a", {"scale_a": torch.rand(4), "scale_b": torch.rand(4), "out_dtype": torch.int32}),
        ("activation", {"activation": "gelu"}),
        ("activation", {"activation": "silu"}),
    ],
)
def test_nothing_is_rounded_to_an_integer_in_silence(name, given):
    a = torch.ones(4, 4, dtype=torch.int8)
    for call in (registry.matmul, registry.matmul.explain):
        with pytest.raises(InvalidArgument, match="int32 results") as caught:
            call(a, a, **given)
        assert caught.value.argument == name
        call(a, a, **given | {"out_dtype": torch.float32})
        with pytest.raises(InvalidArgument, match="out_dtype: got torch.int32 for float32"):
            call(a.float(), a.float(), out_dtype=torch.int32)


def test_int8_results_do_not_wrap():
    a = torch.full((4, 4), 100, dtype=torch.int8)
    assert torch.all(registry.matmul(a, a) == 40000)
    with pytest.raises(InvalidArgument, match="out_dtype.*int32"):
        registry.matmul(a, a, out_dtype=torch.int8)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_bias_that_an_int32_sum_does_not_hold_goes_around(activation):
    """As torch adds int32, in the reference too."""
    a, b = torch.tensor([[3, -4]], dtype=torch.int8), torch.ones(2, 4, dtype=torch.int8)
    a = torch.cat((a, -a, a * 2))
    bias = torch.tensor([2**31 - 1, -(2**31), 2**31 - 2, 5], dtype=torch.int32)
    want = torch.matmul(a.int(), b.int()) + bias
    assert int((want.long() != a.long() @ b.long() + bias).sum()) == 3
    want = want.relu() if activation else want
    for given in (bias, bias.repeat_interleave(2)[::2]):
        assert torch.equal(registry.matmul(a, b, bias=given, activation=activation), want)
        reference = registry.matmul.reference(a, b, bias=given, activation=activation)
        assert reference.dtype is torch.float64 and torch.equal(reference, want.double())
    wide = registry.matmul.reference(a, b, bias=bias.double())
    assert torch.equal(wide, (a.long() @ b.long()).double() + bias.double()), "a floating result goes around nowhere"


def test_sums_of_int8_are_as_long_as_int32_holds_them_for_sure():
    most = 2**17 - 1
    a, b = torch.full((1, most + 1), -128, dtype=torch.int8), torch.full((most + 1, 1), -128, dtype=torch.int8)
    assert registry.matmul(a[:, :most], b[:most]).item() == most * 2**14
    for call in (registry.matmul, registry.matmul.explain, registry.matmul.reference):
        with pytest.raises(InvalidArgument, match="a: got an inner size of 131072; allowed: up to 131071 for int8"):
            call(a, b)
