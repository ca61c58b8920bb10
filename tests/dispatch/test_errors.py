"""Errors cross process boundaries; choices survive variants that are taken back meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest
import torch
from made_up import math_run
from races import in_threads

import registry
from registry import errors
from registry.testing.repeated import switching_often


def raised(call, *args, **kwargs):
    with pytest.raises(errors.RegistryError) as caught:
        call(*args, **kwargs)
    return caught.value


def every_error():
    q = torch.randn(1, 1, 8, 16)
    q8 = q.to(torch.float8_e4m3fn)
    yield errors.UnknownOp("x", ["y"])
    yield errors.DuplicateVariant("a", "b", "c")
    yield errors.DeviceComplaint(["one", "another"])
    yield errors.TableError("file", 3, "rules[0]", "bad", "code")
    yield from (kind("text") for kind in (errors.DeclarationError, errors.KernelDoesNotFit, errors.CaptureError))
    yield raised(registry.attention, q, q, q, causal="x")
    yield raised(registry.attention, q, q, q, variant="nothing")
    yield raised(registry.attention, q, q, q, variant="torch_flash")
    yield raised(registry.attention, q8, q8, q8)


def test_errors_can_be_pickled():
    """multiprocessing.Pool hangs on a result that does not unpickle."""
    kinds = set()
    for error in every_error():
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
        kinds.add(type(error))
    assert kinds == {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RegistryError)
    } - {errors.RegistryError}


def test_a_name_that_is_nearly_right_is_pointed_out():
    q = torch.randn(1, 1, 8, 16)
    said = str(raised(registry.attention, q, q, q, variant="torch_mth"))
    assert said.startswith("no variant 'torch_mth' of op 'attention'; did you mean torch_math")
    with pytest.raises(errors.UnknownVariant, match="no variant 'gluon_fa4' of any op; did you mean gluon_fa3"):
        registry.prefer(["gluon_fa4"]).__enter__()
    with pytest.raises(errors.UnknownVariant, match="no variant None of any op; known"):
        registry.use(None).__enter__()  # type: ignore[arg-type]


def test_what_is_no_variant_and_no_target_is_said():
    q = torch.randn(1, 1, 8, 16)
    assert str(raised(registry.register, print)).startswith(
        "variant: got <built-in function print>; allowed: a Variant("
    )
    for op, given in ((registry.attention, (q, q, q)), (registry.matmul, (q, q.mT))):
        said = str(raised(op.explain, *given, target="H100"))
        assert said == "target: got 'H100'; allowed: None or a Target, such as Target.named(\"H100\")"
        problem = op.explain(*given).problem
        assert str(raised(op.explain, problem, target="H100")) == said
    assert str(raised(registry.Target.named, None)).startswith("target: got None; allowed: A10")


def exceptions():
    """Every exception class of the package."""
    found = []
    for module in pkgutil.walk_packages(registry.__path__, "registry."):
        if module.name.startswith("registry.plugins") or module.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # of what is not installed here: triton, matplotlib, transformers
            found += vars(importlib.import_module(module.name)).values()
    return {kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)}


def test_no_exception_of_the_package_is_lost_on_its_way():
    """One that takes more than a message is Portable."""
    ours = [kind for kind in exceptions() if kind.__module__.startswith("registry.")]
    assert len(ours) > 15
    for kind in ours:
        if not issubclass(kind, errors.Portable):
            back = pickle.loads(pickle.dumps(kind("text")))
            assert type(back) is kind and str(back) == "text"


def test_a_variant_that_is_taken_back_meanwhile_is_no_key_error():
    requires = registry.Requires(
        arch=("cpu",), dtypes=("float32",), head_dim=(1, 64), layouts=("bhsd",), softcap=True, ieee=True
    )
    variant = registry.Variant("test.churn", op="attention", run=math_run, requires=requires)

    def churn():
        registry.register(variant)
        registry.unregister("test.churn")

    def call(_):
        for length in range(1, 120):
            q = torch.randn(1, 1, length, 8)
            with registry.prefer("torch_math"):
                registry.attention(q, q, q, softcap=3.0)
            registry.attention(q, q, q, softcap=3.0)

    with switching_often():
        in_threads(call, 3, meanwhile=churn)


def test_a_choice_of_a_variant_that_is_gone_is_made_again(declare, monkeypatch):
    from registry.ops import op as module

    declare("test.gone", arch=("cpu",), softcap=True)
    decide, decisions = module.decide, []

    def taken_back(problem, scope):
        decisions.append(decide(problem, scope))
        registry.unregister("test.gone")
        return decisions[-1]

    monkeypatch.setattr(module, "decide", taken_back)
    q = torch.randn(1, 1, 8, 16)
    with registry.prefer("test.gone"), registry.record() as recorder:
        registry.attention(q, q, q)
    assert [decision.variant for decision in decisions] == ["test.gone", "torch_cpu"]
    assert recorder.counts == {"attention": {"torch_cpu": 1}}


def test_a_plan_made_while_plans_were_forgotten_is_not_kept(declare):
    """Here its own rule changes the variants: the plan answers this call and no other."""
    declare("test.other")

    def rule(problem, config):
        if "test.other" in registry.attention.variants:
            registry.unregister("test.other")
        return []

    declare("test.ruled", rule=rule)
    q = torch.randn(1, 1, 8, 16)
    with registry.use("test.ruled"):
        registry.attention(q, q, q)
    assert len(registry.attention.plans) == 0


@pytest.mark.slow(2, together="inductor")
@pytest.mark.parametrize(
    ("call", "argument", "allowed"),
    [
        (lambda q: registry.attention(q, q, q, softcap=-1.0), "softcap", "0.0 (off)"),
        (lambda q: registry.matmul(q[0, 0], q[0, 0].t(), activation="tanh"), "activation", "relu"),
        (lambda q: registry.attention(q, q, q[:, :, 1:]), "v", "k's length 8"),
    ],
    ids=["softcap", "activation", "v"],
)
def test_the_error_of_a_whole_graph_shows_the_argument(call, argument, allowed):
    with pytest.raises(Exception) as caught:
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(1, 1, 8, 16))
    assert f"InvalidArgument({argument!r}, " in str(caught.value) and allowed in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda out, lse: out, "Tensor"),
        (lambda out, lse: None, "NoneType"),
        (lambda out, lse: (), "0 results"),
        (lambda out, lse: (out,), "1 results"),
        (lambda out, lse: (out, lse, out), "3 results"),
    ],
    ids=["bare", "None", "()", "one", "three"],
)
def test_results_of_another_form_are_refused(declare, returned, got):
    """A tensor of a batch of two would else be taken apart into two results."""
    declare(run=lambda *args, **more: returned(*math_run(*args, **more)))
    q = torch.ones(2, 2, 4, 8)
    for _ in range(2):
        with pytest.raises(registry.RegistryError, match=rf"test\.kernel returned {got}; allowed: \(out, lse\)"):
            registry.attention(q, q, q, variant="test.kernel")


@pytest.mark.parametrize("ours", [lambda out, lse: (out.to("meta"), lse), lambda out, lse: (out, lse.to("meta"))])
def test_results_on_another_device_are_refused(declare, ours):
    declare(run=lambda *args, **more: ours(*math_run(*args, **more)))
    q = torch.ones(2, 2, 4, 8)
    with pytest.raises(registry.RegistryError, match="returned a tensor on meta; allowed: on cpu, for attention"):
        registry.attention(q, q, q, variant="test.kernel")


def test_an_out_that_is_passed_over_is_refused(declare):
    declare(run=lambda a, b, *, config, out: a @ b, op="matmul", layouts=("nn",), out=True)
    a = torch.ones(4, 4)
    with pytest.raises(registry.RegistryError, match="returned another tensor than out; allowed: out, which it claims"):
        registry.matmul(a, a, out=torch.empty(4, 4), variant="test.kernel")


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda out, lse: (out[:1], lse), r"out of \(1, 2, 4, 8\) in float32; allowed: \(2, 2, 4, 8\) in float32"),
        (lambda out, lse: (out.mT, lse), r"out of \(2, 2, 8, 4\) in float32; allowed: \(2, 2, 4, 8\) in float32"),
        (lambda out, lse: (out.double(), lse), r"out of \(2, 2, 4, 8\) in float64; allowed: \(2, 2, 4, 8\) in float32"),
        (lambda out, lse: (out, out), r"lse of \(2, 2, 4, 8\) in float32; allowed: \(2, 2, 4\) in float32"),
    ],
    ids=["fewer", "shape", "dtype", "lse"],
)
def test_results_of_another_shape_or_dtype_are_refused_at_the_first_launch(declare, returned, got):
    declare(run=lambda *args, **more: returned(*math_run(*args, **more)))
    q = torch.ones(2, 2, 4, 8)
    with pytest.raises(registry.RegistryError, match=rf"test\.kernel returned {got}"):
        registry.attention(q, q, q, variant="test.kernel")


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda out, lse: (None, lse), "None for out"),
        (lambda out, lse: (out, None), "None for lse"),
        (lambda out, lse: (out.numpy(), lse), "ndarray for out"),
        (lambda out, lse: (out, lse.tolist()), "list for lse"),
    ],
    ids=["None", "lse", "numpy", "list"],
)
def test_a_result_that_was_asked_for_is_a_tensor(declare, returned, got):
    declare(run=lambda *args, **more: returned(*math_run(*args, **more)), lse=True)
    q = torch.ones(2, 2, 4, 8)
    for _ in range(2):
        with pytest.raises(registry.RegistryError, match=rf"test\.kernel returned {got}; allowed: a tensor, for atten"):
            registry.attention(q, q, q, return_lse=True, variant="test.kernel")


def test_a_result_that_nobody_asked_for_may_be_none(declare):
    declare(run=lambda *args, **more: (math_run(*args, **more)[0], None))
    q = torch.ones(2, 2, 4, 8)
    assert registry.attention(q, q, q, variant="test.kernel").shape == q.shape


def test_a_gradient_is_a_tensor(declare):
    declare(op="attention_backward", run=lambda grad_out, q, k, v, out, lse, **more: (None, k, v), lse=True)
    q = torch.ones(2, 2, 4, 8, requires_grad=True)
    with registry.use("test.kernel"), pytest.raises(registry.RegistryError, match=r"kernel returned None for dq; allo"):
        registry.attention(q, q, q).sum().backward()


@pytest.mark.parametrize(
    ("returned", "got"), [(lambda out: None, "None"), (lambda out: out.numpy(), "ndarray")], ids=["None", "numpy"]
)
def test_a_product_is_a_tensor(declare, returned, got):
    declare("test.product", op="matmul", run=lambda a, b, **_: returned(a @ b), layouts=("nn",))
    with pytest.raises(registry.RegistryError, match=rf"test\.product returned {got} for out; allowed: a tensor"):
        registry.matmul(torch.ones(2, 2), torch.ones(2, 2), variant="test.product")


def test_a_tuple_of_one_is_no_product(declare):
    declare("test.product", op="matmul", run=lambda a, b, **_: (a @ b,), layouts=("nn",))
    with pytest.raises(registry.RegistryError, match=r"test\.product returned 1 results; allowed: out"):
        registry.matmul(torch.ones(2, 2), torch.ones(2, 2), variant="test.product")


def test_half_a_product_is_none(declare):
    declare("test.product", op="matmul", run=lambda a, b, **_: (a @ b)[:1], layouts=("nn",))
    with pytest.raises(
        registry.RegistryError, match=r"returned out of \(1, 2\) in float32; allowed: \(2, 2\) in float32"
    ):
        registry.matmul(torch.ones(2, 2), torch.ones(2, 2), variant="test.product")


def test_a_product_has_the_shape_of_its_rows_and_columns(declare):
    declare("test.product", op="matmul", run=lambda a, b, **_: (a @ b).mT, layouts=("nn",))
    with pytest.raises(registry.RegistryError, match=r"returned out of \(3, 2\) in float32; allowed: \(2, 3\)"):
        registry.matmul(torch.ones(2, 2), torch.ones(2, 3), variant="test.product")
    run = lambda a, b, **_: (a @ b).flatten(0, 1)  # noqa: E731
    declare("test.groups", op="grouped_mm", run=run, forms=("batch",), layouts=("nn",))
    with pytest.raises(registry.RegistryError, match=r"returned out of \(8, 3\) in float32; allowed: \(4, 2, 3\)"):
        registry.grouped_mm(torch.ones(4, 2, 2), torch.ones(4, 2, 3), variant="test.groups")


def test_a_prepare_that_gives_nothing_to_call_names_its_variant():
    requires = registry.Requires(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True)
    for given in (None, 3):
        variant = registry.Variant(
            "test.unprepared",
            op="matmul",
            run=lambda a, b, *, config: a @ b,
            requires=requires,
            prepare=lambda *_, given=given: given,
        )
        registry.register(variant)
        try:
            said = str(raised(registry.matmul, torch.ones(2, 3), torch.ones(3, 2), variant="test.unprepared"))
        finally:
            registry.unregister("test.unprepared")
        assert said == f"test.unprepared: prepare gave {given}; allowed: a launch, which can be called"


@pytest.mark.parametrize("level, said", [("WARNING", 1), ("ERROR", 0)])
@pytest.mark.usefixtures("quick_python")
def test_a_plain_script_shows_a_notice_once_and_may_turn_it_off(level, said):
    script = f"""
import logging, torch, registry
logging.getLogger("registry").setLevel("{level}")
q = torch.randn(1, 2, 8, 16)
for _ in range(2):
    with registry.prefer("gluon_fa3"):
        registry.attention(q, q, q)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr.count("preferred gluon_fa3 is illegal") == said and not done.stdout
