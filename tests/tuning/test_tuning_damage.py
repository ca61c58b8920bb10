"""Files of a wrong making, folders, and workers that leave things behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import forked
import pytest
from ran import gone
from tuning_rows import CASE, GOOD, MACHINE, SAMPLE, row

import registry
from registry.cli import FINDING, INTERRUPTED, TERMINATED, USAGE, main
from registry.errors import InvalidArgument
from registry.toolbox import compile_pool
from registry.toolbox.compile_pool import Child, WorkerDied, WorkerFailed
from registry.tuning import journal, store
from registry.tuning.grids import select
from registry.tuning.measure import Effort

pytestmark = pytest.mark.usefixtures("quick_python", "cache")

WRONG = [
    [],
    {"kind": ["case"]},
    {"kind": "odd", "case": "a"},
    {"kind": "run", "format": 1, "machine": 5, "mode": "events"},
    {"kind": "run", "format": 1, "machine": {"device": 5}, "mode": "events"},
    {"kind": "run", "format": 1, "machine": {**MACHINE, "date": "tomorrow"}, "mode": "events"},
    CASE | {"case": []},
    CASE | {"facts": {"head_dim": "wide"}},
    CASE | {"facts": [1]},
    CASE | {"flops": "many"},
    CASE | {"contestants": {"k": ["torch_cpu", {}, True]}},
    CASE | {"contestants": {"k": ["torch_cpu", {"x": []}, True, "f"]}},
    CASE | {"illegal": 5},
    SAMPLE | {"ms": "fast"},
    SAMPLE | {"ms": float("nan")},
    SAMPLE | {"ms": None},
    SAMPLE | {"round": "first"},
    SAMPLE | {"key": {}},
    {"kind": "failed", "case": "a", "key": "k", "why": 5},
    {"kind": "done", "case": 5},
]


def written(folder, *lines):
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: json.dumps(wrong)[:60])
def test_a_line_of_a_wrong_type_is_numbered_and_passed_over(tmp_path, wrong):
    path = written(tmp_path, *GOOD, wrong)
    found = journal.read(path)
    assert found.bad_lines == [4]
    (case,) = found.of("attention")
    assert case.entries["k"].ms == 1.0 and found.machine == MACHINE


@pytest.mark.parametrize(
    "more",
    [
        {"ms": "fast"},
        {"ms": -1.0},
        {"ms": float("nan")},
        {"machine": []},
        {"machine": {"device": 7}},
        {"facts": {"head_dim": "wide"}},
        {"config": [1]},
        {"case": 5},
        {"spread": None},
        {"flops": "x"},
        {"op": {}},
    ],
    ids=str,
)
def test_a_row_of_a_wrong_type_is_named_and_passed_over(more):
    store.merge([row()])
    (path,) = store.folder().glob("*.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(asdict(row()) | more) + "\n")
    assert store.damaged("attention", MACHINE["device"]) == [f"{path}: line 2 is damaged and passed over"]
    assert len(store.load("attention", MACHINE).rows) == 1
    store.merge([row("s=128")])
    assert store.damaged("attention", MACHINE["device"]) == []


def test_nobody_else_may_write_to_the_cache(cache):
    before = os.umask(0)
    try:
        store.merge([row()])
        with journal.Journal(cache / "runs" / "deep" / "run.jsonl"):
            pass
        store.write_table("attention", "gpu", "op: attention\n", "{}")
    finally:
        os.umask(before)
    assert [p for p in (cache, *cache.rglob("*")) if p.stat().st_mode & 0o022] == []


def test_a_table_is_of_no_device_that_is_lost(tmp_path, capsys):
    path = written(tmp_path, *GOOD)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert main(["tune", "attention", "--fit-only", "--out", str(path)]) == FINDING
    assert "the line is lost that says what it was measured on" in " ".join(capsys.readouterr().err.split())


def test_a_sweep_of_failures_says_what_failed_and_what_helps(tmp_path, capsys):
    failed = {"kind": "failed", "case": "a", "key": "k", "why": "wrong", "detail": "out is \x1b[31m0"}
    path = written(tmp_path, *GOOD[:2], failed)
    assert main(["tune", "attention", "--fit-only", "--out", str(path)]) == FINDING
    said = " ".join(capsys.readouterr().out.split())
    assert "no table: " in said and "failed: torch_cpu: wrong: out is" in said and "--retry-failed" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "effort", [{"rounds": 0}, {"budget_s": -1}, {"budget_s": float("nan")}, {"measure_ms": 0}, {"turn_timeout": -1}]
)
def test_efforts_that_are_none_are_refused(effort):
    with pytest.raises(InvalidArgument, match=next(iter(effort))):
        Effort(**effort)


def test_a_file_without_shapes_is_an_error(tmp_path):
    (tmp_path / "shapes.txt").write_text("# none yet\n\n")
    with pytest.raises(InvalidArgument, match=r"shapes\.txt"):
        select("attention", shapes=tmp_path / "shapes.txt")


# --- workers ------------------------------------------------------------------------------------------------------

ODD_WORKER = """
import os, subprocess, sys, time
def answerer():
    def answer(command):
        if command.get("do") == "spawn":
            return {"ok": True, "pid": subprocess.Popen(["sleep", "300"]).pid}
        if command.get("do") == "print":
            for _ in range(command["chunks"]):
                sys.stdout.write("x" * (1 << 20))
            sys.stdout.write("last words")
            sys.stdout.flush()
            os._exit(7)
        if command.get("do") == "exit":
            os._exit(9)
        if command.get("do") == "hang":
            time.sleep(300)
        return {"ok": True}
    return answer
"""


@pytest.fixture
def without_torch(tmp_path, monkeypatch):
    """Where `odd_worker` is, and of our package what any worker needs, which no torch is."""
    (tmp_path / "odd_worker.py").write_text(ODD_WORKER)
    for name in ("__init__.py", "errors.py", "toolbox/__init__.py", "toolbox/compile_pool.py"):
        part = tmp_path / "registry" / name
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(b"" if part.stem == "__init__" else Path(registry.__path__[0], name).read_bytes())
    monkeypatch.setattr(sys, "executable", forked.REAL)  # about groups of processes
    return tmp_path


@pytest.fixture
def odd_worker(without_torch, monkeypatch):
    monkeypatch.syspath_prepend(str(without_torch))
    monkeypatch.setattr(registry, "__path__", [str(without_torch / "registry")])
    with Child("odd_worker", {}) as child:
        yield child


@pytest.mark.parametrize("end", ["stop", "hang", "exit"])
def test_what_a_worker_started_ends_with_it(odd_worker, end):
    pid = odd_worker.ask({"do": "spawn"}, 60)["pid"]
    if end == "stop":
        odd_worker.stop()
    else:
        with pytest.raises(WorkerDied):
            odd_worker.ask({"do": end}, 0.5 if end == "hang" else 60)
    assert gone(pid)


def test_a_worker_dies_with_its_parent(without_torch):
    script = (
        "import time\nfrom registry.toolbox.compile_pool import Child\n"
        "c = Child('odd_worker', {})\nc.start()\nc.send({'do': 'hang'})\n"
        "print(c._process.pid, flush=True)\ntime.sleep(99)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(without_torch)}
    command = [forked.REAL, "-c", script]
    with subprocess.Popen(command, cwd=without_torch, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    assert gone(worker), "the worker outlived its parent"


def test_of_much_that_a_worker_prints_the_end_is_kept(odd_worker, monkeypatch):
    monkeypatch.setattr(compile_pool, "LOG_BYTES", 1 << 20)
    odd_worker.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WorkerDied, match=r"exit status 7.*xxx.*last words"):
        odd_worker.ask({"do": "print", "chunks": 64}, 60)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB


def test_a_log_that_grows_is_cut_while_the_worker_runs(odd_worker, monkeypatch):
    monkeypatch.setattr(compile_pool, "LOG_BYTES", 1 << 10)
    odd_worker.start()
    os.write(odd_worker._log.fileno(), b"y" * 100_000 + b"the end")
    odd_worker.ask({"do": "nothing"}, 60)
    size = os.fstat(odd_worker._log.fileno()).st_size
    assert size == compile_pool.LOG_TAIL


def test_a_worker_that_does_not_start_is_one_error():
    with Child("no_such_module_of_a_worker", {}) as child, pytest.raises(WorkerFailed, match="does not start"):
        child.start()


def test_results_of_a_machine_of_which_too_little_is_known_make_no_table(tmp_path, capsys):
    path = written(tmp_path, *GOOD)
    assert main(["tune", "attention", "--fit-only", "--out", str(path)]) == FINDING
    assert "its machine has no date" in capsys.readouterr().err


HANGING = """
import os, subprocess, time
from registry import Requires, Variant
def hangs(q, k, v, *, scale, config):
    child = subprocess.Popen(["sleep", "300"])
    with open(os.environ["WHO_HANGS"] + ".new", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(os.environ["WHO_HANGS"] + ".new", os.environ["WHO_HANGS"])
    time.sleep(300)
def registry_variants():
    claims = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(1, 256), layouts=("bhsd",), ieee=True)
    return [Variant("test.hangs", op="attention", run=hangs, requires=claims)]
"""


def test_a_second_sweep_into_one_file_is_one_line(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    with journal.Journal(path):
        assert main(["tune", "attention", "--device", "cpu", "--grid", "tiny", "--out", str(path)]) == USAGE
    assert capsys.readouterr().err == f"kreg: {path}: another process writes to it\n"


@pytest.mark.parametrize(
    ("ending", "status", "word"),
    [(signal.SIGINT, INTERRUPTED, "interrupted"), (signal.SIGTERM, TERMINATED, "terminated")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_sweep_that_is_interrupted_leaves_nothing_behind(tmp_path, cache, ctrl_c, ending, status, word):
    """Its children are gone, its journal is whole, and its exit status is that of what ended it."""
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "shapes.txt").write_text("b=1,hq=1,s=16,d=16,dtype=float32\n")
    who, out = tmp_path / "who", tmp_path / "run.jsonl"
    command = [forked.REAL, "-m", "registry.cli", "tune", "attention", "--device", "cpu", "--turn", "1"]
    command += ["--shapes", str(tmp_path / "shapes.txt"), "--plugin", str(tmp_path / "hanging.py"), "--out", str(out)]
    command += ["--only", "test.hangs", "--only", "torch_cpu", "--timeout", "10m"]
    with subprocess.Popen(
        command,
        env={**os.environ, "WHO_HANGS": str(who)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as sweep:
        while not who.exists() and sweep.poll() is None:
            time.sleep(0.1)
        os.killpg(sweep.pid, ending)
        printed, complaints = sweep.communicate(timeout=120)
    assert sweep.returncode == status, complaints
    assert f"stopped: {word}" in printed and "Traceback" not in complaints
    assert all(gone(int(pid)) for pid in who.read_text().split())
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()][:2] == ["run", "case"]
