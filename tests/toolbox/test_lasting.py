"""Memory that is kept comes from a thread of its own: a compiler's graphs have a pool for what the caller allocates."""

from __future__ import annotations

import threading

import pytest
import torch

from registry.toolbox.complaints import Complaint
from registry.toolbox.counters import ZeroRows
from registry.toolbox.lasting import lasting_zeros


@pytest.fixture
def threads(monkeypatch):
    """Those that zeroes were made on."""
    found, zeros = [], torch.zeros

    def noted(*shape, **how):
        found.append(threading.get_ident())
        return zeros(*shape, **how)

    monkeypatch.setattr(torch, "zeros", noted)
    return found


def test_it_is_made_elsewhere(threads):
    assert lasting_zeros(2, 3, device="cpu").tolist() == [[0] * 3] * 2
    assert Complaint("tests", ["never"]).word(torch.device("cpu")).tolist() == [0]
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_what_fails_there_is_raised_here():
    with pytest.raises(RuntimeError, match="negative"):
        lasting_zeros(-1, device="cpu")


def test_rows_of_counters_are_made_elsewhere_and_in_blocks(threads, monkeypatch):
    state = {"stream": 0}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
    monkeypatch.setattr(ZeroRows, "FOR_CAPTURES", 3 * 8 * 4)
    rows, taken = ZeroRows("cpu", 8), []
    for stream in range(ZeroRows.STREAMS + 1):
        state["stream"] = stream
        taken += [rows.take().data_ptr() for _ in range(ZeroRows.PER_STREAM)]
    assert len(set(taken)) == len(taken), "no row is that of two streams"
    assert len(threads) == 3 and threading.get_ident() not in threads, "for captures, and for 16 streams at a time"
