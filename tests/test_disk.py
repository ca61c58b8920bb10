"""Files that are replaced whole, and what nothing takes the place of."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

import registry
from registry.disk import make_folder, no_folder, write_atomic
from registry.errors import InvalidArgument
from registry.ops.parts.cases import from_file, save_recorded
from registry.tables.schema import write_schema


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


@pytest.fixture
def full_disk(monkeypatch):
    """Fills the disk when it is called."""

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(os, "fsync", full)


def test_a_full_disk_leaves_what_was_recorded_before(tmp_path, monkeypatch, full_disk):
    with registry.record() as ran:
        registry.matmul(torch.ones(2, 3), torch.ones(3, 2))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_recorded(ran.problems, "~/served.json") == 1
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        save_recorded([*ran.problems] * 2, tmp_path / "served.json")
    assert len(from_file("matmul", tmp_path / "served.json")) == 1 and os.listdir(tmp_path) == ["served.json"]


def test_a_full_disk_leaves_the_schema_that_was_there(tmp_path, full_disk):
    (tmp_path / "table.schema.json").write_text("{}")
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        write_schema(tmp_path)
    assert (tmp_path / "table.schema.json").read_text() == "{}" and os.listdir(tmp_path) == ["table.schema.json"]


@pytest.mark.parametrize("name", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_errors_name_the_file_that_was_asked_for(tmp_path, monkeypatch, name):
    """Those of the system name the file beside it that takes its place, or none."""

    def refused(*where, **how):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / ".page.html.x8d7.tmp"))

    monkeypatch.setattr(name, refused)
    with pytest.raises(PermissionError) as caught:
        write_atomic(tmp_path / "page.html", "text")
    assert caught.value.filename == str(tmp_path / "page.html") and os.listdir(tmp_path) == []


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        write_atomic(tmp_path, "text")
    assert caught.value.filename == str(tmp_path) and os.listdir(tmp_path) == []


def test_a_block_is_recorded_as_its_problems_are(tmp_path):
    with registry.record() as ran:
        registry.matmul(torch.ones(2, 3), torch.ones(3, 2))
    for what in (ran, ran.problems, list(ran.problems)):
        assert save_recorded(what, tmp_path / "ran.json") == 1
        assert len(from_file("matmul", tmp_path / "ran.json")) == 1


@pytest.mark.parametrize("what", [None, 3, "matmul m=4", [3], [None]], ids=str)
def test_what_is_no_problem_is_not_recorded(tmp_path, what):
    with pytest.raises(InvalidArgument, match=r"^problems: got .*; allowed: a record\(\) block, or a list of Problems"):
        save_recorded(what, tmp_path / "ran.json")
    with pytest.raises(InvalidArgument, match="^path: got ''; allowed: the path of a file"):
        save_recorded([], "")
    assert os.listdir(tmp_path) == []


def _places(tmp_path):
    """Of each kind of place whether a folder can be there."""
    (tmp_path / "file").write_text("")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "led").symlink_to(tmp_path)
    yield tmp_path, True
    yield tmp_path / "not" / "made" / "yet", True
    yield tmp_path / "led" / "below", True
    yield tmp_path / "file", False
    yield tmp_path / "file" / "below" / "it", False
    yield tmp_path / "lost", False
    yield tmp_path / "lost" / "below", False
    yield tmp_path / ("x" * 300), False
    yield Path("/dev/null"), False


def test_a_folder_that_cannot_be_is_told_before_it_is_made(tmp_path):
    for place, can_be in _places(tmp_path):
        assert (no_folder(place) == "") == can_be, place
        assert place == tmp_path or not os.path.isdir(place), "nothing is made"
        if can_be:
            make_folder(place)
        else:
            with pytest.raises(OSError):
                make_folder(place)


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path, monkeypatch):
    """By what the system says: a superuser, as whom tests may run, may write everywhere."""
    monkeypatch.setattr(os, "access", lambda place, how: False)
    assert no_folder(tmp_path / "below") == f"{tmp_path} may not be written to"
