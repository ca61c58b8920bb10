"""Decisions of many threads at once, and launches on another device than the current one."""

from __future__ import annotations

import contextlib

import torch
from made_up import math_run
from races import in_threads

import registry
from registry.dispatch.plan import on_its_device
from registry.testing.repeated import switching_often


def test_many_threads_dispatch_register_and_force_at_once(declare):
    """A stress: plans made and forgotten, variants coming and going, scopes open, all at the same time."""
    declare("test.a", run=lambda q, k, v, **_: (q + 1, None))
    declare("test.b", run=lambda q, k, v, **_: (q + 2, None))

    def caller(seed):
        for round_ in range(60):
            q = torch.zeros(1, 1, 1 + (seed + round_) % 7, 16)
            name, add = (("test.a", 1), ("test.b", 2))[(seed + round_) % 2]
            with registry.use(name), registry.record() as recorder:
                assert torch.all(registry.attention(q, q, q) == add)
                assert recorder.counts == {"attention": {name: 1}}
            assert registry.attention(q + 0.5, q, q, variant="torch_math").shape == q.shape

    def churn():
        registry.forget_plans()
        requires = registry.Requires(arch=("sm90",))
        registry.register(registry.Variant("test.churn", op="attention", run=math_run, requires=requires))
        registry.unregister("test.churn")

    with switching_often():
        in_threads(caller, 8, meanwhile=churn)


def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch):
    entered = []

    class There:
        def __init__(self, index):
            self.index = index

        def get_device(self):
            return self.index

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = on_its_device(lambda tensor, scale: (tensor.index, scale))
    assert [launch(There(i), scale=2.0) for i in (0, 1, -1)] == [(0, 2.0), (1, 2.0), (-1, 2.0)]
    assert entered == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert on_its_device(launch) is launch
