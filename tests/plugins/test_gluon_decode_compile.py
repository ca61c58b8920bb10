"""gluon_decode without a GPU: what the compiler makes of its configs, and which problems it takes."""

import dataclasses

import pytest

from registry import Target
from registry.ops.attention_varlen.problem import VarlenProblem

pytest.importorskip("triton")

from compiled import hot_loops, instructions, lent_barriers, loop_spills, resources

from registry.ops.attention_varlen.calls import FORWARD
from registry.plugins.gluon_decode import VARIANT, host
from registry.plugins.gluon_decode.traits import configs, traits_of

WITH_NEWEST_TRITON = r"build\[(decoding|float8|rows)"
H200 = Target.named("H200")


def problem(**sizes):
    known = {"b": 4, "hq": 32, "hkv": 8, "sq": 1, "sk": 4096, "d": 128, "kv": "paged", **sizes}
    return VarlenProblem.of_shape(H200, **known)


PROBLEMS = {
    "decoding": problem(lse=True),
    "one": problem(b=1),
    "many": problem(b=1000, d=64),
    "head256": problem(d=256, sq=8, t=30, causal=True),
    "rows": problem(sq=16, t=60, causal=True, window=(500, 0), softcap=20.0, sinks=True, lse=True, page=16),
    "cache": problem(kv="cache", dtype="float16", d=96, hq=8),
    "float8": problem(kv_dtype="float8_e4m3fn"),
    "int8": problem(kv_dtype="int8", scales="head", hq=64, page=256),
    "rows8": problem(kv_dtype="int8", sq=8, t=30, causal=True),
}
BUILDS = [
    pytest.param(p, c, id=f"{n}-{'-'.join(map(str, c.values()))}") for n, p in PROBLEMS.items() for c in configs(p)
]


@pytest.mark.parametrize("p, config", BUILDS)
def test_build(p, config):
    if config not in VARIANT.legal_configs(p):
        pytest.skip("not for this problem")
    (build,) = VARIANT.builds(p, config)
    found, t = resources(build), traits_of(p, config)
    assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
    if config["PER_SM"] < 3:
        assert loop_spills(found) == [] and found.spills <= 1280
    assert t.producer_registers in found.setmaxnreg
    assert lent_barriers(found) == [], "see the measured facts"
    assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
    assert found.registers * found.threads * config["PER_SM"] <= 65536
    assert found.shared <= VARIANT.requires.shared_memory(p, config) < found.shared + 2048
    assert (found.shared + 1024) * config["PER_SM"] <= 228 << 10, "so many fit an SM"
    (loop,) = hot_loops(found)
    products = t.block_n // 64 * t.head // 16 + t.head // 64 * t.block_n // 16
    used, unused = ("HMMA", "HGMMA") if t.small else ("HGMMA", "HMMA")
    assert loop.counts[used] == products * (t.rows // 8 if t.small else 1) and loop.counts[unused] == 0
    assert instructions(found)["TMA load"] >= 2 * t.panels * t.boxes


def test_every_claimed_problem_has_a_config_and_configs_differ():
    for p in PROBLEMS.values():
        assert len({tuple(sorted(c.items())) for c in VARIANT.configs_for(p)}) == len(VARIANT.configs_for(p))
        assert VARIANT.legal_configs(p)


REFUSED = {
    "max_seqlen_q": problem(sq=32, t=64),
    "page_size": problem(page=4),
    "kv_layout": problem(kv="packed"),
    "alibi": problem(alibi=True),
    "kv_scale": problem(kv_dtype="int8", scales="token"),
    "head_dim": problem(kv_dtype="int8", d=144),
    "dtype": problem(dtype="float32"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_claimed_is_refused_by_its_field(field):
    assert field in {reason.field for reason in VARIANT.reasons(REFUSED[field])}


def test_a_box_lies_in_one_page():
    legal = [page for page in range(1, 400) if not VARIANT.reasons(problem(page=page))]
    assert legal == list(range(8, 400, 8))
    for page in legal:
        t = traits_of(problem(page=page), {"BLOCK_N": 128, "stages": 3, "PER_SM": 1, "HEADS": 2, "AHEAD": 0})
        assert t.box * t.boxes == 64 and page % t.box == 0 and t.boxes <= 32


def test_unaligned_operands_are_refused_with_a_fix():
    unaligned = tuple(dataclasses.replace(o, base_alignment=2) for o in problem().operands)
    reasons = VARIANT.reasons(dataclasses.replace(problem(), operands=unaligned))
    assert reasons and all(reason.fix for reason in reasons)


@pytest.mark.parametrize("kv", ["paged", "cache"])
def test_a_map_is_the_tensor_s_own(kv):
    p = problem(kv=kv, page=16)
    (call,) = host.call(p, VARIANT.legal_configs(p)[0], FORWARD.operands(p), 1.0)
    k, described = FORWARD.operands(p)["k"], call.arguments["k_map"]
    assert (tuple(described.shape), tuple(described.strides)) == (k.shape, k.strides)
    assert described.block_shape == [1, 16 if kv == "paged" else 64, 1, 64]


def test_programs_fill_the_sms():
    for hkv, programs in ((8, 128), (1, 132), (16, 128), (5, 130), (512, 512)):
        p = problem(hq=hkv, hkv=hkv)
        (call,) = host.call(p, VARIANT.legal_configs(p)[0], FORWARD.operands(p), 1.0)
        assert call.grid[0] * call.grid[1] == programs
