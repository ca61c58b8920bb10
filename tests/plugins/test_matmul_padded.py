"""gluon_matmul_padded without a GPU: what it copies and where to, and how its copies read and write."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

from compiled import mentions, resources
from products import product

from registry.ops.matmul.calls import MATMUL
from registry.plugins.gluon_matmul_ws import registry_variants
from registry.plugins.gluon_matmul_ws.padded import call

WITH_NEWEST_TRITON = "units_as_wide"
VARIANT = registry_variants()[1]


def calls(problem):
    return call(problem, VARIANT.configs(problem)[0], MATMUL.operands(problem), 1.0)


def strides(call, name):
    return call.operands()[name].strides


@pytest.mark.parametrize(
    ("shape", "copies"),
    [
        ({"m": 300, "n": 500, "k": 281}, {"made": (320, 1), "made_2": (320, 1)[::-1]}),
        ({"m": 300, "n": 501, "k": 280, "layout": "nn"}, {"made": (512, 1)}),  # of b alone
        ({"m": 301, "n": 504, "k": 280, "layout": "tn"}, {"made": (1, 320)}),  # of a alone
        ({"m": 300, "n": 500, "k": 21}, {"made": (24, 1), "made_2": (1, 24)}),  # short rows
        ({"m": 30, "n": 50, "k": 281, "b": 3}, {"made": (9600, 320, 1), "made_2": (16000, 1, 320)}),
        ({"m": 1, "n": 500, "k": 281}, {"made": (1, 320)}),  # one row has no distance
    ],
)
def test_what_is_copied_lies_where_a_tensor_map_reaches_it(shape, copies):
    problem = product(**shape)
    copying, multiplying = calls(problem)
    made = {name: strides(copying, name) for name in ("made", "made_2") if copying.operands()[name].name}
    assert made == copies
    for name in ("a_desc", "b0_desc"):
        assert all(stride % 8 == 0 for stride in multiplying.arguments[name].strides[:-1])
    assert copying.grid[1] == problem.batch


def test_one_matrix_for_all_of_a_batch_is_copied_once():
    problem = product(30, 50, 281, b=3)
    a, b = problem.operands
    shared = dataclasses.replace(b, strides=(0, *b.strides[1:]))
    copying, _ = calls(dataclasses.replace(problem, operands=(a, shared)))
    assert strides(copying, "made_2") == (0, 1, 320) and copying.arguments["entries_2"] == 1


def test_a_base_off_by_an_element_is_copied():
    problem = product(300, 504, 280)
    a, b = problem.operands
    off = dataclasses.replace(problem, operands=(dataclasses.replace(a, base_alignment=2), b))
    assert not VARIANT.reasons(off) and not list(VARIANT.requires.rule(off, VARIANT.configs(off)[0]))
    copying, _ = calls(off)
    assert copying.operands()["source"].name == "a" and not copying.operands()["source_2"].name


@pytest.mark.parametrize(
    "more", [{"n": 504, "k": 280}, {"k": 281, "dtype": "float32"}, {"k": 281, "dtype": "int8"}, {"k": 281, "b": 65_536}]
)
def test_what_is_refused(more):
    problem = product(**{"m": 300, "n": 500, **more})
    assert VARIANT.reasons(problem) or list(VARIANT.requires.rule(problem, VARIANT.configs(problem)[0]))


@pytest.mark.parametrize(
    ("k", "reads"), [(281, r"ld\.global\.b16"), (282, r"ld\.global\.b32"), (284, r"ld\.global\.v2\.b32")]
)
def test_copies_read_in_units_as_wide_as_distances_allow_and_write_16_bytes(k, reads):
    problem = product(300, 500, k)
    copying, _ = VARIANT.builds(problem, VARIANT.configs(problem)[0])
    found = resources(copying, problem.target)
    wide = 64 * 64 // 128 * 2 // 16  # of a lane, in units of 16 bytes
    assert mentions(found, r"st\.global\.v4\.b32") >= wide and mentions(found, reads) and not found.spills
