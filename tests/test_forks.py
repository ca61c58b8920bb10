"""A process that is forked while other threads are in the midst of a call goes on by itself: nothing waits for them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from made_up import math_run

import registry
from registry import RegistryError, forks
from registry.dispatch import catalog as catalogs

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
HUNG = "it hung"


def in_child(call):
    """The exit status of a forked child that does this, 0 where nothing is raised; HUNG where it does not end."""
    child = os.fork()
    if not child:
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


class Midway:
    """A thread that does `call`, and stays where that comes by `here()`, until the block is left."""

    def __init__(self, call):
        self.thread = threading.Thread(target=call, args=(self.here,), daemon=True)
        self.reached, self.go, self.parent = threading.Event(), threading.Event(), os.getpid()

    def here(self):
        if threading.current_thread() is self.thread and os.getpid() == self.parent:
            self.reached.set()
            assert self.go.wait(60)

    def __enter__(self):
        self.thread.start()
        assert self.reached.wait(60)
        return self

    def __exit__(self, *_):
        self.go.set()
        self.thread.join(60)


def test_no_lock_is_held_in_the_child_by_a_thread_that_is_not_there():
    known = [forks.new_lock(), *forks._locks]

    def hold(here):
        for lock in known:
            lock.acquire()
        here()
        for lock in reversed(known):
            lock.release()

    def take():
        for lock in known:
            assert lock.acquire(timeout=5)

    with Midway(hold):
        assert in_child(take) == 0


def test_what_the_forking_thread_holds_it_releases_itself():
    lock = forks.new_lock()

    def leave():
        assert lock._is_owned()
        lock.release()
        assert not lock._is_owned()

    with lock:
        assert in_child(leave) == 0


@pytest.mark.parametrize("midway", ["a decision", "a first launch"])
def test_a_call_in_the_child(midway, monkeypatch):
    a, b, plans = torch.ones(3, 4), torch.ones(4, 5), registry.matmul.plans
    make, at = plans._make, []

    def making(*given):
        if midway == "a decision":
            at[0]()
        return make(*given)

    def run(a, b, *, config):
        if midway == "a first launch":
            at[0]()
        return a @ b

    def call(here):
        at.append(here)
        registry.matmul(a, b, variant="test.waits")

    def again():
        assert torch.equal(registry.matmul(a, b, variant="test.waits"), a @ b)

    requires = registry.Requires(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True)
    registry.register(registry.Variant("test.waits", op="matmul", run=run, requires=requires))
    monkeypatch.setattr(plans, "_make", making)
    try:
        with Midway(call):
            assert in_child(again) == 0
        assert len(plans)  # what the parent had is still there
    finally:
        registry.unregister("test.waits")


def test_a_cache_that_was_being_cleared_is_empty_in_the_child():
    """Or the child would run what the parent has just taken back."""
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    registry.matmul(a, b)

    def look():
        assert not len(registry.matmul.plans)
        registry.matmul(a, b)

    assert in_child(look) == 0
    assert len(registry.matmul.plans)


def test_plugins_that_were_being_loaded_are_an_error_and_no_deadlock(monkeypatch):
    lazy, at = catalogs._Lazy(), []
    monkeypatch.setattr(forks, "_calls", [*forks._calls, lazy.in_child])
    monkeypatch.setattr(catalogs, "discover", lambda _: (at[0](), catalogs.Catalog())[1])

    def load(here):
        at.append(here)
        lazy.get()

    def ask():
        with pytest.raises(RegistryError, match=r"forked while another thread was loading plugins.*before the fork"):
            lazy.get()
        requires = registry.Requires(arch=("cpu",), dtypes=("float32",), layouts=("bhsd",))
        variant = registry.Variant("test.late", op="attention", run=math_run, requires=requires)
        with pytest.raises(RegistryError, match="forked"):
            lazy.register(variant, "a test")

    with Midway(load):
        assert in_child(ask) == 0
    assert lazy.get() is not None
    assert in_child(lazy.get) == 0  # who forks later has them


def test_there_are_no_other_locks():
    """But those of plans, which a child forgets: one more object for each would be felt in new shapes."""
    package = Path(registry.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"threading\.R?Lock\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"forks.py", "dispatch/plan.py"}
