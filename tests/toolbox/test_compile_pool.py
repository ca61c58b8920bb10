"""A pool of compilers: what goes first, what is there, and that it ends."""

import threading
import time

import pytest

from registry.toolbox.compile_pool import CompilePool, WorkerDied


class Steps:
    """As Child: notes what it is asked, and answers each when it is let."""

    def __init__(self):
        self.asked, self.let, self.dead = [], threading.Semaphore(0), threading.Event()

    def ask(self, command, timeout):
        self.asked.append(command["n"])
        while not self.let.acquire(timeout=0.01):
            if self.dead.is_set():
                raise WorkerDied("crashed", "killed")
        if command["n"] == 13:
            raise WorkerDied("hung", "for long")
        return {"ok": True, "n": command["n"]}

    def kill(self):
        self.dead.set()

    def stop(self):
        pass


def begun(child, count):
    deadline = time.monotonic() + 10
    while len(child.asked) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return child.asked


@pytest.fixture
def child():
    return Steps()


@pytest.fixture
def pool(child):
    with CompilePool(lambda: child, 1) as made:
        yield made


def test_what_is_wanted_goes_ahead_of_what_is_queued(pool, child):
    pool.submit({n: {"n": n} for n in range(6)})
    begun(child, 1)
    pool.first([4, 2, 4, 0, "unknown"])
    child.let.release(6)
    assert begun(child, 6) == [0, 4, 2, 1, 3, 5]


def test_answers_are_heard_once_and_waited_for_together(pool, child):
    pool.submit({n: {"n": n} for n in (1, 13, 2)})
    assert pool.ready("nobody asked") and not pool.ready(1) and pool.news() == {} and pool.result(1, 0.0) is None
    child.let.release(2)
    pool.wait([13, 2])
    assert pool.ready(1) and pool.ready(13) and not pool.ready(2)
    assert pool.news() == {1: {"ok": True, "n": 1}, 13: {"ok": False, "why": "compiler hung", "detail": "for long"}}
    begin = time.monotonic()
    pool.wait([2], 0.02)
    assert 0.02 <= time.monotonic() - begin < 5 and pool.news() == {}
    child.let.release()
    assert pool.result(2) == {"ok": True, "n": 2} and list(pool.news()) == [2]


def test_a_pool_that_is_stopped_leaves_nobody_waiting(child):
    pool = CompilePool(lambda: child, 1)
    pool.submit({n: {"n": n} for n in range(3)})
    begun(child, 1)
    waits = threading.Thread(target=pool.wait, args=([2],))
    waits.start()
    pool.stop()
    waits.join(10)
    assert not waits.is_alive() and pool.result(2) is None and child.asked == [0]
