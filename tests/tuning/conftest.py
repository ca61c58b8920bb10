"""Sweeps load their plugins into this process as well, as `kreg tune` does into its own, which ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def plugins_go() -> Iterator[None]:
    """Variants that misbehave on purpose are gone after the module: the next try_out would launch one that exits."""
    from made_up import taken_back

    with taken_back():
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what this user has tuned."""
    from registry.dispatch import in_force

    monkeypatch.setenv(in_force.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"
