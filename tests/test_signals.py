"""What the handler of a signal raises goes on to who called, whatever it interrupts, and nothing is kept of it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import registry
from registry import signals
from registry.dispatch.discovery import PluginFailed, contained

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has hardly any signals")


class Late(Exception):
    """A timeout, as a server's handler raises it."""


def raises(number, frame, kind=Late):
    raise kind


class Handler:
    def __call__(self, number, frame):
        raise Late

    def method(self, number, frame):
        raise Late


def caught_of(call):
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def send():
    os.kill(os.getpid(), signal.SIGALRM)
    for _ in range(100):  # Python runs handlers between two steps of its own
        time.sleep(0)


@pytest.fixture
def handled(request):
    before = signal.signal(signal.SIGALRM, getattr(request, "param", raises))
    yield
    signal.signal(signal.SIGALRM, before)


HANDLERS = [raises, functools.partial(raises, kind=SystemExit), Handler(), Handler().method, lambda *_: sys.exit(3)]


@pytest.mark.parametrize("handled", HANDLERS, indirect=True)
@pytest.mark.usefixtures("handled")
def test_what_a_handler_raises_is_told_from_what_code_raises():
    assert signals.interrupts(caught_of(send))
    assert signals.interrupts(KeyboardInterrupt())
    assert not signals.interrupts(caught_of(lambda: sys.exit(3)))
    assert not signals.interrupts(caught_of(lambda: 1 / 0))


@pytest.mark.usefixtures("handled")
def test_what_was_made_of_it_on_its_way_is_told_too():
    def wrapped():
        try:
            send()
        except Late:
            raise ImportError("half made")  # noqa: B904 - as careless code does it

    assert signals.interrupts(caught_of(wrapped))


@pytest.mark.usefixtures("handled")
def test_a_plugin_is_not_blamed_for_a_signal():
    with pytest.raises(Late), contained():
        send()
    with pytest.raises(PluginFailed), contained():
        sys.exit(0)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("part", ["rule", "configs", "never"])
def test_a_declaration_that_is_interrupted_is_asked_again(declare, part):
    sent = []

    def interrupted(*_):
        if not sent:
            sent.append(1)
            send()
        return [{}] if part == "configs" else False if part == "never" else ()

    declare("test.a", op="matmul", run=lambda a, b, *, config: a @ b, layouts=("nn",), **{part: interrupted})
    a = torch.ones(4, 4)
    with registry.prefer("test.a"):
        with pytest.raises(Late):
            registry.matmul(a, a)
        with registry.record() as ran:
            registry.matmul(a, a)
    assert ran.counts == {"matmul": {"test.a": 1}}


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_end_of_the_block_and_not_a_second_time():
    ended = []
    with signals.held_back() as held:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        ended.append(len(held))
    assert ended == [1]
    with pytest.raises(KeyboardInterrupt), signals.held_back():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_other_threads_hold_nothing_back():
    def elsewhere():
        with signals.held_back():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


SCRIPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch, registry
from registry.dispatch import discovery
q, load = torch.randn(1, 2, 16, 32), discovery._loaders
def pressed():
    os.kill(os.getpid(), signal.SIGINT)
    return load()
discovery._loaders = pressed
try:
    registry.attention(q, q, q)
except KeyboardInterrupt:
    print("interrupted")
discovery._loaders = None
registry.attention(q, q, q)
print(len(registry.variants()) > 40)
"""


def test_plugins_are_loaded_to_the_end_where_ctrl_c_is_pressed_meanwhile():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["interrupted", "True"], done.stderr
