"""What decisions ask of products' configs most often is worked out once, and is what it was for each problem."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton

from registry import Target
from registry.ops.grouped_mm.calls import GROUPED_MM
from registry.ops.known import op_named
from registry.plugins.gluon_grouped import _shared_memory
from registry.plugins.gluon_grouped import host as grouped
from registry.plugins.triton_matmul import host, tiles
from registry.plugins.triton_matmul.tiles import _PIPELINED, _SINGLES, _UNPIPELINED, ROUNDS, WIDE
from registry.tuning.grids import grid

H100 = Target.named("H100")


def fitting(problem, run):
    """The tiles that `_listed` considers, asked one by one."""
    m, n, k = problem.m, problem.n, problem.k
    rows, columns, depth = (max(16, triton.next_power_of_2(size)) for size in (m, n, k))
    largest = tiles._LARGEST // (2 if problem.layout[1] == "t" else 1)
    largest //= 2 if k % 64 or problem.activation or run < 16 else 1
    listed = () if run < WIDE or k <= 64 else _PIPELINED
    for x, y, block, warps, stages in listed + (() if listed and run > WIDE else _UNPIPELINED):
        if x > 2 * rows or y > 2 * columns or (x == 16 and m > 32) or (y == 16 and n > 16):
            continue
        if block > max(64, depth) or (stages > 1 and ((block > 64 and k % block) or x * y > largest)):
            continue
        if run < 4 and (x + y) * block > _SINGLES * warps:
            continue
        if x * y < 64 * 64 and -(-m // x) * -(-n // y) * problem.batch > ROUNDS * 132 and min(m, n) > 64:
            continue
        yield x, y, block, warps, stages


def test_tiles_that_fit_are_found_by_what_few_things_they_ask_of_sizes():
    draw = random.Random(5)
    around = [edge + off for edge in (16, 32, 64, 128, 256, 512) for off in (-1, 0, 1)]
    for _ in range(2000):
        m, n, k = (draw.choice([draw.randint(1, 300), draw.choice(around), 64 * draw.randint(1, 99)]) for _ in range(3))
        layout, activation = draw.choice(["nn", "nt"]), draw.choice(["", "gelu"])
        asked = SimpleNamespace(m=m, n=n, k=k, batch=draw.choice([1, 3]), layout=layout, activation=activation)
        asked.target = H100
        for run in (2, 4, 8, 16):
            assert [one[:5] for one in tiles._listed(asked, run) if one[5] == 1] == list(fitting(asked, run)), asked


def test_runs_are_those_that_a_launch_is_told():
    from registry.ops.matmul.calls import MATMUL, out_of

    for case in grid("matmul", "random:774:100"):
        problem = case.problem(H100)
        given = MATMUL.operands(problem)
        facts = host.memory_facts(given, out_of(problem, given))
        assert host.runs_of(given) == tuple(facts[name] for name in ("A_UNIT", "A_RUN", "B_UNIT", "B_RUN"))


@pytest.mark.parametrize("groups", [1, 2, 7, 8, 127, 128, 129, 255, 256, 1000])
def test_the_table_of_groups_is_a_power_of_two_with_room_for_one_more(groups):
    assert grouped.entries(groups) == max(triton.next_power_of_2(groups + 1), 128)


def test_memory_of_a_grouped_tile_is_that_of_its_switches():
    variant = op_named("grouped_mm").variants["gluon_grouped_ws"]
    for case in grid("grouped_mm", "random:775:60"):
        problem = case.problem(H100)
        for config in variant.configs_for(problem) if problem.form != "inner" else ():
            cfg = grouped.switches(problem, config, GROUPED_MM.operands(problem))
            size = 4 if problem.out_dtype == "float32" else 2
            buffers = 2 * cfg.STORES * cfg.GM * cfg.EN * size
            ring = cfg.STAGES * (config["BLOCK_M"] + config["BLOCK_N"]) * cfg.BK * 2
            assert _shared_memory(problem, config) == ring + buffers + 8 * cfg.EP + 16 * cfg.STAGES + 1024
