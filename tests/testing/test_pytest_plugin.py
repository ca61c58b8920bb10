"""The conformance kit as a plugin of pytest: its cases are tests, and installed variants can be timed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked
import pytest
from ran import printed

import registry

pytestmark = pytest.mark.usefixtures("quick_python")


def run_here(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str]:
    given = ["-s", "-p", "no:cacheprovider", "-p", "no:timeout", "--rootdir", str(folder), *arguments, str(folder)]
    code = pytest.main(given)
    said = capsys.readouterr()
    return int(code), said.out + said.err


def test_pytest_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_here(capsys, tmp_path, "--registry-variant", "torch_matmul", "-k", "refuses", "-v")
    assert code == 0 and "torch_matmul[cpu]::refuses other architectures PASSED" in out, out
    assert run_here(capsys, tmp_path, "--registry-variant", "no_such")[0] == 4  # a usage error


def test_pytest_plugin_stays_light(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text("import sys\ndef test_light(): assert 'torch' not in sys.modules\n")
    command = [forked.REAL, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, "test_light.py"]
    printed(*command, cwd=tmp_path, timeout=300)


@pytest.mark.slow(10)
def test_pytest_plugin_interprets_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    wanted = ["--registry-variant", "triton_fa2", "--registry-target", "H100", "-k", "1x1 and bfloat16", "-v"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *wanted]
    said = printed(*command, cwd=tmp_path, timeout=300)
    assert "triton_fa2[sm90]::" in said and "bfloat16" in said


def test_pytest_plugin_times_installed_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark times nothing within a worker
    wanted = ["--registry-bench", "torch_cpu", "-k", "not matmul", "--benchmark-columns=median"]
    code, out = run_here(capsys, tmp_path, *wanted)
    assert code == 0 and "benchmark 'attention" in out and "torch_cpu" in out, out
    code, out = run_here(capsys, tmp_path, "--registry-bench", "torch_flash")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--registry-bench torch_flash: nothing to time on cpu; torch_flash on " in out and "arch: got cpu" in out
    code, out = run_here(capsys, tmp_path, "--registry-bench", "no_such")
    assert code == 4 and "got 'no_such'; allowed:" in out


FAILING = """
import registry
from registry.ops.attention.outputs import new_out

def run(q, k, v, *, scale, config, causal):
    out = registry.attention.reference(q, k, v, scale=scale, causal=causal)
    return new_out(q, v).copy_(out * (1.5 if causal else 1.0)), None

claims = dict(arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), layouts=("bhsd",), ieee=True, causal=True)
registry.register(registry.Variant("test.causal", op="attention", run=run, requires=registry.Requires(**claims)))
"""


def test_pytest_plugin_says_what_failures_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conftest.py").write_text(FAILING)
    try:
        code, out = run_here(capsys, tmp_path, "--registry-variant", "test.causal")
    finally:
        registry.unregister("test.causal")
    assert code == 1
    assert "failures have causal" in out, out
    assert "the smallest that fails: float32 batch:1 heads:1x1" in out


@pytest.mark.slow(15)
def test_what_failures_share_is_said_where_processes_of_xdist_ran_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FAILING)
    wanted = ["-n", "2", "--registry-variant", "test.causal", "-k", "1x1 and float32 and not again and not beside"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, *wanted]
    out = printed(*command, cwd=tmp_path, timeout=300, allowed=1)
    assert out.count("failures have causal") == 1, out
    assert out.count("the smallest that fails: float32 batch:1 heads:1x1") == 1


BENCHED = """
import registry

def declared(name, run):
    claims = dict(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True)
    own = registry.Variant(name, op="matmul", run=run, requires=registry.Requires(**claims))
    registry.register(own, replace=True)

declared("test.good", lambda a, b, *, config: a @ b)
declared("test.wrong", lambda a, b, *, config: (a @ b) * 1.5)
declared("test.raises", lambda a, b, *, config: 1 / 0)
"""


def test_a_bench_times_what_is_right_and_fails_the_rest_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "conftest.py").write_text(BENCHED)
    names = ["test.good", "test.wrong", "test.raises"]
    try:
        wanted = [word for name in names for word in ("--registry-bench", name)]
        _, out = run_here(capsys, tmp_path, *wanted, "--benchmark-columns=median")
        code, said = run_here(capsys, tmp_path, *wanted, "--registry-grid", "tiny+nope")
    finally:
        for name in names:
            registry.unregister(name)
    passed, failed = (int(re.search(rf"(\d+) {what}", out).group(1)) for what in ("passed", "failed"))  # type: ignore[union-attr]
    assert failed == 2 * passed > 0
    assert "test.wrong on m=" in out and ": wrong: " in out and ": ZeroDivisionError: division by zero" in out
    assert code == pytest.ExitCode.USAGE_ERROR and "--registry-grid: got 'nope'; allowed: all, " in said
