"""The kernel for few rows or columns compiled for GPUs that are not here: units of 16 bytes, whatever the pitch."""

from __future__ import annotations

import dataclasses

import pytest

from registry import Target
from registry.contract.problem import OperandFact
from registry.ops.matmul.problem import MatmulProblem

pytest.importorskip("triton")

from compiled import mentions, resources

from registry.plugins import triton_gemv

WITH_NEWEST_TRITON = r"whole_units"
(GEMV,) = triton_gemv.registry_variants()
GPUS = {"sm80": "A100", "sm90": "H200", "sm100": "B200"}


def problem(arch="sm90", m=1, n=4096, k=4096, **more):
    return MatmulProblem.of_shape(Target.named(GPUS[arch]), m=m, n=n, k=k, **more)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(
    "more",
    [
        {"layout": "nt"},
        {"layout": "nn"},
        {"layout": "nt", "k": 4097},
        {"layout": "nn", "n": 4097},
        {"m": 4, "layout": "nt"},
        {"m": 4, "n": 4097},
        {"m": 4097, "n": 2, "layout": "tn"},
        {"m": 2, "dtype": "float32", "ieee": True, "k": 4097, "layout": "nt"},
        {"m": 2, "dtype": "int8", "layout": "nt"},
    ],
)
def test_whole_units(arch, more):
    p = problem(arch, **more)
    assert not GEMV.reasons(p)
    (build,) = GEMV.builds(p, GEMV.legal_configs(p)[0])
    found = resources(build, p.target)
    assert not found.spills
    assert found.shared <= GEMV.requires.shared_memory(p, GEMV.legal_configs(p)[0])
    assert mentions(found, r"ld\.global\S*\.v4\.b32") >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_four_rows_do_not_spill(layout, dtype):
    p = problem(m=4, n=4097, k=4097, layout=layout, dtype=dtype)
    (build,) = GEMV.builds(p, GEMV.legal_configs(p)[0])
    assert not resources(build, p.target).spills


def test_a_build_serves_other_sizes():
    built = set()
    for m, n, k in ((3, 5120, 4096), (3, 6144, 8192), (3, 4096 + 8, 1024 + 8)):
        p = problem(m=m, n=n, k=k, layout="nt")
        config = dict(GEMV.legal_configs(p)[0], SPLIT=1)
        (build,) = GEMV.builds(p, {**config, "WIDTH": 4, "DEPTH": 1024, "num_warps": 4})
        built.add((tuple(build.constants.items()), tuple(build.alignment.items())))
    assert len(built) == 1


def test_more_rows_are_left_to_others():
    (reason,) = {str(reason): reason for reason in GEMV.reasons(problem(m=5, n=4096))}.values()
    assert reason.field == "m" and "4" in reason.allowed
    assert not GEMV.reasons(problem(m=4096, n=4))


@pytest.mark.parametrize("m, n", [(1, 17), (4, 4096), (4, 40000), (4096, 1)])
@pytest.mark.parametrize("letter", "nt")
@pytest.mark.parametrize("k", [16, 4095, 65536])
def test_configs(m, n, k, letter):
    """No range of K is empty, and no more tiles are counted than there are counters."""
    p = problem(m=m, n=n, k=k, layout=letter * 2)
    found = GEMV.configs_for(p)
    assert 1 <= len(found) <= 6 and len({tuple(config.items()) for config in found}) == len(found)
    for config in found:
        (call,) = triton_gemv.host.call(p, config, triton_gemv.MATMUL.operands(p), 1.0)
        assert config["SPLIT"] == 1 or call.grid[0] // config["SPLIT"] <= 1024


def test_of_an_odd_address():
    """What is read starts before the operand, in the same 16 bytes."""
    aligned = problem(n=64, k=64)
    b = OperandFact("b", "bfloat16", (64, 64), (64, 1), 2, 2)
    p = dataclasses.replace(aligned, operands=(aligned.operands[0], b))
    (build,) = GEMV.builds(p, GEMV.legal_configs(p)[0])
    assert build.constants["SHIFT"] and not GEMV.builds(aligned, GEMV.legal_configs(p)[0])[0].constants["SHIFT"]
