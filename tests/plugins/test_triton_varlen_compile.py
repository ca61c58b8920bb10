"""triton_varlen without a GPU: what the compiler makes of its configs on the families of GPUs that it claims.

Registers, spills, shared memory within what is declared, tensor-core instructions not serialised, and pipelines that
hold as many stages as they should.
"""

from __future__ import annotations

import dataclasses

import pytest

from registry import Target, variants
from registry.dispatch.select import decide
from registry.ops.attention_varlen.problem import VarlenBackwardProblem, VarlenProblem
from registry.ops.parts.memory import conditions

triton = pytest.importorskip("triton")

from compiled import hot_loops, instructions, loop_spills, lost_addresses, matrix_units, mentions, resources  # noqa: E402

WITH_NEWEST_TRITON = r"on_hopper.*128|elsewhere.*sm80|leave_the_pipeline.*16-"
PREFILL, SPLIT, BACKWARD = "triton_varlen", "triton_varlen_split", "triton_varlen_backward"
TRAINING = dict(b=4, hq=16, hkv=4, sq=1024, sk=1024, causal=True, lse=True)
DECODE = dict(b=4, hq=32, hkv=8, sq=1, sk=4096, kv="paged")


def problem(name, arch="sm90", **sizes):
    made = VarlenBackwardProblem if name == BACKWARD else VarlenProblem
    return made.of_shape(Target.named(arch), **{**(DECODE if name == SPLIT else TRAINING), **sizes})


def built(name, p, config=None):
    """What the compiler makes of each kernel of a config; the first legal one unless told."""
    variant = variants()[name]
    config = variant.legal_configs(p)[0] if config is None else config
    with conditions(ieee=p.ieee):
        found = [resources(build, p.target) for build in variant.builds(p, config)]
    assert max(one.shared for one in found) <= variant.requires.shared_memory(p, config), [one.shared for one in found]
    return found


def check(found):
    """No spills inside loops, few outside (ptxas parks what it needs later), no wgmma one after the other."""
    for one in found:
        assert not one.spills or not loop_spills(one), f"{one.name} spills in its loop"
        assert one.spills <= 384, f"{one.name} spills {one.spills} bytes"
        assert not any("C75" in line for line in one.ptxas_warnings), f"{one.name}: wgmma serialised"


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", [PREFILL, SPLIT, BACKWARD])
def test_first_configs_on_hopper(name, d):
    found = built(name, problem(name, d=d))
    check(found)
    unit = "mma" if name == SPLIT else "wgmma"  # 16 rows are too few for wgmma
    assert all(unit in matrix_units(one) for one in found)


@pytest.mark.parametrize(
    "name, arch, d",
    [
        (PREFILL, "sm80", 128),
        (SPLIT, "sm80", 128),
        (BACKWARD, "sm80", 64),
        (SPLIT, "sm89", 64),
        (PREFILL, "sm100", 128),
    ],
)
def test_first_configs_elsewhere(name, arch, d):
    found = built(name, problem(name, arch, d=d))
    check(found)
    assert all(("tcgen05" if arch == "sm100" else "mma") in matrix_units(one) for one in found)


@pytest.mark.parametrize(
    "page, kv_dtype",
    [(1, None), (16, None), (64, None), (1, "float8_e4m3fn"), (16, "float8_e4m3fn"), (16, "int8"), (64, "int8")],
)
def test_pages_leave_the_pipeline_to_keys_and_values(page, kv_dtype):
    """Looking pages up takes no stage; and all bytes come by cp.async of 16."""
    p = problem(SPLIT, page=page, kv_dtype=kv_dtype)
    config = variants()[SPLIT].legal_configs(p)[0]
    (one,) = built(SPLIT, p, config)
    check([one])
    itemsize = 1 if kv_dtype else 2
    assert one.shared >= (config["num_stages"] - 1) * config["BLOCK_N"] * 2 * 128 * itemsize
    assert instructions(one)["cp.async"] and not mentions(one, r"cp\.async\.ca")


@pytest.mark.parametrize("sizes", [dict(), dict(b=64, hq=64), dict(kv_dtype="float8_e4m3fn")], ids=str)
def test_no_more_programs_fit_an_sm_than_are_launched_for_it(sizes):
    """Where three fit and two an SM are launched, some SMs get three and others one: 134 us became 164."""
    p = problem(SPLIT, **sizes)
    config = variants()[SPLIT].legal_configs(p)[0]
    (one,) = built(SPLIT, p, config)
    fit = 65536 // (-(-one.registers // 8) * 8 * 32 * config["num_warps"])
    assert fit == config["PER_SM"], one.registers


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_8_bit_values_are_not_read_byte_by_byte(kv_dtype):
    (one,) = built(SPLIT, problem(SPLIT, kv_dtype=kv_dtype))
    loop = hot_loops(one)[0]
    assert loop.counts["LDSM"] >= 8 and loop.counts["LDS"] < 40
    assert not loop.counts.get("F2F") and not loop.counts.get("I2F"), "conversions that run at a sixteenth of the rate"


QUANTISED = dict(kv="paged", page=256, kv_dtype="int8", scales="head", lse=False)
FP8 = dict(kv_dtype="float8_e4m3fn", causal=False)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the fault was looked at with one Triton's ptxas")
@pytest.mark.parametrize(
    "dtype, d, dv, tile, features",
    [
        ("float16", 64, 24, (64, 64, 4, 3), dict(**FP8, kv="packed", window=(40, -1), softcap=30.0)),
        ("bfloat16", 64, 64, (64, 64, 4, 1), dict(window=(33, 0), causal=True, alibi=True)),
        ("bfloat16", 64, 64, (128, 64, 4, 3), dict(window=(33, 0), causal=True, alibi=True, sinks=True)),
        (
            "float16",
            256,
            40,
            (128, 64, 8, 2),
            dict(kv="packed", hq=6, hkv=2, window=(0, 0), softcap=30.0, alibi=True, lse=True),
        ),
        ("float16", 128, 128, (64, 64, 4, 3), dict(causal=True)),
    ],
)
def test_products_of_8_bit_values_read_addresses_that_they_were_written_to(dtype, d, dv, tile, features):
    """ptxas 12.8 drops the address of V's tile where K and V share a buffer and V's swizzle is narrower than K's."""
    p = problem(PREFILL, dtype=dtype, d=d, dv=dv, **QUANTISED | features)
    config = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), tile, strict=True))
    assert config in variants()[PREFILL].configs_for(p)
    (one,) = built(PREFILL, p, config)
    assert one.counts["HGMMA"] and not lost_addresses(one)


CROWDED = dict(window=(255, 127), causal=False, softcap=30.0, sinks=True, alibi=True)


@pytest.mark.parametrize(
    "name, features",
    [
        (PREFILL, dict(kv="paged", page=16, kv_dtype="float8_e4m3fn", scales="token", **CROWDED)),
        (SPLIT, dict(kv_dtype="int8", scales="token")),
        (SPLIT, dict(kv_dtype="int8", scales="head", sq=16, **CROWDED)),
        (BACKWARD, dict(d=64, **CROWDED)),
    ],
)
def test_crowded_problems(name, features):
    for one in built(name, problem(name, **features)):
        assert not one.spills or not loop_spills(one), f"{one.name} spills in its loop"


@pytest.mark.parametrize("ieee", [False, True], ids=["tf32", "ieee"])
def test_float32(ieee):
    (one,) = built(PREFILL, problem(PREFILL, "sm80", dtype="float32", ieee=ieee))
    assert bool(matrix_units(one)) is not ieee, "tf32 runs on tensor cores, ieee never does"


def test_unaligned_keys_run_without_a_pipeline():
    p = problem(SPLIT, "sm80")
    odd = tuple(dataclasses.replace(f, base_alignment=2) if f.name == "k" else f for f in p.operands)
    p = dataclasses.replace(p, operands=odd)
    configs = variants()[SPLIT].legal_configs(p)
    assert configs and all(config["num_stages"] == 1 for config in configs)
    (one,) = built(SPLIT, p)
    assert not mentions(one, r"cp\.async")


def test_fp8_is_refused_where_the_gpu_cannot_convert_it():
    p = problem(SPLIT, "sm80", kv_dtype="float8_e4m3fn")
    (reason,) = {r.field: r for r in variants()[SPLIT].reasons(p)}.values()
    assert reason.field == "kv_dtype" and "int8" in reason.allowed
    assert variants()[SPLIT].legal_configs(p.on(Target.named("sm89")))


@pytest.mark.parametrize(
    "name, picked, features",
    [
        (SPLIT, "gluon_decode", {}),
        (SPLIT, SPLIT, dict(page=4)),
        (PREFILL, "gluon_fa3_cached", dict(kv="paged")),
        (PREFILL, PREFILL, dict(kv="paged", page=4)),
        (PREFILL, PREFILL, dict(alibi=True)),
        (PREFILL, "gluon_fa3_varlen", {}),
        (PREFILL, "gluon_fa3_varlen", dict(sinks=True)),
        (BACKWARD, BACKWARD, dict(alibi=True)),
        (BACKWARD, "gluon_fa3_varlen_backward", dict(sinks=True)),
    ],
)
def test_tables_prefer_it_to_plain_operations(name, picked, features):
    assert decide(problem(name, **features)).variant == picked
