"""`import registry` is cheap beside `import torch` and loads no triton and no plugin; a decision loads no kernel."""

from __future__ import annotations

import json
import os

import forked
import pytest
from ran import printed
from slow_cores import slower_by

CALLS = 110_000
"""Of functions, Python's and others: by Python 3.11 and torch 2.13 an import makes 88,459 of them, on every machine."""
LIMIT_MS = 120
"""On a core like that which budgets are set on, where it takes 55: cold code is slowed by whoever shares the caches by
more than work that is repeated, as far as twice."""
RUNS, ATTEMPTS = 4, 10
"""Of runs, and how often there are so many before it counts as dear: more workers than cores leave few quiet ones."""
PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter(), time.process_time()
import registry
wall, busy = time.perf_counter() - start[0], time.process_time() - start[1]
print(json.dumps([min(wall, busy) * 1000, sorted(set(sys.modules) - before)]))
"""
COUNT = """
import sys
import torch
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
import registry
sys.setprofile(None)
print(calls)
"""


@pytest.fixture(scope="module")
def imports():
    """What gives (milliseconds, modules that came with it), of interpreters that have imported torch alone, with warm
    bytecode.

    Time that the processor spent on something else, as happens where tests share a machine, is not the import's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def probe(python):
        return json.loads(printed(python, "-c", PROBE, env=environment))

    first = probe(forked.REAL)  # writes the bytecode
    quick = forked.python(early=True)
    assert first[1] == probe(quick)[1], "the same modules as in a Python of its own"
    return lambda: probe(quick)


def test_import_is_cheap(imports):
    found = []
    for _ in range(ATTEMPTS):
        found.append(min(imports()[0] for _ in range(RUNS)) / slower_by())
        if found[-1] < LIMIT_MS:
            return
    pytest.fail(f"at best {found} ms")


def test_import_calls_few_functions(imports):
    assert int(printed(forked.python(early=True), "-c", COUNT)) < CALLS


def test_import_loads_no_triton_and_no_plugin(imports):
    loaded = imports()[1]
    heavy = ("triton", "registry.plugins", "registry.tables", "pluggy", "packaging", "msgspec", "yaml", "click", "rich")
    assert not [name for name in loaded if name.startswith(heavy)]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("registry.cli", ("triton", "registry.plugins", "rich.")),  # a command is imported when it runs
        ("registry.tables", ("triton", "msgspec", "yaml", "registry.tables.load")),
    ],
)
def test_modules_stay_light(module, heavy):
    code = f"import sys, {module}; print([m for m in sys.modules if m.startswith({heavy})])"
    assert printed(forked.python(early=True), "-c", code).strip() == "[]"


FIRST_MS = {"attention": ("hq=8,s=4096,d=128", 700), "matmul": ("m=100,n=4096,k=4096,layout=nt", 1000)}
"""The first decision of a process, which reads plugins and tables, takes 300 and 430 ms on such a core."""
DECIDE = """
import json, sys, time
import torch
from registry import Target
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
op, text = sys.argv[1:]
problem = Case.parse(op, text).problem(Target.named("H200"))
start = time.perf_counter(), time.process_time()
picked = op_named(op).explain(problem).variant
wall, busy = time.perf_counter() - start[0], time.process_time() - start[1]
kernels = [name for name in sys.modules if name.startswith("registry.plugins.") and name.endswith(".kernel")]
print(json.dumps([min(wall, busy) * 1000, picked, kernels]))
"""


@pytest.mark.parametrize("op", FIRST_MS)
def test_a_first_decision_is_quick_and_loads_no_kernel(op):
    """Triton reads the source of each function of a kernel when its module is imported: 0.24 s for all there are."""
    pytest.importorskip("triton")
    text, limit = FIRST_MS[op]
    found = []
    for _ in range(ATTEMPTS):
        took, picked, kernels = json.loads(printed(forked.python(early=True), "-c", DECIDE, op, text))
        assert picked.startswith("gluon_") and not kernels
        found.append(took / slower_by())
        if found[-1] < limit:
            return
    pytest.fail(f"at best {min(found):.0f} ms")
