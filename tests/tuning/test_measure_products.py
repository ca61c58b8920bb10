"""benchmarks/measure_products.py without a GPU: its cells, what it finds of one, and that whoever fails is named."""

from __future__ import annotations

import collections
import math

import measure_products
import pytest
import torch

from registry.ops.parts.cases import Case
from registry.tuning.timing import Timing


class Clock:
    """Runs each launch; says that each contestant takes a microsecond more than the one met before it."""

    def __init__(self):
        self.met = []

    def sample(self, launches, settle_ms, measure_ms):
        for launch in launches:
            launch()
        if launches not in self.met:
            self.met.append(launches)
        return Timing(1e-3 * (1 + self.met.index(launches)), 0.0, 0.0, 1, {"sm_mhz": 1500, "watts": 600})

    def forget(self):
        pass


def test_every_beginning_of_the_cells_is_a_fair_sample():
    cells = measure_products.cells()
    assert len(cells) == len({case.text for _, case in cells})
    rows = [case.sizes["m"] for kind, case in cells if kind == "rows"]
    assert set(collections.Counter(rows).values()) == {len(measure_products.PROJECTIONS)}
    assert min(rows[:20]) == 129 and {kind for kind, _ in cells} == set(measure_products.OURS)


def test_each_peer_kernel_is_compiled_by_one_child():
    found = measure_products.cells()
    work = [one for share in measure_products.peer_kernels(found, 3) for one in share]
    shapes = [*measure_products.QUACK, *measure_products.QUACK_FEW]
    assert sorted(map(str, (shape for what, shape in work if what == "quack"))) == sorted(map(str, shapes))
    assert len([1 for what, _ in work if what == ""]) == len([1 for kind, _ in found if kind != "fp8"])


@pytest.fixture
def peers(monkeypatch):
    def wrong(a, b):
        return torch.matmul(a, b) * 1.5

    def absent(a, b):
        raise ImportError("no quack")

    found = [("cuBLAS", torch.matmul), ("DeepGEMM", wrong), ("quack c256x192/21", absent)]
    monkeypatch.setattr(measure_products, "peers", lambda *cell: found)
    monkeypatch.setitem(measure_products.OURS, "rows", {})


@pytest.mark.usefixtures("peers")
def test_a_cell(monkeypatch):
    said = []
    case = Case.of("matmul", m=7, n=24, k=64, layout="nt", dtype="float32")
    cell = measure_products.measure("rows", case, Clock(), lambda *told: said.append(told), "cpu")
    assert set(cell["us"]) == {"ours", "cuBLAS"} and sorted(cell["us"].values()) == [1.0, 2.0]
    assert cell["mhz_watts"] == {"ours": [1500, 600], "cuBLAS": [1500, 600]} and cell["errors"]["ours"] < 1e-3
    assert [tag for tag, _ in said] == ["DeepGEMM", "quack c256x192/21"] and "ImportError" in said[1][1]
    assert measure_products.ratio(cell, "cuBLAS") in (0.5, 2.0) and math.isnan(measure_products.ratio(cell, "quack"))
    assert [line.split("|")[0].split() for line in measure_products.table([cell])[1:]] == [
        ["rows", "all", "1"],
        ["rows", "7", "1"],
    ]
