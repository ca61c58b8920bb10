"""One folder is an op, one file is a variant: a copy of the tree with a toy of each, and no other file touched."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ran import printed

pytestmark = pytest.mark.usefixtures("quick_python")

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "toy_op"
NO_CACHES = shutil.ignore_patterns("__pycache__", "results", "saved", "*.cubin")
TABLE = "registry/dispatch_tables/rms_norm.cpu.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python in a copy of the tree, laid out as it is installed."""
    tree = tmp_path_factory.mktemp("tree")
    for source, place in {
        "registry": "registry",
        "plugins": "registry/plugins",
        "dispatch_tables": "registry/dispatch_tables",
        "benchmarks": "benchmarks",
        "tools": "tools",
    }.items():
        shutil.copytree(ROOT / source, tree / place, ignore=NO_CACHES)
    shutil.copytree(TOY / "rms_norm", tree / "registry" / "ops" / "rms_norm", ignore=NO_CACHES)
    shutil.copy(TOY / "torch_rms_norm.py", tree / "registry" / "plugins")
    paths = os.pathsep.join([str(tree), str(tree / "tools")])
    environment = os.environ | {"PYTHONPATH": paths, "REGISTRY_CACHE": str(tree / "cache"), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        return printed(sys.executable, *arguments, cwd=tree, env=environment, timeout=300)

    python.tree = tree
    return python


@pytest.fixture(scope="module")
def tuned(run):
    """After `kreg tune` on the CPU has put its table among the shipped ones."""
    sweep = ("--grid", "tiny", "--device", "cpu", "--rounds", "3", "--turn", "1", "--processes", "1")
    said = run("-m", "registry.cli", "tune", "rms_norm", *sweep, "--out", "runs/toy.jsonl", "--table", TABLE)
    assert "4 shapes" in said and "table:" in said
    return run


EXPLAIN = "explain rms_norm --shape rows=32,hidden=64 --dtype fp32 --weight --device cpu --json"


def commands(*lines: str) -> str:
    """A program that gives `kreg` each of these, and says `---` before each."""
    calls = [f"print('---'); main({line.split()!r})" for line in lines]
    return "\n".join(["from registry.cli import main", *calls])


def test_it_is_found_called_and_explained(run):
    call = "import registry, torch; print(round(float(registry.rms_norm(torch.full((4, 8), 3.0)).sum()), 3))"
    called, explained = run("-c", f"{call}\n{commands(EXPLAIN)}").split("---")
    assert called == "32.0\n"
    assert json.loads(explained)["picked"] == "torch_rms_norm"


def test_it_is_tuned_and_its_table_ranks_and_has_no_lint(tuned):
    table = (tuned.tree / TABLE).read_text()
    assert "op: rms_norm" in table and "variant: torch_rms_norm" in table
    _, explained, linted = tuned("-c", commands(EXPLAIN, "tables lint --json")).split("---")
    assert "rms_norm.cpu.yaml" in explained
    assert "rms_norm" not in json.dumps(json.loads(linted)["findings"])


def test_it_is_held_to_its_oracle_and_documented(run):
    said = run(
        "-c",
        "import dataclasses, docs, registry; from registry.testing import check_op, check_variant\n"
        "print(check_op('rms_norm').line(), check_variant('torch_rms_norm').line(), sep='\\n')\n"
        "right = registry.variants()['torch_rms_norm']\n"
        "wrong = dataclasses.replace(right, name='test.wrong', run=lambda x, **given: 1.01 * right.run(x, **given))\n"
        "print(check_variant(wrong).line(), docs.variants_page(), sep='\\n')",
    )
    (of_op, of_right, of_wrong), page = said.splitlines()[:3], said
    assert of_op.endswith(" ok") and of_right.endswith(" ok") and of_wrong.endswith("FAILED"), said[:1000]
    assert "## rms_norm" in page and "| `torch_rms_norm` | any |" in page and "deterministic, weight" in page


def test_it_is_benchmarked(run):
    asked = ("--op", "rms_norm", "--collect-only", "-q", "-p", "no:cacheprovider")
    collected = run("-m", "pytest", "benchmarks/test_variants.py", *asked)
    assert "test_variant[rms_norm-rows=8,hidden=64,dtype=float32-torch_rms_norm]" in collected
