"""Drawn problems under torch's modes: what the oracle gives there, or a refusal; the same cold and warm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import CALLED, cases, close, outcome, same
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import registry
from registry.ops.known import op_named
from registry.ops.parts.workload import workload

Call = Callable[..., Any]


def under(context: Callable[[], Any]) -> Callable[[Call, dict[str, torch.Tensor]], Any]:
    def run(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
        with context():
            return call(**tensors)

    return run


def by_functorch(
    call: Call, tensors: dict[str, torch.Tensor], transform: Callable[[Call, list[torch.Tensor]], Any]
) -> Any:
    names = list(tensors)
    return transform(lambda *values: call(**dict(zip(names, values, strict=True))), list(tensors.values()))


def jvp(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
    def transform(function: Call, values: list[torch.Tensor]) -> Any:
        return torch.func.jvp(function, tuple(values), tuple(torch.ones_like(value) for value in values))

    return by_functorch(call, tensors, transform)


def vmap(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
    return by_functorch(call, tensors, lambda f, values: torch.func.vmap(f)(*(torch.stack([v, 2 * v]) for v in values)))


def gradients(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
    own = {name: value.detach().clone().requires_grad_() for name, value in tensors.items()}
    found = call(**own)
    first = found[0] if isinstance(found, tuple) else found
    return torch.autograd.grad(first.float().sum(), list(own.values()))


def fake(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
    with FakeTensorMode() as mode:
        found = call(**{name: mode.from_tensor(value) for name, value in tensors.items()})
    made = found if isinstance(found, tuple) else (found,)
    return [torch.zeros(one.shape, dtype=one.dtype) for one in made]


def deep_copied(call: Call, tensors: dict[str, torch.Tensor]) -> Any:
    return call(**copy.deepcopy(tensors))


MODES = {
    "no_grad": under(torch.no_grad),
    "inference_mode": under(torch.inference_mode),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "jvp": jvp,
    "vmap": vmap,
    "gradients": gradients,
    "fake": fake,
    "deepcopy": deep_copied,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", CALLED)
@given(data=st.data())
def test_modes_are_right_or_refused(op, mode, data):
    work = workload(data.draw(cases(op)), "cpu")
    asked = {name: value for name, value in work.front_door().items() if value is not None}
    tensors = {name: v for name, v in asked.items() if isinstance(v, torch.Tensor)}
    options = {name: v for name, v in asked.items() if name not in tensors}
    if mode in ("jvp", "vmap", "gradients") and not all(
        v.is_floating_point() and v.itemsize > 1 for v in tensors.values()
    ):
        return
    called = op_named(op)
    with work.settings():
        registry.forget_plans()
        cold = outcome(MODES[mode], lambda **t: called(**t, **options), tensors)
        outcome(called, **tensors, **options)
        warm = outcome(MODES[mode], lambda **t: called(**t, **options), tensors)
        assert same(cold, warm)
        if cold[0] == "gave":
            plain = {"autocast": "no_grad", "fake": "no_grad"}.get(mode, mode)
            options.pop("out_dtype", None)  # which is no part of a definition
            want = MODES[plain](lambda **t: called.reference(**t, **options), tensors)
            if mode == "fake":
                assert [one.shape for one in cold[1]] == [
                    one.shape for one in (want if isinstance(want, tuple) else [want])
                ]
            else:
                assert close(cold[1], want, 5e-2)
