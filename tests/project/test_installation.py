"""The sdist holds what its tests need, and doctor knows another distribution that ships our package's name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import forked
import pytest
import shared
from ran import printed

from registry import doctor, installed

ROOT = Path(__file__).parents[2]
FROM_THE_SDIST = ("contract", "tables/test_tables_malformed.py", "project/test_trust.py")


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(listed.stdout.split("\n")) - {""} if (ROOT / ".git").exists() else set()


@pytest.fixture(scope="module")
def sdist():
    """The unpacked sdist of a copy of the files under version control."""
    if not tracked():
        pytest.skip("no checkout")
    out = shared.folder("sdist", make_sdist)
    return next(path for path in out.iterdir() if path.is_dir() and path.name != "source")


def make_sdist(out):
    """Raw results are empty there: to pack a hundred megabytes takes seconds, and whether they come along is all."""
    copy = out / "source"
    for name in tracked():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(b"" if name.endswith(".jsonl") else (ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    printed(forked.REAL, "-c", build, out, cwd=copy)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out)


def test_the_sdist_is_the_checkout(sdist):
    held = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert sorted(name for name in tracked() - held if (ROOT / name).is_file()) == []


@pytest.mark.slow(20)
def test_tests_pass_from_the_sdist(sdist, tmp_path):
    """Those of a few rooms: the test above finds in it whatever the others need.

    The package is the one that the sdist's own pyproject.toml would install, and neither this checkout nor its folder.
    """
    mapped = (sdist / "pyproject.toml").read_text().split("[tool.setuptools.package-dir]")[1].split("\n[")[0]
    packages = re.findall(r'^"?([\w.]+)"? = "(\S+)"$', mapped, re.M)
    for name, folder in packages:
        shutil.copytree(sdist / folder, tmp_path / name.replace(".", "/"))
    start = f"import sys; sys.path[:1] = []; import registry; assert registry.__file__.startswith({str(tmp_path)!r}); "
    start += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rN", *(f"tests/{part}" for part in FROM_THE_SDIST)]
    printed(forked.python(), "-c", start, *options, cwd=sdist, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert len(packages) == 4


class Shipped:
    """A distribution, as importlib.metadata shows it."""

    def __init__(self, name, files=(), top_level=None):
        self.metadata = {"Name": name}
        self.files = [Path(file) for file in files]
        self._top_level = top_level

    def read_text(self, name):
        return self._top_level


def test_doctor_names_who_ships_our_package(monkeypatch):
    there = [
        Shipped("kernel-registry", ["registry/__init__.py"]),
        Shipped("harmless", ["harmless/registry/__init__.py"], "harmless\n"),
        Shipped("registry-of-old", [], "registry\n"),
        Shipped("by-files", ["registry/client.py"]),
    ]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: there)
    found = doctor.strangers()
    assert [text.split()[0] for text in found] == ["registry-of-old", "by-files"]
    monkeypatch.setitem(sys.modules, "registry", type(sys)("registry"))
    assert "gives another package" in doctor.strangers()[-1]


def install(site, *packages):
    """A folder as pip leaves it behind: of each distribution its files and the list of them."""
    for name, files in packages:
        for file in files:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text("")
        about = site / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "RECORD").write_text("".join(f"{file},sha256=x,0\n" for file in files))


def test_importing_says_what_another_distribution_left_in_our_folder(tmp_path):
    ours = ("kernel_registry", ["registry/__init__.py", "registry/ops/op.py", "registry/errors.py"])
    install(tmp_path, ours)
    folder = tmp_path / "registry"
    (folder / "__pycache__").mkdir()
    assert installed.foreign(str(folder)) == []
    install(tmp_path, ("registry_of_old", ["registry/client.py", "registry/ops/far.py", "registry/api/x.py"]))
    assert installed.foreign(str(folder)) == ["api", "client.py"]
    with pytest.warns(RuntimeWarning, match=r"did not install \(api, client.py\): `kreg doctor` names who ships it"):
        installed.warn_of_foreign(str(folder))
    (tmp_path / "kernel_registry-1.0.dist-info" / "RECORD").unlink()  # as where nothing wrote a list
    assert installed.foreign(str(folder)) == installed.foreign(str(tmp_path / "nowhere" / "registry")) == []


def test_it_is_said_when_the_package_is_imported(tmp_path):
    shutil.copytree(ROOT / "registry", tmp_path / "registry", ignore=shutil.ignore_patterns("__pycache__"))
    ours = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "registry").rglob("*.*")]
    (tmp_path / "kernel_registry-1.0.dist-info").mkdir()
    (tmp_path / "kernel_registry-1.0.dist-info" / "RECORD").write_text("".join(f"{file},,\n" for file in ours))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import registry; print(registry.__file__)"
    for stranger in (None, "client.py"):
        if stranger:
            (tmp_path / "registry" / stranger).write_text("")
        done = subprocess.run([forked.python(), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(tmp_path / "registry" / "__init__.py")
        assert ("did not install (client.py)" in done.stderr) == bool(stranger), done.stderr
