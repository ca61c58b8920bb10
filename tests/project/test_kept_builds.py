"""What compilers made of our kernels is kept as data: what is known is not compiled, a few builds a session are."""

from __future__ import annotations

import json
from typing import Any

import compiled
import kept_builds
import pytest
import shared

KNOWN = {
    "readings": {"registers": "r1"},
    "builds": {f"3.6.0 sm90 kernel {n}": {"registers": 100 + n} for n in range(9)},
}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Asks for the registers of a build, with what a compiler would say; and the builds that were compiled."""
    monkeypatch.setattr(kept_builds, "FOLDER", tmp_path)
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    monkeypatch.setenv(kept_builds.SEED, "a day")
    monkeypatch.delenv(kept_builds.KEEPING, raising=False)
    (tmp_path / "ours.json").write_text(json.dumps(KNOWN))
    kept_builds._file.cache_clear()
    kept_builds._sample.cache_clear()
    compiled = []

    def ask(n: int, reading: str = "r1", makes: Any = None) -> Any:
        def find() -> Any:
            compiled.append(n)
            return 100 + n if makes is None else makes

        return kept_builds.answer("ours", f"3.6.0 sm90 kernel {n}", "registers", reading, find)

    ask.compiled = compiled  # type: ignore[attr-defined]
    yield ask
    kept_builds._file.cache_clear()
    kept_builds._sample.cache_clear()


def test_what_is_known_is_not_compiled_but_for_a_sample_that_differs_each_day(kept, monkeypatch):
    samples = []
    for day in ("a day", "another"):
        monkeypatch.setenv(kept_builds.SEED, day)
        kept_builds._sample.cache_clear()
        kept.compiled.clear()
        assert [kept(n) for n in range(9)] == [100 + n for n in range(9)]
        samples.append({*kept.compiled})
        assert len(samples[-1]) == kept_builds.SAMPLE
    assert samples[0] != samples[1] and not kept_builds.missing()


def test_a_file_that_is_wrong_fails_with_the_seed_that_found_it(kept):
    with pytest.raises(AssertionError, match=r"ours\.json says .* 10\d\. Compiled now it is 7\. .*a day.*make builds"):
        [kept(n, makes=7) for n in range(9)]


def test_a_new_build_and_a_new_reading_are_compiled_and_named(kept):
    assert kept(77) == 177 and kept(3, reading="r2", makes=5) == 5
    assert kept.compiled == [77, 3]
    assert kept_builds.missing() == {"3.6.0 sm90 kernel 77", "3.6.0 sm90 kernel 3"}


def test_what_is_written_is_what_was_asked(kept, monkeypatch):
    monkeypatch.setenv(kept_builds.KEEPING, "1")
    assert (kept(1), kept(55, makes=[1, 2])) == (101, [1, 2])
    assert kept.compiled == [55], "no proof of what is known while writing"
    (path,) = kept_builds.write()
    builds = {"3.6.0 sm90 kernel 1": {"registers": 101}, "3.6.0 sm90 kernel 55": {"registers": [1, 2]}}
    assert json.loads(path.read_text()) == {"readings": {"registers": "r1"}, "builds": builds}
    assert len(path.read_text().splitlines()) == 7, "a build a line"


def test_two_readings_of_one_name_are_refused(kept, monkeypatch):
    monkeypatch.setenv(kept_builds.KEEPING, "1")
    kept(1), kept(2, reading="r2")
    with pytest.raises(ValueError, match=r"ours: two readings are called registers"):
        kept_builds.write()


HELD = object()


def _held() -> object:
    return HELD


def test_what_a_reading_only_talks_of_is_no_part_of_its_hash():
    """As of HELD here, whose address differs from run to run."""

    def read() -> int:
        """HELD, and _held."""
        return len("HELD")

    def other() -> object:
        return [_held() for _ in "1"]

    read.__module__ = other.__module__ = _held.__module__
    assert len(compiled._source(read, {})) == 1
    assert len(compiled._source(other, {})) == 3


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in kept_builds.FOLDER.glob("*.json")) < 330_000
