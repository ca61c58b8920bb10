"""The conformance kit must fail kernels that are wrong. Each test breaks a right kernel in one way."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import registry
from registry import Reason, Requires, Target, Variant
from registry.ops.attention.backward import attention_backward
from registry.ops.attention.op import attention
from registry.ops.attention.outputs import new_lse, new_out
from registry.ops.known import op_named
from registry.ops.parts.sizes import size_for
from registry.ops.parts.trials import draw
from registry.testing import Check, Report, check_op, check_variant, checks_for, in_common, places
from registry.testing import __main__ as command_line
from registry.testing.__main__ import main
from registry.testing.outcomes import Finding

pytestmark = pytest.mark.usefixtures("quick_python")

CLAIMS: dict[str, Any] = {
    "arch": ("cpu",),
    "dtypes": ("float32", "bfloat16"),
    "head_dim": (16, 32),
    "head_dim_multiple": 8,
    "ieee": True,
    "layouts": ("bhsd", "bshd", "strided"),
    "causal": True,
    "window": True,
    "lse": True,
    "gqa": True,
    "cross_length": True,
}


def right(q: Any, k: Any, v: Any, *, scale: float, config: Any, **features: Any) -> Any:
    features["softcap"] = features.get("softcap", 0.0)
    features["return_lse"] = True
    found, lse = attention.reference(q, k, v, scale=scale, dtype=torch.float32, **features)
    out = new_out(q, v)
    out.copy_(found)
    return out, new_lse(q).copy_(lse)


def report_on(run: Any, **claims: Any) -> Report:
    configs = claims.pop("configs", ({},))
    only = claims.pop("only", lambda name: True)
    return check_variant(
        Variant("test.kit", op="attention", run=run, requires=Requires(**CLAIMS | claims), configs=configs), only=only
    )


def complaints(report: Report) -> str:
    return "\n".join(case.detail for case in report.failures)


# --- right kernels pass -------------------------------------------------------------------------------------------


def test_a_kernel_with_few_claims_passes_and_its_refusals_are_checked() -> None:
    def plain(q: Any, k: Any, v: Any, *, scale: float, config: Any) -> Any:
        return right(q, k, v, scale=scale, config=config)[0], None

    narrow = dict.fromkeys(("causal", "window", "lse", "cross_length", "gqa", "ieee"), False)
    report = report_on(plain, dtypes=("bfloat16",), layouts=("bhsd",), base_alignment=16, stride_alignment=16, **narrow)
    assert report.passed, str(report)
    names = {case.name for case in report.cases}
    for field in (
        "causal",
        "window",
        "lse",
        "gqa",
        "cross_length",
        "float32",
        "head_dim above",
        "base address",
        "row stride",
    ):
        assert f"refuses {field}" in names


# --- wrong kernels fail: tests/testing/test_mutants.py has most of them ---------------------------------------------


def test_a_nondeterministic_kernel_fails_where_it_claims_to_be_deterministic() -> None:
    def noisy(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, **rest)
        return out * (1 + 1e-7 * random.randrange(8)), lse

    report = report_on(noisy, dtypes=("float32",), deterministic=True, only=lambda name: "times" in name)
    assert "differs from the first" in complaints(report)


def test_what_is_wrong_for_long_sequences_alone_fails() -> None:
    def long_is_wrong(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, **rest)
        return (out * 1.1 if k.shape[2] > 1024 else out), lse

    report = report_on(long_is_wrong, only=lambda name: "1501x1501" in name)
    assert report.failures, str(report)


def test_every_config_is_tried() -> None:
    def second_is_wrong(q: Any, k: Any, v: Any, *, config: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, config=config, **rest)
        return out * config["factor"], lse

    once: Any = lambda name: name.startswith(("float32", "bfloat16"))  # noqa: E731
    assert report_on(second_is_wrong, configs=[{"factor": 1}], only=once).passed
    report = report_on(second_is_wrong, configs=[{"factor": 1}, {"factor": 2}], only=once)
    assert [case.name for case in report.failures] and all("factor=2" in case.name for case in report.failures)


def test_a_claim_that_its_own_rule_never_allows_fails() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.window is not None:
            yield Reason("semantics", "window", problem.window, "none")

    report = report_on(right, rule=rule)
    assert "no legal problem found for mask=(False, (-1, 7))" in complaints(report)


def test_a_rule_that_refuses_without_words_fails() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.causal:
            yield Reason("", "", None, "")

    report = report_on(right, rule=rule, causal=False, window=False)
    assert report.passed, str(report)
    report = report_on(right, rule=lambda problem, config: [Reason("", "", None, "")])
    assert "no legal problem found at all" in complaints(report)


# --- the kit's own surface ----------------------------------------------------------------------------------------


def test_the_problems_are_the_same_every_time() -> None:
    names = [[check.name for check in checks_for("torch_math", Target.named("cpu"))] for _ in range(2)]
    assert names[0] == names[1]
    assert len(names[0]) == len(set(names[0]))


def test_another_draw_is_of_other_problems_and_values() -> None:
    drawn = [{check.name for check in checks_for("torch_math", Target.named("cpu"), draw=draw)} for draw in (0, 7, 7)]
    assert drawn[1] == drawn[2]
    assert drawn[0] - drawn[1] and drawn[1] - drawn[0]
    assert check_variant("torch_math", Target.named("cpu"), only=lambda name: name.startswith("called"), draw=7).passed


def test_places_are_those_that_the_variant_claims() -> None:
    assert [target.arch for target in places("torch_cpu")] == ["cpu"]
    gpu_only = Variant("test.kit", op="attention", run=right, requires=Requires(**CLAIMS | {"arch": ("sm70",)}))
    assert places(gpu_only) == []


def test_ops_keep_their_promises_on_empty_tensors() -> None:
    report = check_op("matmul")
    assert {case.name for case in report.cases} == {"opcheck", "torch.compile", "empty tensors"}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes take nothing from the working directory."""
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "found.json"
    arguments = ["--variant", "torch_cp?", "--target", "cpu", "--only", "refuses*", "--json", str(path)]
    assert main(arguments) == 0
    assert "torch_cpu" in capsys.readouterr().out
    (report,) = json.loads(path.read_text())
    assert report["subject"] == "torch_cpu" and all(case["passed"] for case in report["cases"])
    assert main(["--variant", "torch_cpu", "--list", "--shard", "2/50"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 10


def test_a_reader_who_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does he change what came of the checks."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["--variant", "torch_cpu", "--list"]) == 0
        assert main(["--help"]) == 0
        monkeypatch.setattr(command_line, "_checked", lambda arguments: (1, ["torch_cpu: FAILED"]))
        assert main([]) == 1
        print("what comes later goes nowhere", flush=True)


@pytest.mark.parametrize(
    "arguments",
    [["--shard", "x"], ["--shard", "3/2"], ["--shard", "0/1"], ["--jobs", "0"], ["--repeats", "-1"]]
    + [["--timeout", text] for text in ("nan", "0", "1e9", "soon")]
    + [["--level", "some"], ["--jobs", "9" * 5000]],
)
def test_arguments_that_are_none_are_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err


PLUGIN = """
import os, sys, registry

def ends(q, k, v, *, scale, config):
    {end}

@registry.hookimpl
def registry_variants():
    requires = registry.Requires(arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), layouts=("bhsd",), ieee=True)
    return [registry.Variant("test.ends", op="attention", run=ends, requires=requires)]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    """Writes a plugin whose kernel does this, and gives the arguments that check it."""

    def written(end: str) -> list[str]:
        (tmp_path / "ending.py").write_text(PLUGIN.format(end=end))
        return ["--plugin", str(tmp_path / "ending.py"), "--variant", "test.ends", "--target", "cpu"]

    yield written
    registry.unregister("test.ends")


def test_what_nobody_knows_is_said_before_anything_runs(tmp_path: Path, plugin: Any, capsys: Any) -> None:
    for arguments, said in (
        (["--variant", "torch_cpv"], "no variant 'torch_cpv' of any op; did you mean torch_cpu"),
        (["--target", "H900"], "target: got 'H900'; allowed: A10"),
        (["--plugin", str(tmp_path / "no.py")], "allowed: a readable Python file"),
    ):
        assert main(arguments) == 2 and said in capsys.readouterr().err


def test_an_exception_is_told_with_its_place(plugin: Any, capsys: Any) -> None:
    assert main([*plugin("{}['x']"), "--only", "float32 *"]) == 1
    assert "KeyError: 'x' (ending.py:5, in ends)" in " ".join(capsys.readouterr().out.split())
    assert main([*plugin("raise type('Odd', (Exception,), dict(__str__=lambda e: 1 / 0))"), "--only", "float32 *"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "Odd, which cannot be shown (ZeroDivisionError) (ending.py:5, in ends)" in told


@pytest.mark.parametrize(("end", "jobs"), [("os._exit(0)", 1), ("sys.exit(0)", 1), ("os.kill(os.getpid(), 9)", 2)])
def test_a_kernel_that_ends_the_process_fails(
    end: str, jobs: int, plugin: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """With whatever status it ends: the check that it ended is named, and what was found before is kept."""
    monkeypatch.setattr(command_line, "MOST_ENDINGS", 1)
    path = tmp_path / "found.json"
    assert main([*plugin(end), "--json", str(path), "--jobs", str(jobs)]) == 1
    (report,) = json.loads(path.read_text())
    failed = {case["name"]: case["detail"] for case in report["cases"] if not case["passed"]}
    said = "SystemExit" if end.startswith("sys") else "never came back: the process ended with status"
    assert failed and any(said in detail for detail in failed.values())
    assert "test.ends" in capsys.readouterr().out


def test_after_a_crash_the_other_checks_are_run(tmp_path: Path, plugin: Any, monkeypatch: Any, capsys: Any) -> None:
    """The one that ended its process is named with its shape and config, and the next process goes on after it."""
    popen = subprocess.Popen
    started = []

    def child(command: list[str], **given: Any) -> Any:
        started.append(command)
        return popen(command, **given)

    monkeypatch.setattr(subprocess, "Popen", child)
    monkeypatch.setattr(command_line, "MOST_ENDINGS", 9)
    path = tmp_path / "found.json"
    arguments = plugin("os._exit(7) if q.shape[0] * q.shape[2] == 154 else None")
    assert main([*arguments, "--json", str(path), "--only", "float32 *"]) == 1
    (report,) = json.loads(path.read_text())
    crashed = [case for case in report["cases"] if "ended with status 7" in case["detail"]]
    assert len(started) == len(crashed) + 1 and 0 < len(crashed) < len(report["cases"])
    assert all("batch=2" in case["about"] and "seqlen_q=77" in case["about"] for case in crashed)
    assert all("config {}" in case["about"] for case in crashed)


def test_a_declaration_that_hangs_is_written_down_and_not_asked_again(tmp_path: Path) -> None:
    """By the process that goes on, which finds what the first wrote."""
    asked, journal = ("test.hangs", "cpu", "quick"), tmp_path / "journal"
    code = f"""
import argparse, pathlib, time
from registry import testing
from registry.testing import __main__ as line
testing.checks_for = lambda *given, **more: time.sleep(100)
line.LEAST_TO_DRAW = 0
asked = dict(timeout=0.5, repeats=None, draw=0, compile_only=False)
given = argparse.Namespace(journal=pathlib.Path({str(journal)!r}), **asked)
line._drawn({asked}, None, given)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 1
    (line,) = command_line._lines(journal)
    assert line["begins"] == command_line.DRAWING and tuple(line["subject"]) == asked
    given = argparse.Namespace(journal=journal, timeout=60.0, repeats=None, draw=0, compile_only=False)
    assert command_line._drawn(asked, registry.Target.named("cpu"), given) == []


def test_a_search_for_less_that_breaks_the_process_ends_it(tmp_path: Path) -> None:
    """Else the first check of the next variant would be blamed for it."""
    complaints = Finding(("wrong",))
    found = "the smallest that fails: one: AcceleratorError: CUDA error: an illegal memory access was encountered"
    given = argparse.Namespace(journal=tmp_path / "journal", timeout=60.0)
    with pytest.raises(SystemExit) as ended:
        command_line._watched(("v", "H200", "quick"), [Check("one", lambda: complaints, smallest=lambda: found)], given)
    assert ended.value.code == command_line.STICKY
    assert json.loads(given.journal.read_text().splitlines()[-1])["smallest"] == found


def test_a_crash_says_which_check_it_was() -> None:
    """faulthandler prints functions, not arguments: so each check runs in a frame of its name."""
    seen = []

    def call() -> Finding:
        seen.append(sys._getframe(1).f_code.co_name)
        return Finding()

    assert Check("float32 lengths:77x1", call).run().passed
    assert seen == ["check [float32 lengths:77x1]"]


def test_a_process_that_says_nothing_fails(tmp_path: Path, monkeypatch: Any) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **given: popen([sys.executable, "-c", ""], **given))
    assert main(["--variant", "torch_cpu", "--jobs", "2"]) == 1


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda out, lse: None, ""),
        (lambda out, lse: (), ""),
        (lambda out, lse: (out, None), "lse"),
        (lambda out, lse: (None, lse), "out"),
        (lambda out, lse: (out.double(), lse), "out is torch.float64"),
        (lambda out, lse: (out, lse.double()), "lse is torch.float64"),
        (lambda out, lse: (out[..., :-1].contiguous(), lse), "shape"),
        (lambda out, lse: (out, lse[..., None]), "shape"),
    ],
    ids=["None", "()", "no lse", "no out", "dtype of out", "dtype of lse", "shape of out", "shape of lse"],
)
def test_results_that_are_none_fail(returned: Any, said: str) -> None:
    """Of each kind that a `run` may return by mistake."""
    variant = Variant("test.kit", op="attention", run=lambda *a, **k: returned(*right(*a, **k)), requires=_requires())
    report = check_variant(variant, only=lambda name: name.startswith("float32") and " lse" in name)
    assert report.failures and any(said in case.detail for case in report.failures), report


def test_a_product_that_is_none_fails_by_name() -> None:
    requires = Requires(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True)
    variant = Variant("test.product", op="matmul", run=lambda *a, **k: None, requires=requires)
    report = check_variant(variant, only=lambda name: name.startswith("float32"))
    assert any("what run returns" in case.detail + str(case.error) for case in report.failures), report


@pytest.mark.parametrize("returned", [lambda *g: None, lambda *g: (), lambda *g: g[:1], lambda *g: (*g[:2], None)])
def test_gradients_that_are_missing_fail(returned: Any) -> None:
    def run(
        grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float, config: Any, **rest: Any
    ) -> Any:
        return returned(*attention_backward.reference(grad_out, q, k, v, scale=scale, dtype=torch.float32))

    requires = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), ieee=True, layouts=("bhsd",), lse=True)
    variant = Variant("test.kit_backward", op="attention_backward", run=run, requires=requires)
    report = check_variant(variant, only=lambda name: name.startswith("float32"))
    assert report.cases and len(report.failures) == len(report.cases), report


def _requires() -> Requires:
    return Requires(**CLAIMS | {"dtypes": ("float32",), "window": False, "gqa": False})


def test_failures_say_what_they_share_and_the_smallest_of_them() -> None:
    def wrong_with_a_window(q: Any, k: Any, v: Any, *, window: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, window=window, **rest)
        return (out * 1.5 if window is not None and q.dtype is torch.bfloat16 else out), lse

    report = report_on(wrong_with_a_window)
    words = in_common(report.cases)
    assert "bfloat16" in words and "failures have" in words
    assert "the smallest that fails: bfloat16 batch:1 heads:1x1 lengths:" in report.smallest
    assert "window:" in report.smallest and "head_dim:" in report.smallest
    assert words in str(report) and report.smallest in str(report)
    plain = json.loads(json.dumps(report.to_dict()))
    assert [case["name"] for case in plain["cases"]] == [case.name for case in report.cases]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_config_is_dealt_to_several_problems(level: str) -> None:
    configs = [{"BLOCK": 2**i} for i in range(12)]
    variant = Variant("test.kit", op="attention", run=right, requires=Requires(**CLAIMS), configs=configs)
    size = size_for(torch.device("cpu"), level, False)
    op = op_named("attention")
    trials = draw(variant, op, op.conformance, Target.named("cpu"), size).trials
    for config in configs:
        problems = {trial.problem for trial in trials if trial.config == config}
        assert len(problems) >= 2 and any(problem.causal or problem.window for problem in problems)


def test_what_has_no_order_is_tried_whole_and_sizes_are_thinned() -> None:
    size = size_for(torch.device("cpu"), "quick", False)
    op = op_named("attention")
    requires = Requires(**CLAIMS)
    trials = draw(
        Variant("test.kit", op="attention", run=right, requires=requires), op, op.conformance, Target.named("cpu"), size
    ).trials
    axes = op.conformance.axes(requires, size)
    for axis in ("memory", "mask", "dtype", "spread"):
        assert {trial.spec[axis] for trial in trials} == set(axes[axis])
    assert size.long > 2 * 128 and any(trial.problem.seqlen_k == size.long for trial in trials)
