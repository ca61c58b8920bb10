"""`kreg new`: a kernel variant to start from, with its test, its entry point and a README, all of which work."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from registry.cli import OK
from registry.errors import InvalidArgument

_NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?\.[a-z]([a-z0-9_]*[a-z0-9])?")  # packages end in no underscore
TEST = '''"""Every check of the conformance kit: on this machine's GPU, or interpreted where there is none."""

import pytest
from registry import testing

testing.interpret_without_gpu()  # before anything imports Triton

import @MODULE@  # noqa: E402

VARIANTS = @MODULE@.registry_variants()
CHECKS = [check for variant in VARIANTS for check in testing.checks_here(variant)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_conformance(check):
    outcome = check.run()
    assert outcome.passed, str(outcome)
'''
PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@DISTRIBUTION@"
version = "0.1.0"
description = "@NAME@, a variant of @OP@ for kernel-registry"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["kernel-registry"]

# This is all that makes the registry find the module.
[project.entry-points.kernel_registry]
@VENDOR@ = "@MODULE@"

[tool.setuptools]
@CONTENT@

[tool.pytest.ini_options]
pythonpath = ["."]
"""
MODULE_CONTENT = 'py-modules = ["@MODULE@"]'
PACKAGE_CONTENT = """packages = ["@MODULE@"]

[tool.setuptools.package-data]
"@MODULE@" = ["*.yaml", "*.json"]"""
README = """# @NAME@

A variant of `registry.@OP@`.

```console
$ pip install -e .                                  # the registry finds it: kreg list --op @OP@
$ pytest                                            # the conformance kit: on the GPU here, else interpreted
$ pytest --registry-variant @NAME@ --registry-level full
$ pytest --registry-bench @NAME@                    # times, by pytest-benchmark
$ kreg inspect @NAME@ --device H100                 # registers, spills, instructions; needs no GPU
$ kreg tune @OP@ --only @NAME@                      # which config is best where
```

`docs/authors.md` of kernel-registry has the contract of `run`, `prepare` and `builds`, and how to ship tables and
errata.
"""
INIT = '''"""@NAME@, a variant of @OP@ for kernel-registry: its kernel, and the tables that say where it is fastest."""

from pathlib import Path

from registry import hookimpl

from @MODULE@.kernel import registry_variants

__all__ = ["registry_tables", "registry_variants"]


@hookimpl
def registry_tables():
    """Every `<op>.<arch>.yaml` beside this file, as `kreg tune` writes them."""
    return sorted(Path(__file__).parent.glob("*.yaml"))
'''


@click.command("new", help="Write a working variant NAME, such as acme.my_kernel: kernel, test, entry point, README.")
@click.argument("name")
@click.option("--op", default="attention", show_default=True, metavar="OP", help="What it computes.")
@click.option("--package", is_flag=True, help="A package with tables of its own, rather than one module.")
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="Where its folder goes.")
def command(name: str, op: str, package: bool, into: Path) -> int:
    from registry.dispatch.catalog import catalog

    if not _NAME.fullmatch(name):
        raise InvalidArgument("NAME", repr(name), "vendor.name in lower-case words, such as acme.my_kernel")
    vendor, module = name.partition(".")[0], name.replace(".", "_")
    if fnmatch.fnmatch(file := f"{module}.py", "test_*.py") or fnmatch.fnmatch(file, "*_test.py"):
        raise InvalidArgument("NAME", repr(name), f"a name whose module, {file}, pytest does not take for tests")
    known = catalog.get().variants.get(name)
    if known is not None:  # of two of a name one is left out, once this one is installed
        raise InvalidArgument("NAME", f"{name!r}, which {known.origin} declares", "a name that no variant has here")
    # Named unlike the module: beside it, Python would take the folder for the module, ahead of an editable install.
    folder = into / (distribution := module.replace("_", "-"))
    if folder.exists() and any(folder.iterdir()):
        raise InvalidArgument("NAME", f"{name!r}, but {folder} is not empty", "a name whose folder is not there yet")
    words = {"NAME": name, "OP": op, "MODULE": module, "VENDOR": vendor, "DISTRIBUTION": distribution}
    kernel, words["CONTENT"] = starter(op), PACKAGE_CONTENT if package else MODULE_CONTENT
    files = {"pyproject.toml": PYPROJECT, "README.md": README}
    if package:
        files |= {f"{module}/__init__.py": INIT, f"{module}/kernel.py": kernel, f"tests/test_{module}.py": TEST}
    else:
        files |= {f"{module}.py": kernel, f"test_{module}.py": TEST}
    _write({folder / file: _filled(_filled(text, words), words) for file, text in files.items()})
    for file in files:
        click.echo(f"{folder / file}")
    click.echo(f"now: cd {shlex.quote(str(folder))}, pip install -e ., pytest")
    return OK


def _write(files: Mapping[Path, str]) -> None:
    """All of them or none: with a part of them there, the same command would find that the folder is not empty."""
    with contextlib.ExitStack() as undo:
        for path, text in files.items():
            for folder in reversed([parent for parent in path.parents if not parent.exists()]):
                folder.mkdir()
                undo.callback(folder.rmdir)
            undo.callback(path.unlink, missing_ok=True)
            path.write_text(text, encoding="utf-8")
        undo.pop_all()


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def starter(op: str) -> str:
    """The kernel to start from, which lies in the op's folder."""
    from registry.ops.known import all_ops

    found = {name: one.starter for name, one in all_ops().items() if one.starter is not None}
    if op not in found:
        raise InvalidArgument("--op", repr(op), ", ".join(sorted(found)))
    return found[op]
