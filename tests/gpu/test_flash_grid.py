"""tests/gpu/flash_grid.py without a GPU: its grid, its criterion, its order, and whole cases on the CPU."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch
from ran import printed

pytest.importorskip("triton")

import flash_grid

from registry import Target

pytestmark = pytest.mark.usefixtures("quick_python")
SCRIPT = flash_grid.__file__


def test_parts_hold_each_case_once_and_share_no_kind():
    whole = flash_grid.grid()
    parts = [flash_grid.part_of(whole, part, 7) for part in range(7)]
    assert len(whole) == sum(map(len, parts)) == 3600
    kinds = [{(s["d"], s["dtype"], s["causal"], s["softcap"], bool(s["window"])) for s in part} for part in parts]
    assert not set.intersection(*kinds) and all(map(len, kinds))
    assert whole == flash_grid.grid()


def test_the_criterion_is_twice_what_torch_is_off_by_and_a_rounding():
    exact = torch.zeros(4)
    exact[0] = 0.5  # 0.5 + 0.3 - 0.3 is 0.5 in float32 but for a rounding of 3e-8
    usual = exact + 0.1
    assert flash_grid.share_of_limit(exact + 0.2, exact, usual, 0.0) == pytest.approx(1, abs=1e-3)
    assert flash_grid.share_of_limit(exact + 0.3, exact, usual, 50.0) == pytest.approx(1, abs=2e-3)
    wrong = exact.clone()
    wrong[1] = torch.nan
    assert not flash_grid.share_of_limit(wrong, exact, usual, 0.0) <= 1


def test_the_order_opens_many_cases_with_few_kernels():
    needs = [frozenset("abc"), frozenset("d"), frozenset("d"), frozenset("ab"), frozenset("bd")]
    assert flash_grid.in_order(needs) == [1, 2, 4, 3, 0]


def test_ours_is_asked_where_it_may_run_else_what_is_dispatched():
    shape = next(s for s in flash_grid.grid() if s["window"] and s["hkv"] == 1 and s["softcap"])
    ours = flash_grid.steps_of(shape, Target.named("H200"))
    assert [step.variant for step in ours.values()] == ["gluon_fa3", "gluon_fa3_backward", "gluon_fa3_backward"]
    assert [len(step.builds) > 0 for step in ours.values()] == [True] * 3
    other = flash_grid.steps_of(shape, Target.named("A100"))
    assert not any(step.variant.startswith("gluon_fa3") for step in other.values())


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (20, 7)}, {"causal": True, "softcap": 50.0}])
@pytest.mark.parametrize("lengths", [(64, 128), (113, 60)])
def test_what_runs_on_a_cpu_meets_the_criterion(mask, lengths):
    s, sk = lengths
    plain = {"causal": False, "window": None, "softcap": 0.0}
    shape = dict(b=2, hq=6, hkv=2, s=s, sk=sk, d=64, dtype="bfloat16", layout="bshd", **(plain | mask))
    target = Target.of(torch.device("cpu"))
    steps = flash_grid.steps_of(shape, target)
    shares = flash_grid.run(shape, steps, target, "cpu", 0)
    assert list(shares) == list(flash_grid.PASSES) and 0 < max(shares.values()) <= 1
    tally = flash_grid.Tally(cases=1)
    tally.take(shape, steps, shares | {"gradients": float("nan")})
    assert tally.passed.total() == 2 and len(tally.failed) == 1 and "nan of the limit" in str(tally)


def test_kernels_that_fail_or_are_late_are_told_apart():
    step = flash_grid.Step(None, "v", {}, ("one", "two"))
    futures = {"one": Future(), "two": Future()}
    futures["one"].set_result(1.0)
    assert flash_grid.waited({"forward": step}, futures, 0.0) is None
    futures["two"].set_exception(RuntimeError("does not compile"))
    assert flash_grid.waited({"forward": step}, futures, float("inf")) == "two: RuntimeError: does not compile"
    assert flash_grid.waited({"forward": step._replace(builds=("one",))}, futures, float("inf")) == ""


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert printed(sys.executable, SCRIPT) == "skipped: there is no CUDA GPU\n"
    wrong = subprocess.run([sys.executable, SCRIPT, "--shard", "3/3"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--shard is 3/3; allowed: I/N with 0 <= I < N" in wrong.stderr
