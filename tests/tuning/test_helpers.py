"""Trees that several processes fit are those that one fits."""

import pytest

from registry.tuning import helpers as sharing
from registry.tuning.boosting import Extent, boosted
from registry.tuning.helpers import Part, boosted_parts, helpers

PARTS = 3


@pytest.fixture
def parts():
    torch = pytest.importorskip("torch")
    points = torch.rand(200, 4, generator=torch.Generator().manual_seed(1)).double()
    told = torch.stack([points[:, 0] > 0.5, points[:, 1] * points[:, 2] > 0.2], 1).double()
    size, rows = Extent(trees=6, leaves=8, rate=0.3), torch.arange(160)
    grouped = [Part(points, told[:, :1], rows + seed, size, seed, rows // 4) for seed in range(PARTS - 1)]
    return [*grouped, Part(points, told, rows, size, 9)]


@pytest.fixture
def here(parts):
    return tuple(boosted(p.points[p.rows], p.told[p.rows], p.size, p.seed, p.group) for p in parts)


def test_the_trees_of_helpers_are_those_of_one_process(parts, here, monkeypatch):
    monkeypatch.setattr(sharing, "WORTH", 0)
    fitted_here = []
    monkeypatch.setattr(Part, "trees", lambda part: fitted_here.append(part))
    with helpers(2):
        assert boosted_parts(parts) == here
        assert boosted_parts(parts[:1]) == here[:1]  # processes that run already, and files of other names
    assert not fitted_here


def test_few_rows_start_no_process(parts, here, monkeypatch):
    monkeypatch.setattr(sharing, "Child", None)
    with helpers(2):
        assert boosted_parts(parts) == here


def test_without_helpers_trees_are_fitted_here(parts, here, monkeypatch):
    monkeypatch.setattr(sharing, "WORTH", 0)
    monkeypatch.setattr(sharing, "Child", None)
    assert boosted_parts(parts) == here
    with helpers(1):
        assert boosted_parts(parts) == here


def test_a_part_of_which_a_helper_dies_is_fitted_here(parts, here, monkeypatch):
    monkeypatch.setattr(sharing, "WORTH", 0)
    monkeypatch.setattr(sharing.CompilePool, "result", lambda *_: {"ok": False, "why": "crashed", "detail": "killed"})
    with helpers(2):
        assert boosted_parts(parts) == here


def test_where_there_is_no_room_for_files_trees_are_fitted_here(parts, here, monkeypatch):
    monkeypatch.setattr(sharing, "WORTH", 0)

    def no_room():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharing.tempfile, "TemporaryDirectory", no_room)
    with helpers(2):
        assert boosted_parts(parts) == here
