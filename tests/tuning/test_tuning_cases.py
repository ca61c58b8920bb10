"""What is measured, against what, and by which clock: shapes, workloads, the accuracy gate, timers."""

import itertools
import json

import pytest
import torch

import registry
from registry import Target
from registry.errors import InvalidArgument
from registry.ops.attention import tuning as attention_tuning
from registry.ops.known import op_named
from registry.ops.parts import cases, pieces
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.tuning import grids, machine, timing
from registry.tuning.contestants import Selection, line_up
from registry.tuning.unsure import doubt

H200 = Target.named("H200")
SPELLINGS = {
    "attention": [
        "b=4,hq=16,s=4096,d=128,causal",
        "hq=8,hkv=2,s=1,sk=777,d=64,window=255:0",
        "hq=2,s=64,d=64,dtype=float16",
    ],
    "attention_backward": ["b=2,hq=4,hkv=1,s=96,d=32,layout=bshd,softcap=30.0,grad_lse"],
    "matmul": [
        "m=16,n=32,k=64,b=3,layout=tn,bias,activation=gelu",
        "m=8,n=8,k=8,dtype=int8",
        "m=4,n=4,k=4,scaling=rowwise",
    ],
}


@pytest.mark.parametrize(("op", "text"), [(op, text) for op, texts in SPELLINGS.items() for text in texts])
def test_a_shape_has_one_spelling_that_reads_back(op, text):
    case = Case.parse(op, text)
    assert Case.parse(op, case.text) == case == Case.from_data(case.data())
    assert Case.parse(op, text.replace(",", " ")) == case
    assert case.problem(H200).op == op


@pytest.mark.parametrize(
    ("op", "text", "long"),
    [
        ("attention", "hq=2,s=8,d=4,dtype=bf16", "hq=2,s=8,d=4"),
        ("attention", "hq=2,s=8,d=4,dtype=FP16", "hq=2,s=8,d=4,dtype=float16"),
        ("attention_varlen", "hq=2,sq=8,d=16,kv_dtype=fp8", "hq=2,sq=8,d=16,kv_dtype=float8_e4m3fn"),
        ("matmul", "m=4,n=4,k=4,dtype=fp8,out_dtype=half", "m=4,n=4,k=4,dtype=float8_e4m3fn,out_dtype=float16"),
    ],
)
def test_short_names_of_dtypes_are_other_spellings(op, text, long):
    assert Case.parse(op, text).text == Case.parse(op, long).text == long


def test_defaults_do_not_make_another_case():
    assert (
        Case.parse("attention", "b=1,hq=2,hkv=2,s=8,sk=8,d=4,dv=4,causal=false,dtype=bfloat16,layout=bhsd").text
        == "hq=2,s=8,d=4"
    )


@pytest.mark.parametrize("text", ["q=4", "b=4,depth=3"])
def test_an_unknown_word_is_named(text):
    with pytest.raises(InvalidArgument, match="allowed: b, hq"):
        Case.parse("attention", text)


@pytest.mark.parametrize("op", ["attention", "attention_backward", "matmul"])
def test_every_grid_is_of_problems_that_exist_and_none_is_twice(op):
    found = grids.grid(op, "all")
    assert len({case.text for case in found}) == len(found) > 30
    target = Target.named("H100")
    for case in [*found, *grids.grid(op, "quick"), *grids.grid(op, "tiny")]:
        assert case.problem(target).op == op
    with pytest.raises(InvalidArgument, match="allowed: .*quick"):
        grids.grid(op, "paper81")


def test_paper18_is_the_papers():
    found = grids.grid("attention", "paper18")
    assert len(found) == 18
    for case in found:
        problem = case.problem(H200)
        assert problem.tokens == 16384 if hasattr(problem, "tokens") else problem.facts()["tokens"] == 16384
        assert problem.heads_q * problem.head_dim == 2048 and problem.dtype == "bfloat16"


def test_a_budget_that_ends_early_cuts_what_matters_least():
    assert grids.names("attention")[2:] == ["paper18", "gqa", "single", "lengths"]
    found = grids.grid("attention", "all")
    assert set(found[:18]) == set(attention_tuning.paper18("attention")) and found[:18] != attention_tuning.paper18(
        "attention"
    )
    training = grids.grid("attention_backward", "training")
    assert set(grids.grid("attention_backward", "all")[: len(training)]) == set(training)
    assert set(attention_tuning.paper18("attention_backward")) < set(training) and len(training) < 32


@pytest.mark.parametrize(
    ("op", "text"),
    [("attention", "b=2,hq=6,hkv=3,s=70,d=16,lse"), ("attention_backward", "b=2,hq=4,hkv=2,s=33,d=16,causal")],
)
def test_an_answer_in_fewer_parts_says_the_same(op, text):
    load = workload(Case.parse(op, text), "cpu")
    parts, fewer = list(load.parts()), load.expected()
    assert len(fewer) == 2 * len({part.output for part in parts}) < len(parts)
    for many, few in ((parts, fewer), (fewer, parts)):
        made = {p.output: torch.zeros(_whole(p.output, load), dtype=p.want.dtype) for p in many}
        for part in many:
            made[part.output][part.index] = part.want
        assert all(torch.equal(made[part.output][part.index], part.want) for part in few)


def _whole(output, load):
    q, k = load.tensors["q"], load.tensors["k"]
    return {"out": q.shape, "dq": q.shape, "dk": k.shape, "dv": k.shape, "lse": q.shape[:3]}[output]


def test_each_beginning_of_a_spread_order_is_a_mixture():
    order = cases.spread(grids.grid("attention", "paper18"))
    first = [case.sizes for case in order[:9]]
    assert len({s["d"] for s in first}) == 3 and len({s.get("causal", False) for s in first}) == 2


def test_what_was_recorded_is_what_is_measured(tmp_path):
    q = torch.randn(2, 4, 24, 40, dtype=torch.float32)[..., :32]
    k, v = torch.randn(2, 24, 2, 32).transpose(1, 2), torch.randn(2, 2, 24, 32)
    with registry.record() as recorder:
        registry.attention(q, k, v, causal=True)
        registry.matmul(torch.randn(6, 8).t(), torch.randn(6, 5))
    path = tmp_path / "recorded.jsonl"
    assert cases.save_recorded(recorder.problems, path) == 2
    (attention,), (matmul,) = cases.from_file("attention", path), cases.from_file("matmul", path)
    problems = {problem.op: problem for problem in recorder.problems}
    for case in (attention, matmul):
        assert workload(case, "cpu").problem() == problems[case.op], case
        assert Case.from_data(case.data()) == case
    assert "strides#" in attention.text and matmul.text == "m=8,n=5,k=6,layout=tn,dtype=float32,ieee"


@pytest.mark.parametrize(
    ("op", "text", "word"),
    [
        ("attention", "b=1,window=a:b", "window"),
        ("matmul", "m=8,n=8,k=8,dtype=64", "dtype"),
        ("grouped_mm", "m=8,n=8,k=8,dtype=1:2", "dtype"),
        ("attention_varlen", "b=a,sq=b", "b"),
        ("attention_varlen", "b=1099511627776", "b"),
        ("attention_varlen", "hq=2,sq=16,sk=32,d=64,kv_dtype=float8_e4m3fn,scales=", "scales"),
    ],
)
def test_a_word_that_says_nothing_is_named(op, text, word):
    with pytest.raises(InvalidArgument) as raised:
        Case.parse(op, text).problem(Target.named("H100"))
    assert raised.value.argument == word


@pytest.mark.parametrize(
    "more",
    [
        {"shape": {"m": -4, "n": 4, "k": 4}},
        {"shape": {"m": "x", "n": 4, "k": 4}},
        {"shape": 7},
        {"operands": 7},
        {"operands": {"a": [[4, 4]]}},
        {"operands": {"a": [[4, 4], [4], 16]}},
        {"operands": {"a": [["x", 4], [4, 1], 16]}},
    ],
    ids=str,
)
def test_what_nobody_recorded_is_named(tmp_path, more):
    (path := tmp_path / "recorded.json").write_text(
        json.dumps({"op": "matmul", "shape": {"m": 4, "n": 4, "k": 4}} | more)
    )
    with pytest.raises(InvalidArgument, match="recorded.json:1"):
        cases.from_file("matmul", path)


def test_a_file_of_shapes_names_its_wrong_lines(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("# mine\nhq=2,s=8,d=4  # small\n\nhq=2 s=16 d=4\nhq=2,s=8,d=4\n")
    assert [case.text for case in cases.from_file("attention", path)] == ["hq=2,s=8,d=4", "hq=2,s=16,d=4"]
    path.write_text("hq=2,s=8\nsize=4\n")
    with pytest.raises(InvalidArgument, match=":2"):
        cases.from_file("attention", path)


# --- the gate -----------------------------------------------------------------------------------------------------


def launch(load, variant, config=None):
    found = op_named(load.case.op).variants[variant]
    bound = load.op.bind(found, load.problem(), config or {})
    return load.launches(bound, [load.tensors])[0]


GATED = [
    ("attention", "b=2,hq=4,hkv=2,s=70,sk=90,d=24,causal,dtype=float32,lse", "torch_math"),
    ("attention", "hq=2,s=70,sk=50,d=24,causal,dtype=float64,lse", "torch_math"),
    ("attention", "hq=2,s=70,d=24,window=9:5,dtype=float32,softcap=8.0", "torch_math"),
    ("attention", "hq=2,s=70,d=24,window=9:0,dtype=float32", "torch_cpu"),
    ("attention", "hq=2,s=200,d=32,dtype=bfloat16", "torch_cpu"),
    ("attention_backward", "b=2,hq=4,hkv=2,s=70,sk=90,d=24,causal,dtype=float32,grad_lse", "torch_math_backward"),
    ("attention_backward", "hq=2,s=70,d=24,dtype=bfloat16,causal", "torch_cpu_backward"),
    ("matmul", "m=70,n=33,k=40,layout=tt,dtype=float32,bias,activation=silu", "torch_matmul"),
    ("matmul", "m=70,n=33,k=40,b=3,dtype=bfloat16", "torch_matmul"),
    ("matmul", "m=70,n=32,k=40,dtype=int8", "torch_matmul"),
    ("matmul", "m=64,n=32,k=32,dtype=float8_e4m3fn,scaling=rowwise,layout=nt", "torch_matmul"),
]


@pytest.mark.parametrize(("op", "text", "variant"), GATED)
def test_the_gate_lets_correct_kernels_through_whatever_the_piece(op, text, variant, monkeypatch):
    load = workload(Case.parse(op, text), "cpu")
    with load.settings():
        whole = load.expected()
        verdict = load.judge(launch(load, variant)(), whole)
        assert verdict.ok and verdict.errors, verdict
        monkeypatch.setitem(pieces.PIECE_BYTES, "cpu", 1 << 15)
        cut = load.expected()
        assert load.judge(launch(load, variant)(), cut).ok
    if op != "matmul":
        for one, other in zip(whole, cut, strict=True):
            torch.testing.assert_close(one.want, other.want, rtol=1e-6, atol=1e-9)
    else:
        assert len(cut) >= len(whole)


@pytest.mark.parametrize(("op", "text", "variant"), GATED)
def test_the_gate_stops_one_wrong_tile_in_each_output(op, text, variant):
    load = workload(Case.parse(op, text), "cpu")
    with load.settings():
        wanted = load.expected()
        results = launch(load, variant)()
        results = results if isinstance(results, tuple) else (results,)
        for number in range(len(results)):
            if results[number] is None:
                continue
            spoiled = list(results)
            spoiled[number] = spoiled[number].clone()
            tile = (
                spoiled[number][..., -16:, -8:]
                if spoiled[number].dim() > 3 or op == "matmul"
                else spoiled[number][..., -8:]
            )
            tile += (
                1
                if not tile.dtype.is_floating_point
                else 3 * tile.float().abs().mean().to(tile.dtype).nan_to_num(1.0) + 1
            )
            assert not load.judge(tuple(spoiled), wanted).ok, load.outputs[number]


def test_the_gate_stops_results_that_are_missing_or_of_another_form():
    load = workload(Case.parse("attention", "b=2,hq=2,s=40,d=16,lse,dtype=float32"), "cpu")
    wanted = load.expected()
    out, lse = launch(load, "torch_math")()
    assert load.judge((out, lse), wanted).ok
    for wrong in (
        None,
        out,
        (out, None),
        (None, lse),
        (out[:1], lse),
        (out.double(), lse),
        (out, lse.half()),
        (3, lse),
        (out, lse, out),
        (out.to("meta"), lse),
        (out.to_sparse(), lse),
    ):
        assert not load.judge(wrong, wanted).ok
    without = workload(Case.parse("attention", "b=2,hq=2,s=40,d=16,dtype=float32"), "cpu")
    assert without.judge((out, None), without.expected()).ok
    assert not without.judge(out, without.expected()).ok and not without.judge((out,), without.expected()).ok
    product = workload(Case.parse("matmul", "m=8,n=8,k=8,dtype=float32"), "cpu")
    (want,) = product.expected()
    assert product.judge(want.want.float(), [want]).ok and not product.judge((want.want.float(),), [want]).ok


def test_a_sample_of_pieces_has_both_ends():
    device = torch.device("cpu")
    affordable = pieces.flops_limit(device)
    assert pieces.sample(5, affordable / 9, device) == [0, 1, 2, 3, 4]
    assert pieces.sample(100, 2 * affordable, device) == [0]
    found = pieces.sample(100, affordable / 7, device)
    assert len(found) == 7 and found[0] == 0 and found[-1] == 99


def test_large_cases_are_sampled(monkeypatch):
    load = workload(Case.parse("attention", "b=4,hq=4,s=32,d=16,dtype=float32"), "cpu")
    monkeypatch.setattr(pieces, "flops_limit", lambda device: 3 * 4.0 * 32 * 32 * 32)
    assert len(load.expected()) == 3


# --- who takes part -----------------------------------------------------------------------------------------------


def test_contestants_are_all_legal_variants_with_all_legal_configs():
    planned = line_up(Case.parse("attention", "b=4,hq=16,s=4096,d=128,causal"), H200)
    by_name = {}
    for contestant in planned.contestants:
        by_name.setdefault(contestant.variant, []).append(contestant)
    assert {"torch_flash", "torch_cudnn", "gluon_fa3"} <= set(by_name) and "torch_cpu" in planned.illegal
    assert len(by_name["gluon_fa3"]) > 1 and [c.first for c in by_name["gluon_fa3"]].count(True) == 1
    assert len({c.key for c in planned.contestants}) == len(planned.contestants)
    few = line_up(planned.case, H200, Selection(only=("gluon_*", "torch_*"), skip=("torch_m*",), max_configs=1))
    assert [c.variant for c in few.contestants].count("gluon_fa3") == 1
    assert "torch_math" not in {c.variant for c in few.contestants}


@pytest.mark.parametrize(
    "case",
    [
        Case.of("matmul", m=4, n=8, k=0),
        Case.of("grouped_mm", e=2, m=4, n=8, k=0),
        Case.of("attention_varlen", hq=2, sq=3, sk=0, d=8),
        Case.of("attention_backward", hq=2, s=0, sk=4, d=8),
    ],
    ids=lambda case: case.op,
)
def test_nobody_takes_part_where_the_op_answers_by_itself(case):
    """Nor is a table unsure of what needs none."""
    planned = line_up(case, H200)
    assert not planned.contestants and planned.illegal == {"(none)": "empty tensors: the op answers by itself"}
    assert doubt(case, H200) == 0.0


def test_who_waits_for_the_device_is_not_timed_as_a_graph():
    case = Case.parse("grouped_mm", "e=4,m=64,n=64,k=64,form=rows")
    assert "torch_loop" in {one.variant for one in line_up(case, H200).contestants}
    planned = line_up(case, H200, mode="graph")
    assert "torch_loop" not in {one.variant for one in planned.contestants}
    assert planned.illegal["torch_loop"] == "it waits for the device, which no graph can capture"
    batch = Case.parse("grouped_mm", "e=4,m=64,n=64,k=64,form=batch")  # which has no offsets to read
    assert "torch_loop" in {one.variant for one in line_up(batch, H200, mode="graph").contestants}


# --- clocks -------------------------------------------------------------------------------------------------------


def test_a_wall_clock_sample_is_the_median_with_its_spread():
    ticks = itertools.count(0, 500_000)
    timer = timing.WallTimer(clock=lambda: next(ticks))
    calls = []
    sample = timer.sample([lambda: calls.append(1)], settle_ms=2.0, measure_ms=5.0)
    assert (sample.ms, sample.low, sample.high, sample.launches) == (0.5, 0.5, 0.5, 10)
    assert len(calls) == 1 + 3 + 10


def test_summaries():
    sample = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (sample.ms, sample.launches) == (3.0, 5) and sample.low < 2.0 < 4.0 < sample.high + 0.5
    assert timing.quantile([1.0], 0.9) == 1.0


def test_a_standing_clock_moves_by_what_is_added():
    clock = timing.StandingClock()
    assert clock.read() == clock.read() == 0.0
    clock.advance(0.25)
    assert clock.read() == 0.25


def test_the_machine_is_described_without_a_gpu():
    found = machine.describe(Target.named("cpu"))
    assert found["device"] == "cpu" and found["torch"] == torch.__version__ and "date" in found
    assert machine.target_from(machine.target_data(H200)) == H200
    assert machine.slug("NVIDIA GeForce RTX 4090 (24 GB)") == "nvidia-geforce-rtx-4090-24-gb"
