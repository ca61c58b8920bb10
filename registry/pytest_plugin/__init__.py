"""pytest plugin: `pytest --registry-variant NAME` adds the conformance tests of a variant to a run, and
`pytest --registry-bench NAME` its benchmarks.

    pytest --registry-variant acme.flash                                # on every device here that it claims
    pytest --registry-variant acme.flash --registry-target H100         # without one: interpreted
    pytest --registry-bench acme.flash --registry-bench torch_flash     # timed together, by pytest-benchmark

Installed under a name of its own, beside `registry`, because pytest imports its plugins in every run: without its
options this one imports nothing, least of all torch.
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
    subject: str
    outcome: Any = None

    def runtest(self) -> None:
        self.outcome = self.check.run()
        if not self.outcome.passed:
            raise ConformanceFailure(self.outcome.detail)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceFailure):
            return "\n".join([str(excinfo.value).replace("; ", "\n"), self.check.about])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath, None, self.name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel-registry")
    add = group.addoption
    add(
        "--registry-variant",
        action="append",
        default=[],
        metavar="NAME",
        help="add the conformance tests of this kernel variant, on every device here that it claims (repeatable)",
    )
    add("--registry-target", metavar="GPU", help="test for this GPU, such as H100: interpreted where none is here")
    add("--registry-level", choices=("quick", "full"), default="quick", help="how many of them")
    add("--registry-bench", action="append", default=[], metavar="NAME", help="add this variant's benchmarks")
    add("--registry-grid", default="", metavar="GRID", help="which shapes; default: quick, tiny on a CPU")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Triton has to know that it interprets before anything imports it."""
    if getattr(early_config.known_args_namespace, "registry_target", None) is None:
        return
    import torch

    from registry.errors import RegistryError
    from registry.testing import interpreted

    if not torch.cuda.is_available():
        try:
            interpreted.ask_for_it()
        except RegistryError as error:
            raise pytest.UsageError(f"--registry-target: {error}") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    from_options = config.getoption
    for name in dict.fromkeys(from_options("registry_variant")):
        items += _items(session, name, from_options("registry_level"), from_options("registry_target"))
    if names := list(dict.fromkeys(from_options("registry_bench"))):
        items += _benchmarks(session, names, from_options("registry_grid"))


def _items(session: pytest.Session, name: str, level: str, target_name: str | None) -> list[pytest.Item]:
    from registry import testing
    from registry.contract.target import Target
    from registry.errors import RegistryError

    found: list[pytest.Item] = []
    try:
        for target in [Target.named(target_name)] if target_name else testing.places(name):
            for check in testing.checks_for(name, target, level):
                nodeid = f"{name}[{target.arch}]::{check.name}"
                item = ConformanceItem.from_parent(session, name=check.name, nodeid=nodeid)
                item.check, item.subject = check, f"{name} on {target.name}"
                if session.config.pluginmanager.hasplugin("timeout"):
                    item.add_marker(pytest.mark.timeout(SECONDS_PER_TEST))
                found.append(item)
    except RegistryError as error:
        raise pytest.UsageError(f"--registry-variant {name}: {error}") from error
    if not found:
        raise pytest.UsageError(
            f"--registry-variant {name}: no device of this machine is among those that it claims; with "
            "--registry-target GPU, such as H100, its kernels are interpreted"
        )
    return found


Found = dict[str, tuple[list[dict[str, Any]], str]]
"""By variant and target: the outcomes of its checks as plain data, and the smallest that fails."""
FOUND = pytest.StashKey[Found]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What came of the checks is gathered, and the smallest that fails looked for, where they ran."""
    ran: dict[str, list[ConformanceItem]] = {}
    for item in getattr(session, "items", ()):
        if isinstance(item, ConformanceItem) and item.outcome is not None:
            ran.setdefault(item.subject, []).append(item)
    if not ran:
        return
    from dataclasses import asdict

    from registry.testing import smallest

    found: Found = {}
    for subject, items in ran.items():
        outcomes = [item.outcome for item in items]
        found[subject] = list(map(asdict, outcomes)), smallest([item.check for item in items], outcomes)
    _gather(session.config, found)
    getattr(session.config, "workeroutput", {})[__name__] = found  # what a process of xdist sends to who started it


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _gather(node.config, getattr(node, "workeroutput", {}).get(__name__, {}))


def _gather(config: pytest.Config, found: Found) -> None:
    known = config.stash.setdefault(FOUND, {})
    for subject, (outcomes, smallest) in found.items():
        before, first = known.get(subject, ([], ""))
        known[subject] = [*before, *outcomes], first or smallest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What the failures of each variant have in common, and the smallest of them."""
    found = config.stash.get(FOUND, {}).items()
    failed = {subject: one for subject, one in found if not all(outcome["passed"] for outcome in one[0])}
    if not failed:
        return
    from registry.testing import Outcome, in_common

    terminalreporter.section("what failed")
    for subject, (outcomes, smallest) in failed.items():
        for text in filter(None, (in_common([Outcome(**outcome) for outcome in outcomes]), smallest)):
            terminalreporter.line(f"{subject}: {text}")


# --- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmarks(session: pytest.Session, names: list[str], grid: str) -> list[pytest.Item]:
    """A test for each variant on each shape; those of a shape are timed together when the first one runs."""
    if not session.config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "--registry-bench: pytest-benchmark is not installed: pip install kernel-registry[bench]"
        )
    import torch

    from registry.contract.target import Target
    from registry.dispatch.catalog import catalog
    from registry.errors import RegistryError
    from registry.tuning.benchmarks import CLOCK, Rounds, dispatched, measured, refused, report
    from registry.tuning.grids import names as grid_names

    known = catalog.get().variants
    if unknown := [name for name in names if name not in known]:
        raise pytest.UsageError(f"--registry-bench: got {unknown[0]!r}; allowed: {', '.join(sorted(known))}")
    target = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    grids = sorted({one for name in names for one in grid_names(known[name].op)} | {"all"})
    if unknown := [one for one in grid.split("+") if grid and one not in grids]:
        raise pytest.UsageError(f"--registry-grid: got {unknown[0]!r}; allowed: {', '.join(grids)}, joined by +")
    try:
        found = [c for op in sorted({known[name].op for name in names}) for c in dispatched(op, target, grid, names)]
    except RegistryError as error:
        raise pytest.UsageError(f"--registry-bench: {error}") from error
    if not found:
        why = filter(None, (refused(known[name].op, target, grid, name) for name in names))
        nothing = f"--registry-bench {' '.join(names)}: nothing to time on {target.name}"
        raise pytest.UsageError("; ".join([nothing, *why]))
    done: dict[Any, Rounds] = {}
    items: list[pytest.Item] = []
    for contestant in found:

        def bench(benchmark: Any, contestant: Any = contestant) -> None:
            if contestant not in done:
                together = [other for other in found if other.case == contestant.case]
                done.update(measured(together, target))
            report(benchmark, contestant, done[contestant])

        item = pytest.Function.from_parent(session, name=contestant.label, callobj=bench)
        item.add_marker(pytest.mark.benchmark(timer=CLOCK.read, warmup=False))
        items.append(item)
    return items
