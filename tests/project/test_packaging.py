"""The wheel holds the whole tree, works from a folder of its own, and finds third parties through entry points."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import forked
import pytest
from ran import printed

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
MAPPED = {"registry": "registry", "plugins": "registry/plugins", "dispatch_tables": "registry/dispatch_tables"}
APART = {"registry/pytest_plugin": "kernel_registry_pytest"}
SHIPPED = (".py", ".yaml", ".json", ".txt", ".css", ".js", ".typed")
FROM_ELSEWHERE = """
import json, torch, registry
q, k, v = torch.randn(3, 1, 2, 40, 16)
with registry.record() as ran:
    out = registry.attention(q, k, v, causal=True)
    registry.attention(q, k, v, variant="acme.blocked")
error = (out - registry.attention.reference(q, k, v, causal=True)).abs().max().item()
variants = {name: variant.origin for name, variant in registry.variants().items()}
because = registry.attention.explain(q, k, v).because
print(json.dumps([registry.__file__, error, ran.counts, variants, because]))
"""


def build(source, wheels):
    """The wheel of a copy of `source`, so that no build folder is left behind or gets in."""
    printed(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source)
    return next(wheels.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in MAPPED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return build(copy, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """A folder with the wheel and the third-party example installed, and an environment that looks there first."""
    site, acme = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("acme") / "acme"
    shutil.copytree(ROOT / "examples" / "acme", acme)
    third_party = build(acme, tmp_path_factory.mktemp("acme_wheels"))
    printed(*PIP, "install", "--no-deps", "--no-compile", "--target", site, wheel, third_party)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
    cache = str(tmp_path_factory.mktemp("cache"))
    return site, environment | {"PYTHONPATH": str(site), "REGISTRY_CACHE": cache, "COLUMNS": "80"}


def in_wheel(path):
    """Where a file of the tree lies in the wheel."""
    for folder, inside in (APART | MAPPED).items():
        if path.is_relative_to(ROOT / folder):
            return f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
    raise AssertionError(path)


def test_the_wheel_is_the_tree(wheel):
    in_tree = {
        in_wheel(path)
        for folder in MAPPED
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert set(names) == in_tree
    assert {name.partition("/")[0] for name in names} == {"registry", *APART.values()}


def test_the_wheel_carries_licence_types_and_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        points = archive.read(names["entry_points.txt"]).decode()
        licence = archive.read(names["licenses/LICENSE"]).decode()
        about = archive.read(names["METADATA"]).decode()
        assert "registry/py.typed" in archive.namelist()
    assert "kreg = registry.cli:main" in points and "kernel_registry = kernel_registry_pytest" in points
    assert licence == (ROOT / "LICENSE").read_text() and "Apache License" in licence
    assert "License-Expression: Apache-2.0" in about and "Requires-Python: >=3.10" in about


def test_an_installed_wheel_works_from_another_folder(elsewhere, tmp_path):
    site, environment = elsewhere
    found = json.loads(printed(forked.python(), "-c", FROM_ELSEWHERE, cwd=tmp_path, env=environment))
    file, error, counts, variants, because = found
    assert Path(file).is_relative_to(site)
    assert error < 1e-5
    assert "registry.plugins.torch_attention" in variants.values(), "built-in plugins are found"
    assert because.startswith("attention.any.yaml"), "tables are found"
    assert counts["attention"]["acme.blocked"] == 1
    assert variants["acme.blocked"] == "acme (acme_kernels)", "a third party is found by its entry point"


def test_the_installed_command_works_from_another_folder(elsewhere, tmp_path):
    site, environment = elsewhere
    command = (site / "bin" / "kreg", "explain", "attention", "--device", "H100", "--causal")
    out = printed(*command, cwd=tmp_path, env=environment)
    assert "on H100 (sm90)" in out and "acme.blocked" in out


# --- the project's own files --------------------------------------------------------------------------------------


def test_constraints_cover_what_is_required():
    """What `make test` installs directly is pinned, but triton, which a torch built for GPUs brings along."""
    pins = (ROOT / "constraints.txt").read_text()
    pinned = set(re.findall(r"^([a-z-]+)==", pins, re.M))
    project = re.sub(r"(?m)#.*$", "", (ROOT / "pyproject.toml").read_text())
    section = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    required = {re.split(r"[><=;\[ ]", entry)[0] for entry in re.findall(r'"([a-z][^"]*)"', section)}
    assert required - pinned - {"triton", "kernel-registry"} == set()


def test_project_files_name_no_machine_and_no_package_host():
    files = [ROOT / name for name in ("Makefile", "constraints.txt", "pyproject.toml", "README.md", ".ci/run")]
    for file in files:
        text = file.read_text()
        assert not re.search(r"/(work|home|root|opt|tmp)/|pypi\.|files\.pythonhosted|download\.pytorch", text), file
