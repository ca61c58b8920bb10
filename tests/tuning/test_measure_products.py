"""benchmarks/measure_products.py without a GPU: its cells, what it says of one, and that whoever fails is named."""

from __future__ import annotations

import collections
import textwrap

import measure_products
import product_cells
from results_files import lines

from registry import Target


def test_every_beginning_of_the_cells_is_a_fair_sample():
    found = product_cells.cells()
    sets = [names for names, *_ in measure_products.SETTINGS]
    assert sorted(name for names in sets for name in names) == sorted(found)
    many, few = (measure_products.in_order(found, names) for names in sets)
    assert len([*many, *few]) == len({case.text for case in [*many, *few]}) == sum(map(len, found.values()))
    rows = [case.sizes["m"] for case in found["rows"]]
    assert set(collections.Counter(rows).values()) == {len(product_cells.PROJECTIONS)}
    assert min(rows[:20]) == 129 and few[len(rows) // 2] == found["drawn"][0]
    assert all(case.sizes["m"] >= measure_products.MANY for case in many)


def test_peers_take_part_where_they_can(monkeypatch):
    """quack in two configs where there are few tiles and in eight elsewhere; sizes are compiled in for many rows."""
    monkeypatch.setattr(measure_products, "SITE", "somewhere")
    monkeypatch.setattr(measure_products, "use_site", lambda: None)
    variants = {variant.name: variant for variant in measure_products.registry_variants()}
    for name, cases in product_cells.cells().items():
        for case in cases:
            problem = case.problem(Target.named("H200"))
            legal = {n: [] if v.reasons(problem) else v.legal_configs(problem) for n, v in variants.items()}
            quack = len(legal["peer.quack_coop"]) + len(legal["peer.quack_pingpong"])
            assert len(legal["peer.dispatched"]) == 1
            assert quack == {"fp8": 0, "rows": 2, "drawn": 2, "skinny": 2}.get(name, 8), case.text
            assert len(legal["peer.deepgemm"]) == (0 if name == "fp8" else 1 if case.sizes["m"] < 512 else 2)


def test_cells_of_many_rows_and_of_few(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        textwrap.dedent("""
        import registry
        def wrong(a, b, *, config):
            return (a @ b) * 1.5
        def absent(a, b, *, config):
            raise ImportError("no quack")
        def registry_variants():
            plain = registry.Requires(arch=("any",), dtypes=("bfloat16",), layouts=("nt",))
            made = {"peer.deepgemm": wrong, "peer.quack_coop": absent}
            return [registry.Variant(name, op="matmul", run=run, requires=plain) for name, run in made.items()]
        """)
    )
    of = measure_products.Case.of
    found = {"rows": [of("matmul", m=7, n=24, k=64, layout="nt")], "large": [of("matmul", m=9, n=8, k=64, layout="nt")]}
    plugins = [measure_products.__file__, str(wrong)]
    said = measure_products.measure(found, tmp_path / "cells.jsonl", 60.0, "cpu", plugins=plugins)
    by_name = {line.split(" | ")[0]: line for line in said}
    for name in ("rows", "... 7 rows", "large"):
        assert by_name[name].count("(1)") == 4, "over cuBLAS, which is all peers that are right"
    failed = [line for line in said if line.startswith("failed: ")]
    assert len(failed) == 4 and sum("peer.deepgemm" in line and "error" in line for line in failed) == 2
    assert sum("peer.quack_coop" in line and "no quack" in line for line in failed) == 2
    assert said[-1] == "not reached: 0"


def test_all_sweeps_of_a_cell_on_the_newest_device_count(tmp_path):
    cell, device = "m=8192,n=8192,k=8192,layout=nt", {"device": "NVIDIA A100"}
    for name, ours, machine in (("1", 0.1, device), ("2", 0.5, {}), ("10", 1.0, {}), ("new", 1.25, {})):
        times = {"torch_matmul": [({}, [9.0, 1.0, 1.0])], "gluon_matmul_pairs": [({"PAIR": 1}, [1.0, ours, ours])]}
        written = lines("matmul", {cell: times}, mode="graph", **machine)
        (tmp_path / f"product_cells_{name}.jsonl").write_text("\n".join(written), encoding="utf-8")
    (row,) = [line for line in product_cells.product_cells(tmp_path).splitlines() if line.startswith("| large")]
    assert row.split(" | ")[5] == "1.000 / 1.000 (1)", "in the median of 2, 2, 1, 1, 0.8, 0.8; first rounds are cool"
