"""One Call record: what `prepare` launches, what `run` launches and what `builds` lists are the same."""

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
from launch_support import fake_gpu, needs_fake_cuda, scale, tensor

from registry.toolbox.builds import compile_build
from registry.toolbox.call import Call, Host, Interface, Kept, PerCall, Zeroes
from registry.toolbox.launch import StandIn

gpu = pytest.fixture(fake_gpu)
pytestmark = needs_fake_cuda
PROBLEM = SimpleNamespace(n=1000, bias=False, target="sm90")


def calls(problem, config, given, scale_of_call):
    """The kernel of the launcher's tests; another block for scales that are not positive."""
    x, block = given["x"], 128 if scale_of_call > 0 else 64
    y = given.get("bias") or StandIn((problem.n,), torch.float32, name="y")
    arguments = {"x": x, "y": y, "n": problem.n, "factor": PerCall("scale", 2.0)}
    return [Call(scale, (-(-problem.n // block),), arguments, {"BLOCK": block}, {"num_warps": config["warps"]})]


OP = Interface(
    tensors=("x",),
    optional=("bias",),
    scale=True,
    results=("y",),
    operands=lambda problem: {"x": StandIn((problem.n,), "float32", name="x")},
    problem_of=lambda *tensors, **given: PROBLEM,
    late=lambda problem: problem.bias,
)
HOST, CONFIG = Host(OP, calls), {"warps": 2}


def test_prepare_binds_once_and_allocates_each_time(gpu):
    gpu.expect("Q", "Q", "i", "f")
    launch = HOST.prepare(PROBLEM, CONFIG)
    x = tensor(1000)
    first, second = launch(x, scale=0.5), launch(x, scale=1.5)
    assert first.data_ptr() != second.data_ptr() and first.shape == (1000,)
    assert gpu.parameters == [x.data_ptr(), second.data_ptr(), 1000, 3.0]
    assert list(gpu.last.grid) == [8, 1, 1] and gpu.last.threads == 64


@pytest.mark.parametrize("factor", [-0.5, 0.0, float("nan")])
def test_a_scale_of_another_sign_gets_its_own_kernel(gpu, factor):
    gpu.expect("Q", "Q", "i", "f")
    launch = HOST.prepare(PROBLEM, CONFIG)
    for _ in range(2):
        launch(tensor(1000), scale=factor)
        assert list(gpu.last.grid) == [16, 1, 1]
        assert gpu.parameters[3] == 2 * factor or factor != factor
    launch(tensor(1000), scale=1.0)
    assert list(gpu.last.grid) == [8, 1, 1]


def test_what_a_problem_cannot_tell_is_bound_at_the_first_call(gpu):
    gpu.expect("Q", "Q", "i", "f")
    unasked = dataclasses.replace(OP, operands=None)
    launch = Host(unasked, calls).prepare(SimpleNamespace(n=1000, bias=True, target="sm90"), CONFIG)
    x, given = tensor(1000), tensor(1000)
    assert launch(x, scale=1.0, bias=given) is None  # the result was not among what is launched
    assert gpu.parameters[:2] == [x.data_ptr(), given.data_ptr()]


def test_builds_are_what_prepare_compiles(gpu):
    call = HOST.calls(PROBLEM, CONFIG, OP.operands(PROBLEM), 1.0)[0]
    (build,) = HOST.builds(PROBLEM, CONFIG)
    assert compile_build(build).hash == call.bind().compiled.hash


def test_run_passes_what_prepare_passes():
    """Through kernel[grid]: recorded here by a kernel that is none."""
    seen = []

    class Recorder:
        arg_names, __name__ = ("x", "y", "lse", "counters", "n", "factor", "BLOCK"), "recorder"

        def __getitem__(self, grid):
            return lambda **given: seen.append((grid, given))

    def recorded(problem, config, given, factor):
        y, unused = StandIn((3,), "float16", name="y"), StandIn((1,), "float32")
        arguments = {"x": given["x"], "y": y, "lse": unused, "counters": Zeroes(5), "n": 3, "factor": PerCall("scale")}
        return [Call(Recorder(), (7,), arguments, {"BLOCK": 8}, {"num_warps": 1})]

    x = torch.zeros(3)
    y = Host(OP, recorded).run(x, config={}, scale=0.25)
    ((grid, given),) = seen
    assert grid == (7,) and given["x"] is x and given["y"] is y and y.dtype == torch.float16
    assert given["lse"].data_ptr() == 0 and given["lse"].dtype == torch.float32
    assert given["counters"].tolist() == [0] * 5 and given["counters"].dtype == torch.int32
    assert (given["n"], given["factor"], given["BLOCK"], given["num_warps"]) == (3, 0.25, 8, 1)


def test_what_is_kept_is_found_again_by_each_call(gpu):
    gpu.expect("Q", "Q", "i", "f")
    kept, asked = tensor(1000), []

    def find(like):
        asked.append(like)
        return kept

    def with_kept(problem, config, given, factor):
        (call,) = calls(problem, config, given, factor)
        arguments = {**call.arguments, "y": Kept((1000,), "float32", "y", find)}
        return [dataclasses.replace(call, arguments=arguments)]

    launch = Host(OP, with_kept).prepare(PROBLEM, CONFIG)
    x = tensor(1000)
    assert launch(x, scale=1.0) is kept and launch(x, scale=2.0) is kept
    assert gpu.parameters[:2] == [x.data_ptr(), kept.data_ptr()] and len(asked) == 2 and asked[0] is x


def test_vectors_that_must_be_dense_are_copied_where_they_are_not(gpu):
    gpu.expect("Q", "Q", "i", "f")
    launch = Host(OP, calls, contiguous=("x",)).prepare(PROBLEM, CONFIG)
    x = torch.ones(1000, 2)[:, 0]
    launch(x, scale=1.0)
    assert gpu.parameters[0] != x.data_ptr()
