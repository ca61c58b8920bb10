"""Declarations that never answer are named and left out of a sweep, which is planned and run without them."""

import pytest

from registry.cli import main
from registry.cli._sweep import report_lines
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case
from registry.tuning import journal, worker
from registry.tuning.answering import who_answers
from registry.tuning.contestants import Selection
from registry.tuning.extra import load_plugins
from registry.tuning.measure import Effort, Sweep

pytestmark = pytest.mark.usefixtures("quick_python")

PLUGIN = """
import os
import registry
from registry import Requires, Variant

def endless(*_):
    while True:
        pass

def ends_the_process(*_):
    os._exit(7)

def raises(*_):
    raise ValueError("a plain mistake")

def only_of_long_ones(problem, config):
    return endless() if problem.seqlen_k > 16 else ()

def run(q, k, v, *, scale, config):
    raise NotImplementedError

def made(name, rule=None, **more):
    claims = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(1, 64), layouts=("bhsd",), ieee=True, rule=rule)
    return Variant(f"endless.{name}", op="attention", run=run, requires=claims, **more)

@registry.hookimpl
def registry_variants():
    return [
        made("configs", configs=endless),
        made("cost", cost=endless),
        made("rule", only_of_long_ones),
        made("exits", configs=ends_the_process),
        made("raises", configs=raises),
    ]
"""
SHORT, LONG = (Case.of("attention", hq=1, s=size, d=8, dtype="float32") for size in (16, 24))
SECONDS = 2.0
"""A declaration gets so long here."""


@pytest.fixture
def plugin(tmp_path):
    """A file of variants whose declarations misbehave; they are gone again before another test asks them."""
    path = tmp_path / "endless.py"
    path.write_text(PLUGIN)
    yield str(path)
    for name in [name for name in catalog.get().variants if name.startswith("endless.")]:
        catalog.unregister(name)


@pytest.fixture
def child(plugin):
    with worker.child("cpu", plugins=[plugin]) as made:
        made.start()
        yield made


@pytest.mark.slow(8)
def test_declarations_that_hang_or_end_their_process_are_named_with_the_shape(plugin, child):
    load_plugins([plugin])
    texts = []
    wanted = Selection(("endless.*", "torch_cpu"), ("torch_math",))
    selection, silent = who_answers([SHORT, LONG], wanted, child, SECONDS, texts.append)
    assert selection.skip == ("torch_math", *silent)
    said = dict(text.partition("; it printed")[0].split(": ", 1) for text in texts)  # what raises prints
    assert list(said) == silent and said == {
        "endless.configs": f"its declaration hung on {SHORT.text}: no answer in 2 s; killed",
        "endless.cost": f"its declaration hung on {SHORT.text}: no answer in 2 s; killed",
        "endless.exits": f"its declaration crashed on {SHORT.text}: exit status 7",
        "endless.rule": f"its declaration hung on {LONG.text}: no answer in 2 s; killed",
    }
    assert selection.wants("endless.raises"), "a declaration that raises answers"


def test_a_sweep_goes_on_without_a_declaration_that_hangs(plugin, child, tmp_path):
    effort = Effort(rounds=1, settle_ms=0.1, measure_ms=1.0, check_timeout=SECONDS)
    selection = Selection(("endless.configs", "torch_cpu"))
    report = Sweep(
        [SHORT], tmp_path / "r.jsonl", effort=effort, selection=selection, plugins=[plugin], child=child
    ).run()
    assert report.silent == ["endless.configs"] and report.measured == 1 and report.restarts == 0
    assert "left out, for their declarations never answered: endless.configs" in report_lines(report)
    (case,) = journal.read(tmp_path / "r.jsonl").cases.values()
    assert {entry.variant for entry in case.entries.values()} == {"torch_cpu"}


def test_a_dry_run_lists_the_others(plugin, tmp_path, capsys):
    (tmp_path / "shapes.txt").write_text(f"{SHORT.text}\n")
    arguments = ["tune", "attention", "--device", "cpu", "--shapes", str(tmp_path / "shapes.txt"), "--plugin", plugin]
    arguments += ["--only", "endless.configs", "--only", "torch_cpu", "--timeout", "0.5s", "--dry-run"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "torch_cpu" in out and "1 shapes, 1 contestants" in out
    assert f"left out: endless.configs: its declaration hung on {SHORT.text}" in err
