"""`kreg new` writes what works at once: kernel, test, entry point, README, for every op that has a starter."""

from __future__ import annotations

import errno
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import tomllib
from ran import printed

from registry.cli import OK, USAGE, main
from registry.ops.known import all_ops

pytestmark = pytest.mark.usefixtures("quick_python")

STARTED = [name for name, op in all_ops().items() if op.starter is not None]
FEW = {
    "attention": "refuses or bfloat16 and 1x16",
    "matmul": "refuses or 77x129x100",
    "attention_backward": "1x77",
    "grouped_mm": "refuses or 5x129x24x256",
    "attention_varlen": "refuses or head_dim:40 and float16 and not causal",
}


def written(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_ops_that_people_write_kernels_for_have_one():
    assert {"attention", "attention_backward", "attention_varlen", "grouped_mm", "matmul"} <= set(STARTED)


@pytest.mark.parametrize("op", STARTED)
def test_what_is_tuned_of_its_configs_counts_from_the_first_shape_on(op):
    """A variant of several that guesses nothing, and does not say so, would run its first whatever was measured."""
    text = all_ops()[op].starter
    assert ("cost=unknown_cost" in text) == ("configs=" in text)


@pytest.mark.slow(15)
def test_what_is_written_passes(tmp_path, capsys, monkeypatch):
    folders = []
    for op in STARTED:
        package = ["--package"] if op == "matmul" else []
        assert main(["new", f"acme.new_{op}", "--op", op, "--into", str(tmp_path), *package]) == OK
        folder = tmp_path / f"acme-new-{op}".replace("_", "-")
        folders.append(str(folder))
        assert PathFinder.find_spec(f"acme_new_{op}", [str(tmp_path)]) is None, (
            "found where it was written, uninstalled"
        )
        files = written(folder)
        assert str(folder / "README.md") in capsys.readouterr().out.replace("\n", " ")
        assert not [name for name, text in files.items() if re.search(r"@[A-Z]+@", text)]
        assert f'acme = "acme_new_{op}"' in files["pyproject.toml"]
    ruff = (sys.executable, "-m", "ruff")
    printed(*ruff, "format", "--isolated", "--line-length=120", "--check", ".", cwd=tmp_path)
    printed(*ruff, "check", "--isolated", "--line-length=120", "--select=E,F,W,I,B", ".", cwd=tmp_path)
    few = " or ".join(f"test_acme_new_{op}.py and ({FEW.get(op, 'refuses')})" for op in STARTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))  # as if they were installed
    (tmp_path / "elsewhere").mkdir()
    tests = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", few, *folders)
    said = printed(*tests, cwd=tmp_path / "elsewhere")
    for op in STARTED:
        assert re.search(rf"test_acme_new_{op}\.py\S* .*PASSED", said), op


@pytest.mark.slow(6)
def test_a_package_brings_its_tables(tmp_path):
    assert main(["new", "acme.tabled", "--op", "matmul", "--package", "--into", str(tmp_path)]) == OK
    package = tmp_path / "acme-tabled" / "acme_tabled"
    (package / "matmul.sm90.yaml").write_text("op: matmul\narch: sm90\nrules: []\n")
    code = (
        "import acme_tabled as a; print([p.name for p in a.registry_tables()], [v.name for v in a.registry_variants()])"
    )
    assert printed(sys.executable, "-c", code, cwd=package.parent).split() == [
        "['matmul.sm90.yaml']",
        "['acme.tabled']",
    ]
    content = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert content == {"acme_tabled": ["*.yaml", "*.json"]}  # measured shapes lie beside a table


@pytest.mark.parametrize("name", ["acme_.flash", "acme.flash_"])
def test_names_that_no_distribution_can_have_are_refused(name, tmp_path, capsys):
    assert main(["new", name, "--into", str(tmp_path)]) != OK
    assert "allowed: vendor.name" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["test.flash", "acme.flash_test", "acme.test"])
def test_names_whose_kernel_would_be_collected_as_tests_are_refused(name, tmp_path, capsys):
    """pytest would import such a file before its test, which has to say first that Triton interprets."""
    assert main(["new", name, "--into", str(tmp_path)]) == USAGE
    assert f"NAME: got {name!r}; allowed: a name whose module, " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_variant_that_is_there_is_refused(declare, tmp_path, capsys):
    """Once both were installed one of them would be left out."""
    declare("acme.there")
    assert main(["new", "acme.there", "--into", str(tmp_path)]) == USAGE
    said = "NAME: got 'acme.there', which registry.register declares; allowed: a name that no variant has here"
    assert said in " ".join(capsys.readouterr().err.split()) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_fills_leaves_nothing_behind(tmp_path, monkeypatch, capsys, there):
    """Of a part of the files the same command would say that the folder is not empty."""
    writing, folder = Path.write_text, tmp_path / "deep" / "acme-full"

    def until_full(path, text, **how):
        if path.parent.name == "tests":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return writing(path, text, **how)

    if there:
        folder.mkdir(parents=True)
    command = ["new", "acme.full", "--package", "--into", str(folder.parent)]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", until_full)
        assert main(command) == USAGE
    assert "test_acme_full.py: No space left on device" in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == ([folder.parent, folder] if there else [])
    assert main(command) == OK


def test_mistakes_are_one_line(tmp_path, capsys):
    for arguments, said in (
        (["Acme"], "NAME: got 'Acme'; allowed: vendor.name"),
        (["acme.x", "--op", "sorting"], "--op: got 'sorting'; allowed: attention"),
    ):
        assert main(["new", *arguments, "--into", str(tmp_path)]) == USAGE
        assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    (tmp_path / "acme-x").mkdir()
    (tmp_path / "acme-x" / "mine").write_text("")
    assert main(["new", "acme.x", "--into", str(tmp_path)]) == USAGE
    assert "is not empty" in capsys.readouterr().err
