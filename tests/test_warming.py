"""Compiling ahead, over a made-up variant with real kernels, in this process and in others."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from ran import install_plugin

import registry
from registry import Target, warming
from registry.dispatch.scope import Recorder
from registry.errors import CaptureError, InvalidArgument
from registry.ops.parts import workload
from registry.ops.parts.cases import Case
from registry.warming import Warmed, warm

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_python")

H100 = Target.named("H100")
SHAPE = "hq=2,s=128,d=64,dtype=float16"


@triton.jit
def _fill(out, value, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), value)


@triton.jit
def _broken(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), unknown_name)  # noqa: F821


def _build(kernel, problem):
    from registry.toolbox.builds import Build

    signature = {"out": "*fp32", "value": "fp32"} if kernel is _fill else {"out": "*fp32"}
    return Build(kernel, signature, {"BLOCK": problem.head_dim})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def variant(declare):
    def make(*kernels):
        def builds(problem, config):
            return [_build(kernel, problem) for kernel in kernels]

        return declare("test.warm", arch=("sm90",), dtypes=("float16",), causal=True, builds=builds)

    return make


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Launches are made with operands there, as far as `warm` is told so."""
    monkeypatch.setattr(workload, "workload", lambda case, device, make=workload.workload: make(case, "cpu"))
    return {"target": Target.named("cpu"), "jobs": 1}


def _cubins(cache):
    return list(cache.rglob("*.cubin"))


@pytest.mark.parametrize("jobs", [1, 2])
def test_compiles_into_tritons_cache(variant, cache, jobs):
    variant(_fill)
    with registry.use("test.warm"):
        (found,) = warm([f"attention {SHAPE}"], target=H100, jobs=jobs)
    assert (found.variant, found.kernels, found.error, found.launched) == ("test.warm", 1, "", False)
    assert found.case == f"attention {SHAPE}"
    assert len(_cubins(cache)) == 1


def test_equal_kernels_are_compiled_once(variant, cache):
    variant(_fill)
    seen = []

    def note(done, of):
        seen.append((done, of))

    shapes = [SHAPE, SHAPE, f"{SHAPE},causal", "s=64,d=64,dtype=float16"]
    with registry.use("test.warm"):
        found = warm([f"attention {shape}" for shape in shapes], target=H100, jobs=1, progress=note)
    assert [one.kernels for one in found] == [1, 1, 1]
    assert seen == [(1, 1)]
    assert len(_cubins(cache)) == 1


def test_a_kernel_that_does_not_compile_is_reported_and_the_rest_goes_on(variant, cache):
    variant(_broken, _fill)
    with registry.use("test.warm"):
        (found,) = warm([f"attention {SHAPE}"], target=H100, jobs=1)
    assert found.kernels == 1
    assert "unknown_name is not defined" in found.error
    assert len(_cubins(cache)) == 1


def test_a_problem_without_a_legal_variant_is_reported(variant):
    variant(_fill)
    with registry.use("test.warm"):
        found = warm(["attention s=64,d=64,dtype=float32", f"attention {SHAPE}"], target=H100, jobs=1)
    assert "test.warm" in found[0].error
    assert found[0].kernels == 0
    assert found[1].kernels == 1


def test_builds_that_raise_are_reported(variant):
    made = variant(_fill)
    broken = dataclasses.replace(made, builds=lambda problem, config: 1 / 0)
    registry.unregister(made.name)
    registry.register(broken)
    with registry.use("test.warm"):
        (found,) = warm([f"attention {SHAPE}"], target=H100, jobs=1)
    assert "ZeroDivisionError" in found.error


def test_problems_and_recorded_problems(variant):
    variant(_fill)
    q = torch.empty(1, 2, 128, 64, dtype=torch.float16, device="meta")
    problem, _ = registry.attention.problem_of(q, q, q, target=H100)
    recorder = Recorder()
    with registry.use("test.warm"):
        recorder.add(registry.attention.explain(problem))
        for what in ([problem], recorder):
            (found,) = warm(what, jobs=1)
            assert found.kernels == 1


def test_an_empty_problem_has_nothing_to_warm_and_the_rest_goes_on(variant):
    """Its op answers by itself, and no table or variant is asked."""
    variant(_fill)
    empty = Case.of("attention", hq=2, s=0, sk=4, d=64, dtype="float16")
    with registry.use("test.warm"):
        none, some = warm([empty, f"attention {SHAPE}"], target=H100, jobs=1)
    assert (none.variant, none.kernels, none.error) == ("(none)", 0, "") and some.kernels == 1
    with registry.record() as recorder:
        registry.matmul(torch.ones(0, 8), torch.ones(8, 8))
    (found,) = warm(recorder, target=H100, jobs=1)
    assert found == Warmed("matmul m=0,n=8,k=8,dtype=float32,ieee", "(none)")


@pytest.mark.parametrize("failure", [ValueError("no such tile"), SystemExit(3)], ids=["error", "exit"])
def test_a_launch_that_fails_is_reported_with_its_variant_and_the_rest_goes_on(declare, on_the_cpu, failure):
    def run(q, k, v, *, scale, config):
        if q.shape[2] == 16:
            raise failure
        return torch.zeros_like(q), None

    declare("test.failing", run=run)
    with registry.use("test.failing"):
        failed, fine = warm([f"attention s={size},d=8,dtype=float32" for size in (16, 32)], launch=True, **on_the_cpu)
    assert (failed.variant, failed.launched) == ("test.failing", False)
    assert failed.error == f"{type(failure).__name__}: {failure}"
    assert (fine.variant, fine.launched, fine.error) == ("test.failing", True, "")


def test_ctrl_c_in_a_launch_ends_the_warming(declare, on_the_cpu):
    def run(q, k, v, *, scale, config):
        raise KeyboardInterrupt

    declare("test.interrupted", run=run)
    with registry.use("test.interrupted"), pytest.raises(KeyboardInterrupt):
        warm(["attention s=16,d=8,dtype=float32"], launch=True, **on_the_cpu)


def test_variant_without_builds(declare):
    declare("test.plain", arch=("sm90",), dtypes=("float16",))
    with registry.use("test.plain"):
        (found,) = warm([f"attention {SHAPE}"], target=H100, jobs=1)
    assert (found.kernels, found.error) == (0, "")


def test_needs_a_target_where_there_is_no_gpu(variant, monkeypatch):
    variant(_fill)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match="target"):
        warm([f"attention {SHAPE}"])


@pytest.mark.parametrize("what", [3, None, "matmul m=8,n=8,k=8", [3], [None], [registry.matmul]], ids=str)
def test_what_says_no_problem_is_named(what):
    with pytest.raises(InvalidArgument, match=r"^what: got .*; allowed: a record\(\) block, or a list of Cases"):
        warm(what, target=H100)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "H100"}, "target: got 'H100'; allowed: None or a Target"),
        ({"jobs": 0}, "jobs: got 0; allowed: None or a positive integer"),
        ({"jobs": "3"}, "jobs: got '3'"),
        ({"jobs": True}, "jobs: got True"),
        ({"launch": "no"}, "launch: got 'no'; allowed: None, True or False"),
        ({"timeout": 0}, "timeout: got 0; allowed: a positive number of seconds"),
        ({"timeout": None}, "timeout: got None"),
        ({"timeout": float("nan")}, "timeout: got nan"),
    ],
)
def test_arguments_that_cannot_be_are_named(given, said):
    with pytest.raises(InvalidArgument) as caught:
        warm([f"attention {SHAPE}"], **{"target": H100} | given)
    assert said in str(caught.value)


def test_not_in_capture(monkeypatch):
    monkeypatch.setattr(warming, "capturing", lambda: True)
    with pytest.raises(CaptureError):
        warm([])


PLUGIN = """
    import os, time
    import triton, triton.language as tl
    from registry import Requires, Variant, hookimpl
    from registry.toolbox.builds import Build

    @triton.jit
    def kernel(out, value, BLOCK: tl.constexpr):
        tl.store(out + tl.arange(0, BLOCK), value)

    def builds(problem, config):
        print("chatter on stdout")
        if os.environ.get("WARM_TEST_PARENT") != str(os.getpid()):
            if problem.causal:
                os._exit(9)
            if problem.seqlen_q == 256:
                time.sleep(600)
        return [Build(kernel, {"out": "*fp32", "value": "fp32"}, {"BLOCK": problem.seqlen_q})]

    def run(q, k, v, *, causal, scale, config):
        raise NotImplementedError

    @hookimpl
    def registry_variants():
        requires = Requires(arch=("sm90",), dtypes=("float16",), head_dim=(64, 64), causal=True, layouts=("bhsd",))
        return [Variant("test.elsewhere", op="attention", run=run, builds=builds, requires=requires)]
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A plugin that other processes find too."""
    install_plugin(tmp_path, "warm_test_plugin", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WARM_TEST_PARENT", str(os.getpid()))
    from registry.dispatch.catalog import catalog

    monkeypatch.setattr(catalog, "_catalog", None)
    yield


@pytest.mark.slow(10)
def test_compilers_that_die_or_hang_cost_their_own_kernel_alone(plugin, cache):
    shapes = [
        "s=128,d=64,dtype=float16,causal",
        "s=256,d=64,dtype=float16",
        "s=512,d=64,dtype=float16",
        "s=64,d=64,dtype=float16",
    ]
    with registry.use("test.elsewhere"):
        died, hung, *fine = warm([f"attention {shape}" for shape in shapes], target=H100, jobs=2, timeout=10)
    assert "crashed: exit status 9" in died.error
    assert "no answer in 10 s" in hung.error
    assert [(one.kernels, one.error) for one in fine] == [(1, ""), (1, "")]
    assert len(_cubins(cache)) == 2
