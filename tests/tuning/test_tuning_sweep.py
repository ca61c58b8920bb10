"""The sweep: kernels that hang, fall or lie are left out and the rest is measured; a sweep that is killed goes on."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shared

from registry.cli._sweep import report_lines
from registry.ops.parts.cases import Case
from registry.toolbox.compile_pool import WorkerFailed
from registry.tuning import contestants, journal, worker
from registry.tuning.contestants import Selection
from registry.tuning.measure import Effort, Sweep

pytestmark = pytest.mark.usefixtures("quick_python")

FAKES = str(Path(__file__).parents[1] / "support" / "tuning_fakes.py")
QUICK = Effort(rounds=3, settle_ms=0.5, measure_ms=2.0, check_timeout=4.0, turn_timeout=2.0)
ONE = [Case.of("attention", hq=2, s=40, d=16, dtype="float32", causal=True)]
TWO = [*ONE, Case.of("attention", hq=1, s=24, d=8, dtype="float32")]


def sweep(path, cases=ONE, effort=QUICK, only=("fake.*", "torch_*"), **more):
    made = Sweep(cases, path, device="cpu", effort=effort, selection=Selection(only), plugins=[FAKES], **more)
    return made.run()


@pytest.fixture(scope="module")
def child():
    """One worker for the sweeps that do it no harm: starting one takes seconds."""
    with worker.child("cpu", plugins=[FAKES]) as made:
        yield made


@pytest.fixture(scope="module")
def bad_company(tmp_path_factory):
    """One sweep over every kind of misbehaviour."""

    def run():
        path = tmp_path_factory.mktemp("sweep") / "results.jsonl"
        return pickle.dumps((sweep(path), journal.read(path)))

    return pickle.loads(shared.once("a sweep in bad company", run))


def entries(results):
    (case,) = results.cases.values()
    return {(e.variant, e.config.get("sleep_us")): e for e in case.entries.values()}


@pytest.mark.slow(19)
def test_every_misbehaviour_is_recorded_and_the_sweep_goes_on(bad_company):
    report, results = bad_company
    why = {name: e.failure["why"] for (name, _), e in entries(results).items() if e.failure}
    assert why == {
        "fake.hangs": "hung",
        "fake.hangs_late": "hung",
        "fake.exits": "crashed",
        "fake.faults": "crashed",
        "fake.wrong_tile": "wrong",
        "fake.not_a_number": "wrong",
        "fake.overwrites": "wrong",
        "fake.raises": "error",
    }
    timed = {name for (name, _), e in entries(results).items() if e.timed}
    assert timed == {"fake.good", "torch_cpu", "torch_math"}
    assert report.restarts == 4 and report.measured == 1 and not report.stopped


def test_failures_say_what_happened(bad_company):
    failures = {name: e.failure["detail"] for (name, _), e in entries(bad_company[1]).items() if e.failure}
    assert "SIGSEGV" in failures["fake.faults"]
    assert "exit status 7" in failures["fake.exits"] and "last words" in failures["fake.exits"]
    assert "no answer in 4 s" in failures["fake.hangs"] and "no answer in 2 s" in failures["fake.hangs_late"]
    assert "out" in failures["fake.wrong_tile"] and "allowed" in failures["fake.wrong_tile"]
    assert "finite" in failures["fake.not_a_number"]
    assert "changed its input k" in failures["fake.overwrites"]
    assert failures["fake.raises"].startswith("ValueError: a plain mistake")


def test_configs_that_cannot_fit_are_pruned_before_anything_runs(bad_company):
    report, results = bad_company
    (case,) = results.cases.values()
    assert "fake.greedy" in case.illegal and "shared_memory" in case.illegal["fake.greedy"]
    assert report.pruned == 2


def test_slow_configs_are_dropped_after_one_turn(bad_company):
    found = entries(bad_company[1])
    assert found["fake.good", 0].ms < found["fake.good", 50000].ms
    assert len(found["fake.good", 50000].samples) == 1


def test_a_finished_sweep_has_nothing_left_to_do(tmp_path, child, monkeypatch):
    path = tmp_path / "r.jsonl"
    first = sweep(path, only=("torch_cpu", "fake.raises"), child=child)
    assert first.turns == 3 and len(first.failed) == 1
    again = sweep(path, only=("torch_cpu", "fake.raises"), child=child)
    assert again.turns == 0 and not again.failed
    retried = sweep(path, only=("torch_cpu", "fake.raises"), retry_failed=True, child=child)
    assert len(retried.failed) == 1
    monkeypatch.setattr(contestants, "fingerprint_of", lambda variant: f"changed {variant.name}")
    changed = sweep(path, only=("torch_cpu", "fake.raises"), child=child)
    assert changed.turns == 3 and len(changed.failed) == 1, "failures expire with the sources"


def test_shapes_that_nothing_may_run_are_named(tmp_path, child):
    wide = Case.of("attention", hq=1, s=24, d=300, dtype="float32")
    report = sweep(tmp_path / "r.jsonl", cases=[wide], only=("fake.good",), child=child)
    assert (
        "1 shape has nothing to measure, such as hq=1,s=24,d=300,dtype=float32: fake.good: head_dim: got 300"
        in (report_lines(report)[1])
    )
    none = sweep(tmp_path / "none.jsonl", only=("no.such",), child=child)
    assert none.nobody[0].endswith("causal: no variant is of that name")


SCRIPT = """
import os, sys
from pathlib import Path
from registry.ops.parts.cases import Case
from registry.tuning.measure import Effort, Sweep
from registry.tuning.contestants import Selection
case = Case.of("attention", hq=1, s=24, d=8, dtype="float32")
print(os.getpid(), flush=True)
effort = Effort(rounds=200, settle_ms=0.1, measure_ms=20.0)
Sweep([case], Path(sys.argv[1]), device="cpu", effort=effort, selection=Selection(("torch_*",))).run()
"""


def test_a_killed_sweep_loses_at_most_one_turn_and_goes_on(tmp_path, child):
    path = tmp_path / "r.jsonl"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    try:
        deadline = time.monotonic() + 60
        while path.exists() < 1 or path.read_text().count('"sample"') < 5:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        os.kill(pid, signal.SIGKILL)
        process.communicate()
    seen = path.read_text().count('"sample"')
    (case,) = journal.read(path).cases.values()
    turns = sum(len(e.samples) for e in case.entries.values())
    assert turns in (seen, seen - 1) and not case.done
    most = max(max(e.samples) for e in case.entries.values()) + 2
    report = sweep(
        path,
        [Case.of("attention", hq=1, s=24, d=8, dtype="float32")],
        Effort(rounds=most, measure_ms=1.0),
        only=("torch_*",),
        child=child,
    )
    (case,) = journal.read(path).cases.values()
    assert case.done and report.turns + turns == sum(len(e.samples) for e in case.entries.values())
    rounds = [sorted(e.samples) for e in case.entries.values() if e.first]
    assert list(range(most)) in rounds and all(
        of_one == list(range(len(of_one))) for of_one in rounds
    )  # losers drop out


def test_the_budget_stops_the_sweep_and_says_what_is_left(tmp_path, child):
    now = iter(range(0, 100000, 10))
    short = Effort(budget_s=55, measure_ms=1.0)
    report = sweep(tmp_path / "r.jsonl", TWO, short, ("torch_cpu",), now=lambda: next(now), child=child)
    assert report.stopped and set(report.unreached) <= {case.text for case in TWO}
    assert report.unreached[-1] == TWO[-1].text  # in the order given
    assert report.unreached[-1] in "\n".join(report_lines(report))
    report = sweep(tmp_path / "r.jsonl", TWO, QUICK, ("torch_cpu",), child=child)
    assert not report.unreached and all(case.done for case in journal.read(tmp_path / "r.jsonl").cases.values())


def test_two_sweeps_do_not_write_one_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with journal.Journal(path), pytest.raises(journal.ResultsError, match="another process"):
        sweep(path)


def test_results_of_two_machines_are_not_mixed(tmp_path, child):
    path = tmp_path / "r.jsonl"
    machine = {"device": "another", "driver": "", "torch": "1", "triton": ""}
    with journal.Journal(path) as file:
        file.write("run", format=journal.FORMAT, machine=machine, mode="events")
    with pytest.raises(journal.ResultsError, match="mixes measurements"):
        sweep(path, child=child)


def test_a_worker_takes_nothing_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "registry").mkdir()
    for name in ("registry/__init__.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with worker.child("cpu") as child:
        child.start()
        assert child.welcome["ok"]


def test_a_worker_that_cannot_start_says_why():
    with worker.child("cpu", plugins=["no_such_module"]) as child, pytest.raises(WorkerFailed, match="no_such_module"):
        child.start()
