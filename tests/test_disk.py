"""Files that are replaced whole, and what nothing takes the place of."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

import registry
from registry.disk import write_atomic
from registry.ops.parts.cases import from_file, save_recorded


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """So is a device: as a superuser, `kreg report RESULTS -o /dev/null` had put a page in its place."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomic(pipe, "a page")
    reader.join(20)
    assert read == ["a page"] and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):
        write_atomic(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert os.listdir(target.parent) == ["target"]


def test_a_full_disk_leaves_what_was_recorded_before(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with registry.record() as ran:
        registry.matmul(torch.ones(2, 3), torch.ones(3, 2))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_recorded(ran.problems, "~/served.json") == 1
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_recorded([*ran.problems] * 2, tmp_path / "served.json")
    assert len(from_file("matmul", tmp_path / "served.json")) == 1 and os.listdir(tmp_path) == ["served.json"]
