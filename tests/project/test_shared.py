"""What test sessions and their processes share: answers found once, and those of a compiler, kept for a while."""

from __future__ import annotations

import os
import time

import pytest
import shared


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "KEPT", tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.parametrize("way", [shared.once, shared.kept])
def test_a_question_is_answered_once(way, folder, tmp_path, monkeypatch):
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    asked = []

    def answer():
        asked.append(1)
        return b"42" * 999

    assert way("what is it?", answer) == way("what is it?", answer) == b"42" * 999
    assert len(asked) == 1
    assert way("and this?", lambda: b"other") == b"other"
    monkeypatch.delenv(shared.FOLDER)
    assert way("what is it?", answer) and len(asked) == 2, "a script is no session"


def test_an_answer_outlives_its_session_until_nobody_asks(folder, monkeypatch):
    environment = {}
    end = shared.begin(environment)
    monkeypatch.setenv(shared.FOLDER, environment[shared.FOLDER])
    shared.kept("old", lambda: b"old")
    shared.kept("new", lambda: b"new")
    end()
    assert shared.FOLDER not in environment and len(list(folder.glob("*[0-9a-f]"))) >= 2
    long_ago = time.time() - (shared.KEPT_DAYS + 1) * 86400
    for path in folder.glob("*"):
        if path.is_file() and path.suffix != ".lock" and shared.zlib.decompress(path.read_bytes()) == b"old":
            os.utime(path, (long_ago, long_ago))
    end = shared.begin(environment)
    monkeypatch.setenv(shared.FOLDER, environment[shared.FOLDER])
    assert shared.kept("new", lambda: b"made again") == b"new"
    assert shared.kept("old", lambda: b"made again") == b"made again"
    end()


def test_a_tree_that_cannot_be_written_keeps_nothing(folder, tmp_path, monkeypatch):
    folder.write_text("no folder")
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    assert shared.kept("this", lambda: b"found") == b"found"
