"""Launches that may overlap never share zeroes: by streams and captures that are not there."""

import torch

from registry.toolbox.counters import ZeroRows, graphs_are_gone, zeroes


def test_launches_that_may_overlap_never_share_a_row(monkeypatch):
    state = {"stream": 1, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ZeroRows, "FOR_CAPTURES", 3 * 8 * 4)
    rows = ZeroRows("cpu", 8)

    state["capturing"] = True
    assert rows.take().shape == (8,), "a capture before anything else zeroes its own"
    taken = {}
    for stream, capturing in ((1, False), (2, False), (1, True)):
        state.update(stream=stream, capturing=capturing)
        taken[stream, capturing] = [rows.take() for _ in range(ZeroRows.PER_STREAM + 2)]
    assert all(row.shape == (8,) and not row.any() for found in taken.values() for row in found)
    places = {key: [row.data_ptr() for row in found] for key, found in taken.items()}
    for stream in (1, 2):
        found = places[stream, False]
        assert len(set(found)) == ZeroRows.PER_STREAM and found[0] == found[-2], "taken in turn"
    assert len(set(places[1, True])) == len(places[1, True]), "a captured launch's row is nobody else's"
    assert not set(places[1, False]) & set(places[2, False])
    assert not set(places[1, True]) & (set(places[1, False]) | set(places[2, False]))


def test_rows_of_graphs_that_are_gone_are_given_again(monkeypatch):
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ZeroRows, "FOR_CAPTURES", 3 * 8 * 4)
    zeroes.cache_clear()
    rows = zeroes("cpu", 8)
    assert zeroes("cpu", 8) is rows
    rows.take()

    state["capturing"] = True
    before = [rows.take() for _ in range(5)]
    before[0][0] = 1  # what a kernel leaves that was not right
    graphs_are_gone()
    again = [rows.take() for _ in range(3)]
    assert [row.data_ptr() for row in again] == [row.data_ptr() for row in before[:3]]
    assert not any(row.any() for row in again)
    zeroes.cache_clear()
