"""Trying out, by a clock that is none: made-up variants say how long they take."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from tried_out import picked, qkv

import registry
from registry import InvalidArgument, notices, trying, warming
from registry.cli import OK, USAGE, main
from registry.dispatch import plan
from registry.dispatch import tried as dispatch_tried
from registry.dispatch.contenders import contenders
from registry.dispatch.scope import EMPTY
from registry.errors import KernelDoesNotFit
from registry.ops.parts.cases import Case


@pytest.mark.usefixtures("three")
def test_the_fastest_runs_from_the_first_call_on_and_after_the_block(clock):
    q, k, v = qkv()
    assert picked(q, k, v) == "test.a"
    with registry.try_out(3) as found, registry.record() as ran:
        out = registry.attention(q, k, v)
        assert clock.ran[-1][0] == "test.b"  # what the caller is given
        began = len(clock.ran)
        registry.attention(q, k, v)
        assert clock.ran[began:] == [("test.b", None)]  # once is enough
    assert torch.allclose(out, registry.attention.reference(q, k, v, dtype=torch.float32), atol=1e-5)
    assert ran.counts == {"attention": {"test.b": 2}}
    assert picked(q, k, v) == "test.b" and [one.variant for one in found.found[0].timed] == [
        "test.b",
        "test.c",
        "test.a",
    ]
    decision = registry.attention.explain(q, k, v)
    assert "tried out in this process: 10.0 us (test.c 20.0; test.a 30.0)" in decision.because
    assert [c.variant for c in decision.candidates[:3]] == ["test.b", "test.c", "test.a"]
    assert "10.0 us  test.b" in str(found) and found.seconds > 0


@pytest.mark.usefixtures("three")
def test_it_holds_for_problems_that_tables_do_not_tell_apart_and_for_no_others():
    with registry.try_out():
        registry.attention(*qkv(200))
    assert picked(*qkv(200)) == picked(*qkv(201)) == "test.b"
    assert picked(*qkv(400)) == "test.a"


@pytest.mark.usefixtures("three")
def test_a_length_that_grows_is_decided_by_what_was_tried_out():
    with registry.try_out():
        registry.attention(*qkv(200))
    with registry.record() as ran:
        for s in range(198, 206):
            registry.attention(*qkv(s))
    assert ran.counts == {"attention": {"test.b": 8}}


@pytest.mark.usefixtures("three")
def test_plans_made_before_are_made_again():
    tensors = qkv()
    registry.attention(*tensors)
    with registry.try_out():
        registry.attention(*tensors)
    with registry.record() as ran:
        registry.attention(*tensors)
    assert ran.counts == {"attention": {"test.b": 1}}


@pytest.mark.usefixtures("three")
def test_what_was_asked_for_is_not_tried_out(clock):
    tensors = qkv()
    with registry.try_out() as found:
        registry.attention(*tensors, variant="test.a")
        with registry.use("test.c"):
            registry.attention(*tensors)
        with registry.prefer("test.c"):
            registry.attention(*tensors)
    assert clock.ran == [("test.a", None), ("test.c", None), ("test.c", None)] and not found.found
    assert str(found) == "nothing was tried out"


def test_a_variant_in_the_place_of_another_is_not_chosen_by_its_time(three, clock, declare):
    with registry.try_out(3):
        registry.attention(*qkv())
    assert picked() == "test.b"
    registry.unregister("test.b")
    declare("test.b", run=clock.takes("test.b", 40), lse=True)
    assert picked() == "test.a"
    with registry.try_out(3):
        registry.attention(*qkv())
    assert picked() == "test.c"


@pytest.mark.usefixtures("three")
def test_a_call_with_a_schedule_is_not_tried_out(clock):
    """That is of one variant, and others of its step share it."""
    problem, found = registry.attention.problem_of(*qkv())[0], trying.TryOuts(3)
    found.trial(problem, EMPTY, pytest.fail)(qkv(), {"schedule": object()})
    assert not found.found and not clock.ran


@pytest.mark.usefixtures("three")
def test_nothing_is_tried_out_in_a_capture(monkeypatch, clock):
    monkeypatch.setattr(plan, "capturing", lambda: True)
    with registry.try_out() as found:
        registry.attention(*qkv())
    assert clock.ran == [("test.a", None)] and not found.found


@pytest.mark.usefixtures("three")
def test_a_preference_beats_what_was_tried_out():
    with registry.try_out():
        registry.attention(*qkv())
    with registry.prefer("test.c"):
        assert picked() == "test.c"


@pytest.mark.usefixtures("three")
def test_so_many_are_kept_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr(dispatch_tried, "MOST", 2)
    with registry.try_out():
        for s in (8, 64, 512):
            registry.attention(*qkv(s))
    assert [picked(*qkv(s)) for s in (8, 64, 512)] == ["test.a", "test.b", "test.b"]


@pytest.mark.usefixtures("three")
def test_forgetting_brings_the_tables_back():
    with registry.try_out() as found:
        registry.attention(*qkv())
    found.forget()
    assert picked() == "test.a"


@pytest.mark.parametrize("error", [KernelDoesNotFit("too wide"), RuntimeError("no such engine")])
def test_a_contender_that_fails_is_out_of_it(declare, clock, ranked, error):
    declare("test.a", run=clock.takes("test.a", 30))
    declare("test.b", run=clock.takes("test.b", 10, fails=error))
    declare("test.c", run=clock.takes("test.c", 20))
    ranked("test.a", "test.b", "test.c")
    with registry.try_out() as found:
        registry.attention(*qkv())
    assert [one.variant for one in found.found[0].timed][:2] == ["test.c", "test.a"] and picked() == "test.c"
    assert any("test.b" in text for text in notices.counts())


def spoilt(how):
    """What the right results become."""
    return {
        "not a number": lambda out: out.index_fill(2, torch.tensor([3]), torch.nan),
        "of another shape": lambda out: out[:, :1],
        "of another dtype": lambda out: out.double(),
        "a tenth too large": lambda out: 1.1 * out,
    }[how]


@pytest.mark.parametrize("how", ["not a number", "of another shape", "of another dtype", "a tenth too large"])
def test_a_contender_with_other_results_than_the_tables_choice_is_out_of_it(declare, clock, ranked, how):
    right = clock.takes("test.b", 10)

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return spoilt(how)(out), lse

    declare("test.a", run=clock.takes("test.a", 30), lse=True)
    declare("test.b", run=wrong, lse=True)
    declare("test.c", run=clock.takes("test.c", 20), lse=True)
    ranked("test.a", "test.b", "test.c")
    q, k, v = qkv()
    expected = registry.attention.reference(q, k, v)
    with registry.try_out() as found:
        torch.testing.assert_close(registry.attention(q, k, v).double(), expected, rtol=1e-4, atol=1e-5)
    assert [one.variant for one in found.found[0].timed][:2] == ["test.c", "test.a"]
    assert any("test.b is not tried out" in text for text in notices.counts())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bfloat16])
def test_results_of_any_dtype_can_be_compared(dtype):
    told, other = torch.arange(-8, 8).to(dtype), torch.arange(8, -8, -1).to(dtype)
    assert trying._other(told.clone(), told) == "" and "off" in trying._other(other, told)


@pytest.mark.usefixtures("three")
def test_where_nothing_can_be_timed_the_tables_choose(monkeypatch):
    def no_clock(device):
        raise RuntimeError("no events here")

    monkeypatch.setattr(trying, "_timer", no_clock)
    with registry.try_out() as found:
        assert registry.attention(*qkv()).isfinite().all()
    assert not found.found and picked() == "test.a"
    assert any("no events here" in text for text in notices.counts())


def test_configs_are_tried_out_too_and_noise_changes_nothing(declare, clock, ranked):
    took = {1: 20.0, 2: 19.9, 3: 25.0}
    declare("test.a", run=clock.takes("test.a", lambda config: took[config["B"]]), configs=[{"B": b} for b in took])
    ranked("test.a")
    with registry.try_out():
        registry.attention(*qkv())
    assert registry.attention.explain(*qkv()).config == {"B": 1}
    took[2] = 15.0
    with registry.try_out():
        registry.attention(*qkv(300))
    assert registry.attention.explain(*qkv(300)).config == {"B": 2}


@pytest.mark.usefixtures("three")
def test_an_outer_block_has_what_the_inner_ones_found():
    with registry.try_out() as outer:
        registry.attention(*qkv())
        with registry.try_out(3) as inner:
            registry.attention(*qkv(300))
    assert [one.problem.seqlen_q for one in outer.found] == [8, 300] and outer.found[1:] == inner.found
    assert outer.seconds > inner.seconds > 0


@pytest.mark.usefixtures("three")
def test_a_block_that_has_ended_is_told_nothing_more():
    first, second = registry.try_out(), registry.try_out()
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    registry.attention(*qkv())
    second.__exit__(None, None, None)
    assert not outer.found and len(inner.found) == 1


def test_contenders_are_those_that_tables_expect_near_the_best():
    H200 = registry.Target.named("H200")
    near = contenders(Case.parse("matmul", "m=77,n=3000,k=3000,layout=nt").problem(H200), EMPTY, 4)
    assert len(near) == 4 and near[0].behind == 0.0
    assert [one.behind for one in near[1:]] == sorted(one.behind for one in near[1:])
    assert len({one.variant.name for one in near}) > 1  # not all are configs of one
    measured = Case.parse("matmul", "m=4096,n=4096,k=4096").problem(H200)
    assert contenders(measured, EMPTY, 4) == []  # nothing to find out
    alone = Case.parse("attention", "b=1,hq=2,s=8,d=16,dtype=float64").problem(registry.Target.named("cpu"))
    assert len(contenders(alone, EMPTY, 4)) <= 2


@pytest.mark.usefixtures("three")
def test_gradients_are_tried_out(clock):
    q, k, v = (x.requires_grad_() for x in qkv())
    with registry.try_out():
        registry.attention(q, k, v).sum().backward()
    assert clock.ran[-1][0] == "test.b" and q.grad is not None


@pytest.mark.usefixtures("three")
def test_threads_of_one_block_try_out_one_after_the_other():
    with registry.try_out() as found:
        context = contextvars.copy_context
        threads = [
            threading.Thread(target=context().run, args=(registry.attention, *qkv(8 * n))) for n in (1, 4, 16, 64)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found.found) == 4 and all(one.timed[0].variant == "test.b" for one in found.found)


@pytest.mark.parametrize("most", [1, 33, "4", 2.5, True, None])
def test_a_number_that_is_none_is_refused(most):
    with pytest.raises(InvalidArgument, match="most"), registry.try_out(most):
        pass


def test_inside_of_a_compiled_function_it_is_refused():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v):
        with registry.try_out():
            return registry.attention(q, k, v)

    with pytest.raises(Exception, match="try_out"):
        compiled(*qkv())


@pytest.mark.usefixtures("three")
def test_copies_have_the_same_values_and_strides():
    whole = torch.randn(2, 8, 3, 16)
    view, wide = whole[:, :, 1].transpose(0, 1), torch.ones(1).expand(5)
    sets = trying._rotated((view,), {"scale": 2.0, "bias": wide, "none": None}, 4 * view.numel() * 4)
    assert len(sets) == 4
    for (copy,), named in sets[1:]:
        assert torch.equal(copy, view) and copy.stride() == view.stride() and copy.data_ptr() != view.data_ptr()
        assert named["scale"] == 2.0 and named["none"] is None and named["bias"].stride() == (0,)


@pytest.mark.usefixtures("three")
def test_compiled_functions_try_out_inside_of_the_block_and_run_what_was_found_after_it():
    compiled = torch.compile(lambda q, k, v: registry.attention(q, k, v) + 1, backend="eager", fullgraph=True)
    tensors = qkv()
    compiled(*tensors)  # settled before the block
    with registry.try_out() as found:
        compiled(*tensors)
    assert len(found.found) == 1
    with registry.record() as ran:
        compiled(*tensors)
    assert ran.counts == {"attention": {"test.b": 1}}


@pytest.mark.usefixtures("three")
def test_gradients_have_variants_of_their_own(declare, clock, ranked):
    def backward(name, us):
        def run(grad_out, q, k, v, out, lse, *, scale, config, **features):
            clock.ran.append((name, None))
            clock.now += 1000 * us
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                result = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=scale)
            return torch.autograd.grad(result, inputs, grad_out)

        return run

    for name, us in (("test.slow_backward", 30), ("test.quick_backward", 10)):
        declare(name, op="attention_backward", run=backward(name, us), lse=True)
    ranked("test.slow_backward", "test.quick_backward", op="attention_backward")
    q, k, v = (x.requires_grad_() for x in qkv())
    with registry.try_out(3) as found:
        registry.attention(q, k, v).sum().backward()
    assert {one.problem.op: one.timed[0].variant for one in found.found}["attention_backward"] == "test.quick_backward"
    assert clock.ran[-1][0] == "test.quick_backward" and q.grad is not None


@pytest.mark.usefixtures("three")
def test_kreg_warm_tries_out_and_writes_what_it_found(monkeypatch, tmp_path, capsys):
    shape = ["warm", "attention", "b=1,hq=2,s=8,d=16,dtype=float32", "--try-out", str(tmp_path / "saved")]
    if not torch.cuda.is_available():
        assert main(shape) != OK and "no GPU" in capsys.readouterr().err
    assert main([*shape, "--variant", "torch_math"]) == USAGE and "--variant" in capsys.readouterr().err

    def warm(cases, **options):
        registry.attention(*qkv())
        return [warming.Warmed(case.text, "test.b") for case in cases]

    monkeypatch.setattr(warming, "warm", warm)
    assert main(shape) == OK
    said = capsys.readouterr().out
    assert "10.0 us  test.b" in said and "attention.cpu.yaml" in said
    assert (tmp_path / "saved" / "attention.cpu.yaml").is_file()
