"""What grouped_mm means, whatever runs it: forms and offsets, what surrounds the products, gradients, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import registry
from registry import InvalidArgument, Target, grouped_mm
from registry.ops.grouped_mm.draws import SPREADS, draw, ends_of
from registry.ops.grouped_mm.problem import GroupedMmProblem


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def operands(form, dtype=torch.float64):
    """a, b and offsets, with an empty group among them."""
    if form == "batch":
        return torch.randn(3, 10, 8, dtype=dtype), torch.randn(3, 8, 8, dtype=dtype), None
    if form == "inner":
        return torch.randn(10, 12, dtype=dtype), torch.randn(12, 8, dtype=dtype), offsets(5, 5, 12)
    return torch.randn(12, 8, dtype=dtype), torch.randn(3, 8, 8, dtype=dtype), offsets(5, 5, 12)


FORMS = pytest.mark.parametrize("form", ["rows", "batch", "inner"])


@FORMS
def test_products_are_torchs(form):
    a, b, offs = operands(form, torch.float32)
    torch.testing.assert_close(grouped_mm(a, b, offs=offs), torch.nn.functional.grouped_mm(a, b, offs=offs))


@FORMS
def test_out_is_written_and_may_overlap(form):
    a, b, offs = operands(form)
    want = grouped_mm.reference(a, b, offs=offs)
    out = torch.full_like(want, float("nan"))
    assert grouped_mm(a, b, offs=offs, out=out) is out
    torch.testing.assert_close(out, want)
    shared = torch.randn(12, 8, dtype=torch.float64)
    square, kept = torch.randn(3, 8, 8, dtype=torch.float64), shared.clone()
    assert grouped_mm(shared, square, offs=offsets(5, 5, 12), out=shared) is shared
    torch.testing.assert_close(shared, grouped_mm(kept, square, offs=offsets(5, 5, 12)))


def test_rows_of_no_group_are_zeros():
    a, b, _ = operands("rows")
    out = grouped_mm(a, b, offs=offsets(2, 2, 7), bias=torch.ones(3, 8))
    assert not out[7:].any() and out[:7].any()


def test_gather_bias_activation_and_gate():
    a, b, offs = operands("rows")
    rows, bias = torch.tensor([3, 3, 0, 11, 5, 2, 1, 9]), torch.randn(3, 8, dtype=torch.float64)
    ends = offsets(2, 5, 8)
    found = grouped_mm(a, b, offs=ends, rows=rows, bias=bias, activation="silu", gated=True)
    for row, group in ((0, 0), (4, 1), (7, 2)):
        gate, up = (a[rows[row]] @ b[group] + bias[group]).chunk(2)
        torch.testing.assert_close(found[row], torch.nn.functional.silu(gate) * up)


def test_fp8_with_scales_gives_bfloat16():
    a, b, offs = operands("rows")
    a, b = a.to(torch.float8_e4m3fn), b.mT.contiguous().to(torch.float8_e4m3fn).mT
    scales = {"scale_a": torch.rand(12), "scale_b": torch.rand(3, 8)}
    found = grouped_mm(a, b, offs=offs, **scales)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), grouped_mm.reference(a, b, offs=offs, **scales), rtol=1e-2, atol=1e-2)


def test_autocast():
    a, b, offs = operands("rows", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_mm(a, b, offs=offs).dtype is torch.bfloat16
        assert grouped_mm.explain(a, b, offs=offs).problem.dtype == "bfloat16"


# --- refusals ---------------------------------------------------------------------------------------------------------

A, B, OFFS = torch.randn(12, 8), torch.randn(3, 8, 6), offsets(5, 5, 12)
THREE = torch.randn(3, 12, 8)


@pytest.mark.parametrize(
    ("arguments", "given", "says"),
    [
        ((A, B), {}, "offs: got None"),
        ((A, B), {"offs": offsets(5, 12)}, "offs: got 2 offsets; allowed: 3"),
        ((A, B), {"offs": OFFS.long()}, "offs: got int64"),
        ((A, B), {"offs": offsets(5, 4, 12)}, r"offs\[1\]: got 4"),
        ((A, B), {"offs": offsets(5, 5, 13)}, r"offs\[2\]: got 13"),
        ((A, B), {"offs": offsets(-1, 5, 12)}, r"offs\[0\]: got -1"),
        ((A, B), {"offs": OFFS, "rows": torch.tensor([0, 12] * 6)}, "rows: got 12"),
        ((A, B), {"offs": OFFS, "rows": torch.zeros(12)}, "rows: got float32"),
        ((THREE, B), {"offs": OFFS}, "offs: got given"),
        ((THREE, B), {"rows": OFFS}, "rows: got given"),
        ((THREE[:2], B), {}, "2 groups"),
        ((A, B[:, :7]), {"offs": OFFS}, "an inner size of 8"),
        ((A, B.double()), {"offs": OFFS}, "b: got dtype float64"),
        ((A, B.int()), {"offs": OFFS}, "b: got int32"),
        ((THREE, A), {"offs": OFFS}, r"grouped_mm\(b.mT, a.mT, offs=offs\).mT"),
        ((A.mT, A), {"offs": OFFS, "bias": torch.ones(3, 8)}, "bias: got given"),
        ((A, B), {"offs": OFFS, "bias": torch.ones(6)}, r"bias: got float32 of shape \(6,\)"),
        ((A, B), {"offs": OFFS, "activation": "tanh"}, "activation: got 'tanh'"),
        ((A, B[..., :5]), {"offs": OFFS, "gated": True}, "b: got 5 columns"),
        ((A, B), {"offs": OFFS, "gated": 1}, "gated: got 1"),
        ((A, B), {"offs": OFFS, "scale_a": torch.ones(12)}, "scale_b: got None"),
        ((A, B), {"offs": OFFS, "out_dtype": torch.int8}, "out_dtype: got torch.int8"),
        ((A, B), {"offs": OFFS, "out": torch.empty(12, 5)}, "out: got shape"),
        ((torch.ones(1, 1), torch.ones(1025, 1, 1)), {"offs": torch.ones(1025, dtype=torch.int32)}, "at most 1024"),
    ],
)
def test_refusals_name_the_argument(arguments, given, says):
    for call in (grouped_mm, grouped_mm.explain):
        with pytest.raises(InvalidArgument, match=says):
            call(*arguments, **given)


@pytest.mark.parametrize("gated", [0, 1, np.bool_(False)])
def test_what_equals_a_kept_flag_is_judged_anew(gated):
    for warm in (False, True):
        if warm:
            grouped_mm(A, B, offs=OFFS, gated=bool(gated))
        with pytest.raises(InvalidArgument, match="gated"):
            grouped_mm(A, B, offs=OFFS, gated=gated)


def test_tensors_beside_the_operands_are_looked_at():
    """One that lives in a mode goes by the torch op, however plain the operands are."""
    with FakeTensorMode() as mode:
        offs = mode.from_tensor(OFFS)
    with pytest.raises(AssertionError, match="FakeTensor"):
        grouped_mm(A, B, offs=offs)
    with pytest.raises(InvalidArgument, match="offs: got int32 of shape"):
        grouped_mm(A, B, offs=OFFS.to("meta"))


def test_values_are_checked_in_every_call_not_once_a_plan():
    grouped_mm(A, B, offs=OFFS)
    with pytest.raises(InvalidArgument, match="offs"):
        grouped_mm(A, B, offs=offsets(12, 5, 5))


@pytest.mark.parametrize("follow", ["backward", "jvp", "vmap", "made inside"])
@pytest.mark.parametrize("rows", [(0, 12), (-1, 0)])
def test_rows_that_are_not_there_are_refused_under_autograd_too(rows, follow):
    how = {"offs": offsets(1, 1, 2), "rows": torch.tensor(rows)}
    call = {
        "backward": lambda: grouped_mm(A.clone().requires_grad_(), B, **how),
        "jvp": lambda: torch.func.jvp(lambda a: grouped_mm(a, B, **how), (A,), (A,)),
        "made inside": lambda: torch.func.grad(lambda a: grouped_mm(a, B, **{n: t + 0 for n, t in how.items()}).sum())(
            A
        ),
        "vmap": lambda: torch.func.vmap(lambda a: grouped_mm(a, B, **how))(torch.stack([A, A])),
    }[follow]
    with pytest.raises(InvalidArgument, match="rows: got"):
        call()


# --- for GPUs that are not here ---------------------------------------------------------------------------------------


def problem(gpu="H100", **sizes):
    return GroupedMmProblem.of_shape(Target.named(gpu), **sizes)


@pytest.mark.parametrize("gpu", ["A100", "RTX 3090", "H100", "B200"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"form": "inner", "layout": "tn"},
        {"form": "inner", "layout": "nt"},
        {"form": "batch"},
        {"gather": True, "activation": "silu", "gated": True},
        {"e": 300, "m": 77, "n": 33, "k": 7},
        {"dtype": "float32", "layout": "tt"},
    ],
)
def test_a_gpu_always_has_a_kernel_that_waits_for_nothing(gpu, sizes):
    assert not registry.variants()["triton_grouped"].reasons(problem(gpu, **sizes))


def test_rows_that_are_one_row_do_not_go_through_boxes():
    a = torch.empty(1, 64, dtype=torch.bfloat16, device="meta").expand(300, 64)
    b = torch.empty(3, 128, 64, dtype=torch.bfloat16, device="meta").mT
    offs = torch.empty(3, dtype=torch.int32, device="meta")
    asked, _ = grouped_mm.problem_of(a, b, offs=offs, target=Target.named("H100"))
    plain, specialized = (registry.variants()[name] for name in ("triton_grouped", "gluon_grouped_ws"))
    assert not any(config["TMA"] for config in plain.legal_configs(asked)) and plain.legal_configs(asked)
    assert specialized.reasons(asked)


def test_torchs_kernel_is_refused_where_it_would_end_the_context():
    torchs = registry.variants()["torch_grouped_mm"]
    assert not torchs.reasons(problem())
    assert not torchs.reasons(problem(form="inner", layout="tn"))
    for refused in ({"form": "inner", "layout": "nt"}, {"n": 1001}, {"dtype": "float16"}, {"out_dtype": "float32"}):
        assert torchs.reasons(problem(**refused)), refused
    assert torchs.reasons(problem("A100"))


def test_spreads_are_what_they_say():
    for spread in SPREADS:
        ends = ends_of(spread, 12, 1000)
        assert len(ends) == 12 and ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= 1000
        assert (ends[-1] == 1000) == (spread != "short"), spread
        assert ends == ends_of(spread, 12, 1000)
    sizes = [
        end - start for start, end in zip([0, *ends_of("empty", 12, 1000)], ends_of("empty", 12, 1000), strict=False)
    ]
    assert sizes.count(0) == 8


def test_draws_are_the_same_for_a_seed():
    import random

    assert [draw(random.Random(3)).text for _ in range(2)] == [draw(random.Random(3)).text for _ in range(2)]


def test_a_graph_is_made_without_a_warning(recwarn):
    given = {"bias": torch.ones(3, 6), "rows": torch.arange(12), "scale_a": torch.ones(12), "scale_b": torch.ones(3, 6)}
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: grouped_mm(a, b, offs=OFFS, **given), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(A, B), grouped_mm(A, B, offs=OFFS, **given))
    assert not [one for one in recwarn if "lru_cache" in str(one.message)]
