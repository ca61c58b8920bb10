"""`kreg tune`, `kreg inspect`, the benchmark suite and its gate, plots: as a user runs them, without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import plots
import pytest
from ran import printed

from registry.cli import main
from registry.contract.target import Target
from registry.dispatch import in_force
from registry.tuning import evidence, extra, grids, journal
from registry.tuning.lint import load_files

pytestmark = pytest.mark.usefixtures("quick_python")

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TUNE = ("tune", "attention", "--device", "cpu", "--only", "torch_*", "--rounds", "3", "--turn", "2")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A user's cache after one run of `kreg tune`: (folder, what was printed as JSON)."""
    folder = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, in_force.CACHE_VARIABLE: str(folder)}
    return folder, json.loads(
        printed(sys.executable, "-m", "registry.cli", *TUNE, "--grid", "tiny", "--json", env=environment)
    )


@pytest.fixture
def cache(tuned, monkeypatch):
    monkeypatch.setenv(in_force.CACHE_VARIABLE, str(tuned[0]))
    yield tuned[0]
    monkeypatch.undo()
    from registry.ops.known import reload_tables

    reload_tables()


def test_tuning_measures_fits_and_puts_the_table_in_force(tuned, cache):
    from registry import Target, attention
    from registry.ops.attention.problem import AttentionProblem
    from registry.ops.known import reload_tables

    found = tuned[1]
    assert found["sweep"]["measured"] == 4 and found["sweep"]["turns"] >= 8 and not found["sweep"]["failed"]
    assert found["regret"]["shapes"] == 4
    assert [(kind["when"], kind["shapes"]) for kind in found["kinds"]] == [({"dtype": "float32"}, 4)]
    assert Path(found["table"]).parent == cache / "tables"
    reload_tables()
    decision = attention.explain(AttentionProblem.of_shape(Target.named("cpu"), hq=2, s=64, d=16, dtype="float32"))
    assert decision.variant in ("torch_cpu", "torch_math") and "attention.cpu.yaml" in decision.because
    assert "torch_cpu loses" in decision.nearest and "torch_math loses" in decision.nearest


def test_what_was_tuned_proves_against_its_raw_results(tuned):
    folder, found = tuned
    table = load_files([Path(found["table"])]).tables[0]
    assert table.device == "cpu"
    assert evidence.verify(table, folder) == []


def test_fitting_again_measures_nothing(tuned, tmp_path, capsys):
    raw = tuned[1]["results"]
    before = Path(raw).read_bytes()
    where = tmp_path / "attention.cpu.yaml"
    assert main(["tune", "attention", "--fit-only", "--out", raw, "--table", str(where), "--run", "cpu/0001"]) == 0
    printed = capsys.readouterr().out
    assert "regret of each shape by the others" in printed
    assert Path(raw).read_bytes() == before
    assert "run: cpu/0001" in where.read_text() and "device: cpu" in where.read_text()


def test_trees_and_weights_may_be_kept_where_no_source_has_changed(tuned, tmp_path, capsys):
    """What was found before stays, here a weight that no fit finds; a fit that is anew says so."""
    where = tmp_path / "attention.cpu.yaml"
    given = ["tune", "attention", "--fit-only", "--out", tuned[1]["results"], "--table", str(where)]
    assert main(given) == 0
    edited = re.sub(r"nearest: {(\w+): [\d.]+", r"nearest: {\1: 77.7", where.read_text())
    assert edited != where.read_text()
    where.write_text(edited)
    assert main([*given, "--keep-trees"]) == 0
    printed = capsys.readouterr().out
    assert ": 77.7" in where.read_text() and "fitted anew" not in printed and "too good" not in printed
    other = shutil.copy(tuned[1]["results"], tmp_path / "other.jsonl")
    assert main([*given, "--keep-trees", "--also", str(other)]) == 0
    assert "left out in turn, is too good" in capsys.readouterr().out
    where.write_text("op: attention\narch: cpu\nrules:\n- use: [torch_cpu]\n")
    assert main([*given, "--keep-trees"]) == 0
    assert "kinds fitted anew: 1 " in capsys.readouterr().out and ": 77.7" not in where.read_text()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("op: matmul\narch: cpu\nrules:\n- use: [torch_matmul]\n", "a table of matmul; allowed with --keep and"),
        ("op: attention\narch: cpu\nrules:\n- use: [torch_cpu\n", "is not YAML"),
        ("errata: []\n", "which holds no table"),
    ],
)
@pytest.mark.parametrize("option", ["--keep", "--keep-trees"])
def test_what_is_no_table_of_the_op_is_not_kept_and_stays_as_it_is(tuned, tmp_path, capsys, held, said, option):
    where = tmp_path / "own.yaml"
    where.write_text(held)
    for more in (["--fit-only", "--out", tuned[1]["results"]], ["--device", "cpu", "--grid", "tiny"]):
        assert main(["tune", "attention", *more, "--table", str(where), option]) == 2
        err = capsys.readouterr().err
        assert said in err and str(where) in err and err.count("\n") == 1
    assert where.read_text() == held and list(tmp_path.iterdir()) == [where]


def test_a_dry_run_lists_contestants_and_measures_nothing(cache, capsys):
    before = sorted(cache.rglob("*"))
    assert main([*TUNE, "--grid", "tiny", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 4 and found[0]["contestants"] == ["torch_cpu", "torch_math"]
    assert sorted(cache.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tune", "attention", "--grid", "paper81"], "allowed: quick, tiny, paper18"),
        (["tune", "attention", "--budget", "soon"], "allowed: a time such as 90s, 10m or 1h"),
        (["tune", "attention", "--fit-only"], "--fit-only needs --out"),
        (["tune", "attention", "--fit-only", "--out", "none.jsonl"], "--out none.jsonl does not exist"),
        (["tune", "attention", "--keep"], "--keep needs --table FILE"),
        (["tune", "attention", "--keep-trees", "--table", "none.yaml"], "--keep-trees needs --table FILE"),
        (["tune", "attention", "--out", __file__, "--also", __file__], "its shapes would count twice"),
        (["tune", "attention", "--skip", "nope", "--device", "cpu"], "no variant 'nope' of op 'attention'"),
        (["tune", "attention", "--learn", __file__], "which only --guided reads: add --guided"),
        (["tune", "attention", "--timelines", __file__], "which only --guided reads: add --guided"),
        (
            ["tune", "attention", "--guided", "--learn", __file__, "--device", "cpu"],
            "in which nothing of attention was",
        ),
        (["tune", "attention", "--guided", "--timelines", __file__, "--device", "cpu"], "--timelines: got "),
        (
            ["tune", "attention", "--table", f"{__file__}/t.yaml"],
            f"--table: got {__file__}/t.yaml, but {__file__} is no",
        ),
        (["tune", "everything"], "everything"),
        (["inspect", "torch_matmul"], "declares no builds"),
        (["inspect", "no_such"], "no variant 'no_such' of any op; known: "),
        (["inspect", "gluon_fa3", "--arch", "cpu"], "allowed: a GPU such as sm90 or H100"),
        (["inspect", "gluon_fa3", "--config", "tile=3"], "allowed: BLOCK_N"),
        (["inspect", "triton_fa2", "--config", "BLOCK_M"], "--config: config BLOCK_M: got True, allowed such as 128"),
        (["inspect", "triton_fa2", "--config", "BLOCK_M=-64"], "--config: config BLOCK_M: got -64, allowed such as"),
        (["inspect", "triton_fa2", "--config", "BLOCK_M=wide"], "--config: config BLOCK_M: got 'wide', allowed such"),
        (["warm", "attention", "s=16", "--device", "cpu", "--variant", "torch_matmul"], "no variant 'torch_matmul' of"),
        (["warm", "attention", "s=16", "--device", "cpu", "--variant", ""], "no variant '' of op 'attention'"),
    ],
)
def test_mistakes_are_one_line(arguments, complaint, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert complaint in printed and printed.count("\n") == 1


def test_inspect_reads_what_the_compiler_made(tmp_path, capsys):
    arguments = ["inspect", "triton_matmul", "--arch", "sm80", "--shape", "m=256,n=256,k=256", "--json"]
    code = main([*arguments, "--save", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    (kernel,) = found["kernels"]
    assert code == bool(kernel["findings"]) and kernel["counts"]["HMMA"] > 0 and kernel["registers"] > 16
    assert kernel["declared"]["shared_memory"] >= kernel["shared"] > 0 and kernel["blocks_per_sm"] >= 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".sass", ".ptx"}
    assert main(["inspect", "triton_matmul", "--arch", "sm80", "--shape", "m=256,n=256,k=256", "--sass"]) == code
    printed = capsys.readouterr().out
    assert "occupancy" in printed and "HMMA" in printed and "EXIT" in printed


@pytest.mark.parametrize("more", [(), ("--all-configs", "--json")])
def test_inspect_compiles_nothing_for_an_architecture_that_a_variant_does_not_run_on(more, capsys, monkeypatch):
    """LLVM would abort on code for Hopper that is made for Blackwell, and take the process along."""
    monkeypatch.setattr("registry.toolbox.builds.compile_build", None)
    assert main(["inspect", "gluon_fa3", "--device", "B200", *more]) == 1
    printed = capsys.readouterr().out
    assert "arch: got sm100, allowed sm90" in printed and "does not compile" not in printed
    assert "nothing is compiled: gluon_fa3 does not run on sm100" in printed or json.loads(printed)["kernels"] == []


# --- the benchmark suite ------------------------------------------------------------------------------------------


GATE = ("--benchmark-compare", "--benchmark-compare-fail=median:3%")
RUNS = {
    "first": ("--fake-clock", "torch_cpu=1.0", "--benchmark-save=first"),
    "same": ("--fake-clock", "torch_cpu=1.0", *GATE),
    "slower": ("--fake-clock", "torch_cpu=1.05", *GATE),
    "real": ("--turns", "2", "-k", "96 and not causal", "--benchmark-json=real.json"),
}
SEVERAL = """
import contextlib, io, json, sys, pytest
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = int(pytest.main(arguments))
        except Exception as error:
            code, _ = 99, print(type(error).__name__, error)
    found[name] = code, printed.getvalue()
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The suite run four times in one process: what each printed and returned, and the folder that they ran in."""
    folder = tmp_path_factory.mktemp("bench")
    suite = [str(BENCHMARKS / "test_variants.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    common = ["--op", "attention", "--grid", "tiny", "--variants", "torch_*", f"--benchmark-storage={folder / 'saved'}"]
    plans = {name: [*suite, *common, *more] for name, more in RUNS.items()}
    # pytest-benchmark keeps nothing where it finds itself in a parallel worker.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    subprocess.run([sys.executable, "-c", SEVERAL, json.dumps(plans)], cwd=folder, check=True, env=alone)
    return folder, json.loads((folder / "found.json").read_text())


def test_the_gate_fails_when_one_kernel_gets_five_percent_slower(runs):
    code, printed = runs[1]["first"]
    assert code == 0 and "." * 8 in printed, printed
    code, printed = runs[1]["same"]
    assert code == 0 and "." * 8 in printed, printed
    code, printed = runs[1]["slower"]
    assert code != 0 and "Performance has regressed" in printed
    blamed = [line for line in printed.splitlines() if "Field 'median'" in line]
    assert len(blamed) == 4 and all("torch_cpu" in line for line in blamed)


def test_the_suite_times_real_kernels_and_keeps_the_machine(runs):
    folder, found = runs
    assert found["real"][0] == 0, found["real"][1]
    saved = json.loads((folder / "real.json").read_text())
    assert saved["machine_info"]["kernel_registry"]["device"] == "cpu"
    assert {b["extra_info"]["variant"] for b in saved["benchmarks"]} == {"torch_cpu", "torch_math"}
    for benchmark in saved["benchmarks"]:
        assert 0 < benchmark["stats"]["median"] < 1 and benchmark["stats"]["rounds"] == 2


@pytest.mark.parametrize(("name", "op"), [("matmul", "matmul"), ("warp_groups", "attention")])
def test_every_preset_is_measured_on_its_own_configs_too(name, op):
    cases = {case.text: case for case in grids.select(op, shapes=BENCHMARKS / "shapes" / f"{name}.txt")}
    sets = plots.shape_sets(op, name)
    assert {text for texts in sets.values() for text in texts} == set(cases)
    module = extra._module(str(BENCHMARKS / "more_configs.py"))
    more = [variant for variant in module.registry_variants() if variant.op == op]
    problems = [case.problem(Target.named("H200")) for case in cases.values()]
    assert any(variant.legal_configs(problem) for variant in more for problem in problems)


def test_plots_and_the_readme_come_from_raw_results(tuned, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("top\n<!-- results:attention -->\nold\n<!-- /results:attention -->\nend\n")
    images, deep = tmp_path / "images", tmp_path / "docs" / "measured" / "attention.md"
    deep.parent.mkdir(parents=True)
    deep.write_text(readme.read_text())
    (tmp_path / "docs" / "other.md").write_text("no table\n")
    pages = [str(readme), str(tmp_path / "docs")]
    where = ["--results", str(Path(tuned[1]["results"]).parent), "--page", *pages, "--images", str(images)]
    assert plots.main([*where, "--check"]) == 1
    assert plots.main(where) == 0
    assert (images / "attention.png").read_bytes().startswith(b"\x89PNG")
    text = readme.read_text()
    assert text.startswith("top\n") and text.endswith("end\n") and "old" not in text and "`torch_cpu`" in text
    assert deep.read_text() == text, "a folder stands for the pages in it that have a place"
    assert plots.main([*where, "--check"]) == 0
    assert plots.main(["--results", str(tmp_path / "nothing")]) == 1


def test_every_shape_of_a_results_file_is_in_it_once(tuned):
    results = journal.read(Path(tuned[1]["results"]))
    assert len({case.text for case in results.of("attention")}) == len(results.of("attention")) == 4
