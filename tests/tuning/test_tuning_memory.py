"""A worker on the CPU leaves memory to the machine, and what fails over it is an ordinary failure of one contestant."""

from __future__ import annotations

import functools

import pytest
import torch

from registry import notices
from registry.cli import inspect as cli_inspect  # the command's module
from registry.cli import main
from registry.ops.parts.cases import Case
from registry.tuning import journal, memory, worker
from registry.tuning.contestants import Selection
from registry.tuning.extra import load_plugins
from registry.tuning.measure import Effort, Sweep

pytestmark = pytest.mark.usefixtures("quick_python")

GREEDY = """
import resource
import torch
from registry import Requires, Variant, hookimpl

def run(q, k, v, *, scale, config):
    torch.empty(resource.getrlimit(resource.RLIMIT_DATA)[0], dtype=torch.uint8)
    return torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1) @ v, None

@hookimpl
def registry_variants():
    claims = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(1, 64), layouts=("bhsd",), ieee=True)
    return [Variant("greedy.takes_much", op="attention", run=run, requires=claims)]
"""


@pytest.mark.skipif(memory.available() is None, reason="nobody tells how much memory there is")
def test_a_kernel_that_wants_all_memory_is_left_out_and_the_rest_goes_on(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    path, case = tmp_path / "results.jsonl", Case.of("attention", hq=1, s=24, d=8, dtype="float32", ieee=True)
    effort = Effort(rounds=1, least_rounds=1, settle_ms=0.5, measure_ms=2.0)
    only = Selection(("greedy.*", "torch_*"))
    report = Sweep(
        [case], path, device="cpu", effort=effort, selection=only, plugins=[str(tmp_path / "greedy.py")]
    ).run()
    (found,) = journal.read(path).cases.values()
    failures = {entry.variant: entry.failure["why"] for entry in found.entries.values() if entry.failure}
    assert failures == {"greedy.takes_much": "out of memory"} and report.restarts == 0
    assert {entry.variant for entry in found.entries.values() if entry.timed} == {"torch_cpu", "torch_math"}


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    outside = memory.available()
    for name, text in {"max": "5000", "current": "3000", "stat": "anon 1000\ninactive_file 700\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.available() == (None if outside is None else 2700)
    (tmp_path / "memory.max").write_text("max")
    assert outside is None or memory.available() > 1 << 20


def test_a_machine_without_a_gpu_is_told(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ["tune", "attention", "--grid", "tiny", "--only", "torch_math", "--dry-run"]
    assert main(command) == 0
    assert capsys.readouterr().err.startswith("torch finds no GPU here: the CPU is measured")
    assert main([*command, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""


class _Mute(Exception):
    def __str__(self):
        raise ValueError


def test_an_error_that_cannot_be_shown_is_a_failure_like_others(declare):
    assert worker.explain_failure(worker.Worker(), _Mute())["detail"].startswith("_Mute: a _Mute that cannot be shown")
    assert notices.last_line(_Mute()) == "_Mute: a _Mute that cannot be shown (ValueError)"
    (finding,) = cli_inspect._kernel(declare("test.mute"), None, {}, _Mute())["findings"]
    assert finding == "does not compile: _Mute: a _Mute that cannot be shown (ValueError)"


MINE = """
import registry

def run(a, b, *, config):
    return a @ b[:1]

@registry.hookimpl
def registry_variants():
    return [registry.Variant("test.mine", "matmul", run, registry.Requires(arch=("cpu",), dtypes=("float32",)))]
"""


@pytest.mark.usefixtures("takes_back")
def test_a_failure_names_the_line_of_the_variants_own_code(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (variant,) = load_plugins([str(tmp_path / "mine.py")])
    with pytest.raises(RuntimeError) as raised:
        torch.vmap(functools.partial(variant.run, config={}))(torch.ones(2, 3, 3), torch.ones(2, 3, 3))
    detail = worker.explain_failure(worker.Worker(), raised.value, "test.mine")["detail"]
    first, *where = detail.splitlines()
    assert first.startswith("RuntimeError: ") and where[-1].endswith("/mine.py:5 in run: return a @ b[:1]")
