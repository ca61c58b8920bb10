"""`python -m registry.testing`: what it takes, and checks whose process ends or hangs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import registry
from registry.testing import Check
from registry.testing import __main__ as command_line
from registry.testing.__main__ import main
from registry.testing.outcomes import Finding

pytestmark = pytest.mark.usefixtures("quick_python")


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


def test_after_a_crash_the_other_checks_are_run(tmp_path: Path, plugin: Any, monkeypatch: Any) -> None:
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


def test_a_process_that_says_nothing_fails(monkeypatch: Any) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **given: popen([sys.executable, "-c", ""], **given))
    assert main(["--variant", "torch_cpu", "--jobs", "2"]) == 1


def test_a_check_that_found_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def check() -> Finding:
        calls.append(1)
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return Finding()

    monkeypatch.setattr(command_line, "PAUSES", (0.0, 0.0))
    assert command_line._run(Check("of a shared GPU", check)).passed
    calls.clear()
    monkeypatch.setattr(command_line, "PAUSES", (0.0,))
    assert "OutOfMemoryError" in command_line._run(Check("of a shared GPU", check)).detail
    assert len(calls) == 2
