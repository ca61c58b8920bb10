"""Products that end with a gate: what they mean, which op runs them, and what becomes of them elsewhere."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import registry
from registry import IllegalVariant, InvalidArgument, Target, UnknownVariant, matmul

H200 = Target.named("H200")
SHAPES = [((100, 24), (24, 12)), ((5, 30, 24), (24, 12)), ((3, 70, 24), (3, 24, 12)), ((24,), (24, 12))]
SHAPES += [((2, 1, 70, 24), (3, 24, 12)), ((0, 24), (24, 12)), ((70, 0), (0, 12)), ((70, 24), (24, 0))]
each_shape = pytest.mark.parametrize("shapes", SHAPES, ids=str)


def doubles(*shapes, grad=False):
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_(grad) for shape in shapes]


def ran(call):
    """What a call gives, and what it ran: {op: {variant: times}}."""
    with registry.record() as seen:
        found = call()
    return found, {op: dict(counts) for op, counts in seen.counts.items()}


@pytest.fixture
def kernel():
    """A variant of the op of groups that looks like one that is compiled here, and runs on a CPU."""

    def run(a, b, *, offs, out, config, activation, gated):
        result = registry.grouped_mm.reference(a, b, offs=offs, activation=activation, gated=gated).to(a.dtype)
        return result if out is None else out.copy_(result)

    requires = registry.Requires(
        arch=("any",),
        dtypes=("float64", "float32"),
        forms=("rows", "batch"),
        layouts=("nn", "nt", "tn", "tt", "strided"),
        activations=("silu", "relu", "gelu"),
        gated=True,
        out=True,
        ieee=True,
    )
    variant = registry.Variant("test.gate", op="grouped_mm", run=run, requires=requires, builds=lambda *_: [])
    registry.register(variant)
    yield variant.name
    registry.unregister(variant.name)


@each_shape
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "relu"])
def test_half_of_the_columns_gates_the_other(shapes, activation):
    a, b = doubles(*shapes)
    both = torch.matmul(a, b)
    gate, up = both.chunk(2, -1)
    functions = {None: lambda x: x, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    want = functions.get(activation, torch.relu)(gate) * up
    found = matmul(a, b, activation=activation, gated=True)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(matmul.reference(a, b, activation=activation, gated=True), want)


@each_shape
@pytest.mark.parametrize("how", ["preferred", "asked for", "in a block"])
def test_a_kernel_that_ends_with_its_gate_is_one_group_or_a_batch_of_groups(shapes, how, kernel):
    a, b = doubles(*shapes)
    want = matmul.reference(a, b, activation="silu", gated=True)
    call = lambda **more: matmul(a, b, activation="silu", gated=True, **more)  # noqa: E731
    if how == "preferred":
        with registry.prefer(kernel):
            found, seen = ran(call)
    elif how == "in a block":
        with registry.use(kernel):
            found, seen = ran(call)
    else:
        found, seen = ran(lambda: call(variant=kernel))
    torch.testing.assert_close(found, want)
    if want.numel() and a.numel():
        assert seen == {"grouped_mm": {kernel: 1}}


def test_bias_and_scales():
    a, b, bias, scale_a, scale_b = doubles((20, 24), (24, 12), (12,), (20,), (12,))
    scales = {"scale_a": scale_a.float(), "scale_b": scale_b.float()}
    for given in ({"bias": bias}, {**scales}, {"bias": bias, **scales}):
        want = matmul.reference(a, b, **given, activation="silu", gated=True)
        for variant in (None, "torch_loop"):
            torch.testing.assert_close(matmul(a, b, **given, activation="silu", gated=True, variant=variant), want)
    one = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(3.0)}
    want = matmul.reference(a, b, **one, activation="silu", gated=True)
    for variant in (None, "torch_loop"):
        torch.testing.assert_close(matmul(a, b, **one, activation="silu", gated=True, variant=variant), want)


def test_float8_and_other_results():
    a, b = torch.randn(40, 32), torch.randn(32, 16)
    small = a.to(torch.float8_e4m3fn), b.mT.contiguous().to(torch.float8_e4m3fn).mT
    for out_dtype in (None, torch.float32):
        found = matmul(*small, out_dtype=out_dtype, activation="silu", gated=True)
        assert found.dtype is (out_dtype or torch.bfloat16)
        want = matmul.reference(*small, activation="silu", gated=True)
        torch.testing.assert_close(found.double(), want, rtol=3e-2, atol=3e-2)
    whole = torch.randint(-9, 9, (40, 32), dtype=torch.int8), torch.randint(-9, 9, (32, 16), dtype=torch.int8)
    found = matmul(*whole, out_dtype=torch.float32, activation="relu", gated=True)
    torch.testing.assert_close(found.double(), matmul.reference(*whole, activation="relu", gated=True))


@pytest.mark.parametrize("how", ["a plain product", "a group"])
def test_out_is_written_and_may_overlap(how, kernel):
    a, b = doubles((70, 24), (24, 12))
    want = matmul.reference(a, b, activation="silu", gated=True)
    with registry.prefer(kernel) if how == "a group" else contextlib.nullcontext():
        out = torch.full_like(want, float("nan"))
        assert matmul(a, b, activation="silu", gated=True, out=out) is out
        torch.testing.assert_close(out, want)
        across = torch.full((6, 70), float("nan"), dtype=torch.float64).mT
        torch.testing.assert_close(matmul(a, b, activation="silu", gated=True, out=across), want)
        assert matmul(a, b, activation="silu", gated=True, out=a[:, :6]).data_ptr() == a.data_ptr()
        torch.testing.assert_close(a[:, :6], want)
        batch = torch.full((2, 35, 6), float("nan"), dtype=torch.float64)
        again = torch.randn(2, 35, 24, dtype=torch.float64)
        torch.testing.assert_close(
            matmul(again, b, gated=True, out=batch), matmul.reference(again, b, gated=True), msg="of more dimensions"
        )


@pytest.mark.parametrize("around", [False, True], ids=["dense", "a view"])
@pytest.mark.parametrize("shapes", [((3,), (2, 3, 3, 4)), ((2, 3), (2, 3, 3, 4)), ((2, 2, 3), (3, 4)), ((3,), (3, 4))])
def test_out_of_whatever_batches_is_written_where_it_is(shapes, around):
    """What is computed of folded batches has another shape, to which torch would resize an `out`."""
    a, b = doubles(*shapes)
    want = matmul.reference(a, b, gated=True)
    memory = torch.full((*want.shape[:-1], 5), 7.0, dtype=torch.float64)
    out = memory[..., :2] if around else torch.empty_like(want)
    found = matmul(a, b, gated=True, out=out)
    assert found is out and out.shape == want.shape
    torch.testing.assert_close(out, want)
    assert torch.all(memory[..., 2:] == 7)


BAD = {
    "an odd number of columns": ({"b": torch.ones(24, 11)}, "b: got 11 columns; allowed: an even number"),
    "a vector": ({"b": torch.ones(24)}, "b: got 1 columns; allowed: an even number"),
    "a number for the flag": ({"gated": 1}, "gated: got 1; allowed: True or False"),
    "nothing for the flag": ({"gated": None}, "gated: got None; allowed: True or False"),
    "half a bias": ({"bias": torch.ones(6)}, "bias: got .*; allowed: None or a tensor of shape"),
    "an activation": ({"activation": "swish"}, "activation: got 'swish'; allowed: None, "),
    "integers": ({"out_dtype": torch.int32}, "out_dtype: got int32; allowed: a floating dtype"),
    "a result of both halves": ({"out": torch.ones(20, 12)}, r"out: got shape \(20, 12\); allowed: shape \(20, 6\)"),
    "a result that is none": ({"out": 3}, "out: got int"),
    "a result with a gradient": (
        {"out": torch.ones(20, 6, requires_grad=True)},
        "out: got a tensor that requires grad",
    ),
    "one scale": ({"scale_a": torch.ones(20)}, "scale_b: got None"),
    "no tensor": ({"a": None}, "a: got NoneType"),
    "no name": ({"variant": []}, r"variant: got \[\]; allowed: None or the name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    bad, message = BAD[case]
    given = {"a": torch.ones(20, 24), "b": torch.ones(24, 12), "gated": True, **bad}
    a, b = given.pop("a"), given.pop("b")
    for call in (matmul, matmul.explain):
        with pytest.raises(InvalidArgument, match=message):
            call(a, b, **given)


def test_variants_of_either_op_may_be_named():
    a, b = doubles((20, 24), (24, 12))
    want = matmul.reference(a, b, gated=True)
    for variant, op in (("torch_matmul", "matmul"), ("torch_loop", "grouped_mm")):
        found, seen = ran(lambda v=variant: matmul(a, b, gated=True, variant=v))
        torch.testing.assert_close(found, want)
        assert seen == {op: {variant: 1}}
        decision = matmul.explain(a, b, gated=True, variant=variant)
        assert (decision.problem.op, decision.variant) == (op, variant)
    with pytest.raises(IllegalVariant, match="gluon_grouped_ws"):
        matmul(a, b, gated=True, variant="gluon_grouped_ws")
    for call in (matmul, matmul.explain):
        with pytest.raises(UnknownVariant, match="no variant 'nobody'"):
            call(a, b, gated=True, variant="nobody")


def test_it_is_a_group_where_a_kernel_was_measured_to_be_the_fastest():
    b = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta").mT
    for rows, op in ((8, "matmul"), (63, "matmul"), (512, "grouped_mm"), (8192, "grouped_mm")):
        a = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        decision = matmul.explain(a, b, activation="silu", gated=True, target=H200)
        assert decision.problem.op == op
        assert getattr(decision.problem, "gated", False) == (op == "grouped_mm")
    a, b = torch.empty(512, 256, device="meta"), torch.empty(256, 512, device="meta")
    decision = matmul.explain(a, b, activation="silu", gated=True, target=H200)
    assert decision.problem.op == "matmul" and decision.problem.n == 512 and not decision.problem.activation
    plain = matmul.explain(a, b, gated=False, target=H200)
    assert plain.problem == matmul.explain(a, b, target=H200).problem


def test_gradients(kernel):
    a, b, bias = doubles((70, 24), (24, 12), (12,), grad=True)
    given = {"bias": bias, "activation": "silu", "gated": True}
    wanted = torch.autograd.grad(matmul.reference(a, b, **given).square().sum(), (a, b, bias))
    for variant in (None, "torch_matmul", "torch_loop"):
        found = torch.autograd.grad(matmul(a, b, **given, variant=variant).square().sum(), (a, b, bias))
        torch.testing.assert_close(found, wanted)
    with registry.prefer(kernel):  # which keeps nothing that a derivative needs
        found = torch.autograd.grad(matmul(a, b, **given).square().sum(), (a, b, bias))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(InvalidArgument, match="out: got given, for operands that require grad"):
        matmul(a, b, **given, out=torch.empty(70, 6, dtype=torch.float64))


@pytest.mark.parametrize("grad", [False, True])
def test_in_a_compiled_graph(grad, kernel):
    a, b, bias = doubles((70, 24), (24, 12), (12,), grad=grad)

    def layer(a, b, bias):
        return matmul(a, b, bias=bias, activation="silu", gated=True) + 1

    want = layer(a, b, bias)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, seen = ran(lambda: compiled(a, b, bias))
    torch.testing.assert_close(found, want)
    if grad:
        wanted = torch.autograd.grad(want.sum(), (a, b, bias))
        torch.testing.assert_close(torch.autograd.grad(found.sum(), (a, b, bias)), wanted)
    else:
        assert seen == {"matmul": {"torch_matmul": 1}}
        with registry.prefer(kernel):
            _, seen = ran(lambda: compiled(a, b, None))
        assert seen == {"grouped_mm": {kernel: 1}}
        named = lambda a, b: matmul(a, b, gated=True, variant=kernel)  # noqa: E731
        _, seen = ran(lambda: torch.compile(named, fullgraph=True, backend="aot_eager")(a, b))
        assert seen == {"grouped_mm": {kernel: 1}}


def test_the_torch_op_keeps_its_promises():
    a, b, bias = (tensor.float() for tensor in doubles((70, 24), (24, 12), (12,)))
    for given in ((a, b, bias, "silu", torch.float32, None, None, None), (a, b, None, "", a.dtype, None, None, None)):
        torch.library.opcheck(torch.ops.registry.matmul_gated.default, given)


def test_flops_are_those_of_both_halves():
    a, b = torch.randn(70, 24), torch.randn(24, 12)
    want = 2 * 70 * 24 * 12
    for call in (
        lambda: matmul(a, b, gated=True),
        lambda: torch.ops.registry.matmul_gated(a, b, None, "", a.dtype, None, None, None),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == want


def test_under_autocast_and_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = torch.randn(70, 24), torch.randn(24, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul(a, b, activation="silu", gated=True).dtype is torch.bfloat16
    with FakeTensorMode():
        found = matmul(torch.empty(70, 24), torch.empty(24, 12), gated=True)
    assert found.shape == (70, 6)
