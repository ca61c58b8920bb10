"""pytest plugin: `pytest --registry-variant NAME` adds the conformance tests of a variant to a run.

Installed under a name of its own, beside `registry`, because pytest imports its plugins in every run: without its
option this one imports nothing, least of all torch.
"""

from __future__ import annotations

from typing import Any

import pytest

SECONDS_PER_TEST = 300


class ConformanceFailure(Exception):
    """A variant does not do what it claims."""


class ConformanceItem(pytest.Item):
    """One check of registry.testing as a test."""

    check: Any

    def runtest(self) -> None:
        case = self.check.run()
        if not case.passed:
            raise ConformanceFailure(case.detail)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value).replace("; ", "\n")
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath, None, self.name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel-registry")
    group.addoption(
        "--registry-variant",
        action="append",
        default=[],
        metavar="NAME",
        help="add the conformance tests of this kernel variant, on every device here that it claims (repeatable)",
    )
    group.addoption("--registry-level", choices=("quick", "full"), default="quick", help="how many of them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in dict.fromkeys(config.getoption("registry_variant")):
        items += _items(session, name, config.getoption("registry_level"))


def _items(session: pytest.Session, name: str, level: str) -> list[pytest.Item]:
    from registry import testing
    from registry.errors import RegistryError

    found: list[pytest.Item] = []
    try:
        for target in testing.places(name):
            for check in testing.checks_for(name, target, level):
                nodeid = f"{name}[{target.arch}]::{check.name}"
                item = ConformanceItem.from_parent(session, name=check.name, nodeid=nodeid)
                item.check = check
                if session.config.pluginmanager.hasplugin("timeout"):
                    item.add_marker(pytest.mark.timeout(SECONDS_PER_TEST))
                found.append(item)
    except RegistryError as error:
        raise pytest.UsageError(f"--registry-variant {name}: {error}") from error
    if not found:
        raise pytest.UsageError(f"--registry-variant {name}: no device of this machine is among those that it claims")
    return found
