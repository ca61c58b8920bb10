"""triton_fa2 without a GPU: what the compiler makes of the shipped configs, on every family of GPUs it claims.

Registers, spills, shared memory as declared, tensor-core instructions not serialised, and asynchronous copies where
they must be and nowhere else.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from registry import Target, variants
from registry.contract.problem import OperandFact
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem
from registry.ops.parts.memory import conditions

triton = pytest.importorskip("triton")

from compiled import loop_spills, matrix_units, mentions, reading, resources  # noqa: E402
from covering import covering  # noqa: E402

PINNED = triton.__version__.startswith("3.6.")
WITH_NEWEST_TRITON = r"triton_fa2-sm(90-(64|128)|120-64|100-128)|backward-sm(86|90)-64|allow_them|cannot_be"
FORWARD, BACKWARD = "triton_fa2", "triton_fa2_backward"


def problem(name, arch="sm90", **sizes):
    made = AttentionProblem if name == FORWARD else AttentionBackwardProblem
    return made.of_shape(Target.named(arch), **{"hq": 2, "s": 1024, "d": 64, "causal": True, "lse": True, **sizes})


def built(p, config=None):
    """What the compiler makes of each kernel of a config; the first legal one unless told."""
    variant = variants()[FORWARD if p.op == "attention" else BACKWARD]
    config = variant.legal_configs(p)[0] if config is None else config
    with conditions(ieee=p.ieee):
        return [resources(build, p.target) for build in variant.builds(p, config)]


def declared(p, config=None):
    variant = variants()[FORWARD if p.op == "attention" else BACKWARD]
    return variant.requires.shared_memory(p, variant.legal_configs(p)[0] if config is None else config)


def check(p, found, exact=False):
    """They fit in what was declared, exactly so where that is asked; and neither spill nor wait for their products."""
    most = max(one.shared for one in found)
    assert most <= p.target.shared_memory
    assert not PINNED or (most == declared(p) if exact else most <= declared(p)), most
    for one in found:
        assert one.spills == 0, f"{one.name} spills {one.spills} bytes"
        assert not any("C75" in line for line in one.ptxas_warnings), f"{one.name}: wgmma serialised"


EVERYTHING = dict(causal=False, window=(255, 127), softcap=30.0, s=1000, hkv=1)


def has_registers(one):
    """No spills; but ptxas may park a few bytes outside of loops to reach a bracket of registers, where it could have
    had more of them."""
    parked = one.spills <= 64 and one.registers < 255
    return one.spills == 0 or (parked and not loop_spills(one, innermost=False))


SHIPPED = [
    *[(name, "sm90", d) for name in (FORWARD, BACKWARD) for d in (64, 128, 256)],
    *[(name, "sm80", d) for name in (FORWARD, BACKWARD) for d in (64, 256)],
    (FORWARD, "sm86", 128),
    (FORWARD, "sm89", 256),
    (FORWARD, "sm100", 128),
    (FORWARD, "sm120", 64),
    (BACKWARD, "sm86", 64),
    (BACKWARD, "sm89", 128),
    (BACKWARD, "sm100", 64),
    (BACKWARD, "sm120", 128),
]


@pytest.mark.parametrize("name, arch, d", SHIPPED, ids=lambda value: str(value))
def test_shipped_configs_fit_and_do_not_spill(name, arch, d):
    p = problem(name, arch, d=d)
    check(p, found := built(p), exact=True)
    unit = {90: "wgmma", 100: "tcgen05"}.get(p.target.sm, "mma")
    assert all(matrix_units(one) == {unit} for one in found)


@pytest.mark.skipif(not PINNED, reason="wide heads were looked at with one Triton")
@pytest.mark.parametrize(
    "arch, d, dv, features",
    [
        ("sm90", 512, 512, dict(causal=True)),
        ("sm90", 576, 512, dict(causal=False)),
        ("sm90", 320, 320, dict(causal=True, s=1000)),
        ("sm90", 64, 512, dict(causal=False)),
        ("sm80", 576, 512, dict(causal=True)),
        ("sm86", 512, 512, dict(causal=False)),
        ("sm100", 512, 512, dict(causal=True)),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(value),
)
def test_heads_wider_than_a_tile(arch, d, dv, features):
    """They fit, multiply on tensor cores, and spill in no loop; tiles of values are shared out among programs."""
    p = problem(FORWARD, arch, d=d, dv=dv, **features)
    (one,) = built(p)
    assert one.shared <= declared(p) <= p.target.shared_memory
    assert matrix_units(one) == {"wgmma" if p.target.sm == 90 else "mma"}
    assert not any("C75" in line for line in one.ptxas_warnings) and one.spills <= 64
    assert not loop_spills(one, innermost=False)


@pytest.mark.skipif(not PINNED, reason="wide heads were looked at with one Triton")
def test_masks_on_heads_over_512_spill_a_little():
    """On Hopper, and only in the few blocks on an edge of the mask: 72 bytes, and still the fastest that was tried."""
    (one,) = built(problem(FORWARD, d=576, dv=512))
    plain, masked = (loop for loop in one.loops if loop.tensor_core)
    assert not plain.spills and len(masked.spills) <= 6 and one.spills <= 72


def test_wide_heads_of_float32_are_not_claimed():
    p = problem(FORWARD, dtype="float32", d=512)
    variant = variants()[FORWARD]
    assert not variant.legal_configs(p)
    (reason,) = [r for r in variant.requires.rule(p, variant.configs_for(p)[0]) if r.code == "registers"]
    assert reason.field == "head_dim" and "bfloat16" in reason.fix


@pytest.mark.skipif(not PINNED, reason="the features were looked at with one Triton")
@pytest.mark.parametrize(
    "features",
    [
        dict(causal=False, s=1024),
        dict(causal=False, s=1000, d=72, dv=40),
        dict(window=(255, 0), s=1000),
        dict(softcap=30.0),
        dict(hkv=1, layout="bshd", d=128),
    ],
    ids=lambda f: "-".join(f),
)
def test_features_on_hopper(features):
    check(p := problem(FORWARD, **features), built(p))


CROWDED = [
    *[(name, "sm90", d, "both") for name in (FORWARD, BACKWARD) for d in (64, 128, 256)],
    (FORWARD, "sm90", 256, "window"),
    (BACKWARD, "sm90", 256, "window"),
    (BACKWARD, "sm90", 128, "cap"),
    (FORWARD, "sm80", 64, "both"),
    (BACKWARD, "sm80", 64, "both"),
    (BACKWARD, "sm80", 128, "both"),
    (FORWARD, "sm120", 64, "both"),
    (FORWARD, "sm100", 128, "both"),
    (BACKWARD, "sm100", 64, "window"),
]


def crowded_builds():
    """The first config everywhere, and on each architecture one without a pipeline."""
    features = {"both": EVERYTHING, "window": dict(window=(255, 0), s=1024), "cap": dict(softcap=30.0, s=1000)}
    rows, first = [], []
    for name, arch, d, crowd in CROWDED:
        p = problem(name, arch, d=d, **features[crowd])
        found = [(f"{name}-{arch}-{d}-{crowd}-{i}", p, c) for i, c in enumerate(variants()[name].legal_configs(p))]
        rows, first = rows + found, first + found[:1]

    def pipelined(row):
        return [(row[1].op, row[1].target.arch, max(n for name, n in row[2].items() if "stages" in name) > 1)]

    return [pytest.param(p, config, id=title) for title, p, config in covering(rows, pipelined, always=first)]


@pytest.mark.skipif(not PINNED, reason="the features were looked at with one Triton")
@pytest.mark.parametrize("p, config", crowded_builds())
def test_crowded_problems_do_not_run_out_of_registers(p, config):
    """With a cap and a window to the left: more to hold at once."""
    for one in built(p, config):
        assert has_registers(one) and one.shared <= declared(p, config), (one.name, one.spills)


def test_plain_attention_pays_for_no_feature():
    """One steady loop, with a product of scores, one of values, and one exponential for each score."""
    (one,) = built(problem(FORWARD, causal=False, lse=False))
    (loop,) = [loop for loop in one.loops if loop.tensor_core]
    assert not loop.spills
    config = variants()[FORWARD].legal_configs(problem(FORWARD))[0]
    scores = config["BLOCK_M"] * config["BLOCK_N"] // (config["num_warps"] * 32)
    assert loop.counts["MUFU"] <= scores + 4
    assert loop.counts.get("FSEL", 0) == 0, "a mask in the unmasked loop"


@pytest.mark.parametrize("ieee", [False, True], ids=["tf32", "ieee"])
def test_float32(ieee):
    (one,) = built(p := problem(FORWARD, "sm80", dtype="float32", ieee=ieee))
    assert one.shared <= declared(p)
    assert bool(matrix_units(one)) is not ieee, "tf32 runs on tensor cores, ieee never does"


ROWS = dict(causal=True, s=1000)


@pytest.mark.skipif(not PINNED, reason="the features were looked at with one Triton")
@pytest.mark.parametrize(
    "name, arch, d, dv, features",
    [
        (FORWARD, "sm100", 256, 256, EVERYTHING),
        (FORWARD, "sm80", 128, 128, EVERYTHING),
        (FORWARD, "sm90", 64, 64, ROWS),
        (BACKWARD, "sm120", 128, 128, EVERYTHING),
        (BACKWARD, "sm90", 96, 32, EVERYTHING),
        (BACKWARD, "sm80", 64, 64, ROWS),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(value),
)
def test_float32_without_tf32_does_not_spill(name, arch, d, dv, features):
    p = problem(name, arch, dtype="float32", ieee=True, d=d, dv=dv, **features)
    if name == BACKWARD:
        p = dataclasses.replace(p, grad_lse=True)
    check(p, found := built(p))
    assert not any(map(matrix_units, found))


@pytest.mark.parametrize("d, dv, field", [(160, 160, "head_dim"), (64, 256, "head_dim_v")])
def test_wide_gradients_of_float32_without_tf32_are_not_claimed(d, dv, field):
    """Both operands' rows would have to be in registers at once; tf32 and the forward pass run up to 256."""
    variant = variants()[BACKWARD]
    p = problem(BACKWARD, dtype="float32", ieee=True, d=d, dv=dv)
    assert not variant.legal_configs(p)
    (reason,) = [r for r in variant.requires.rule(p, variant.configs_for(p)[0]) if r.code == "registers"]
    assert reason.field == field and "tf32" in reason.fix
    assert variant.legal_configs(dataclasses.replace(p, ieee=False))
    assert variants()[FORWARD].legal_configs(problem(FORWARD, dtype="float32", ieee=True, d=d, dv=dv))


@pytest.mark.parametrize("mask", [dict(causal=True, softcap=5.0), dict(causal=False)], ids=["causal", "full"])
@pytest.mark.parametrize("d, dv", [(96, 32), (64, 16), (256, 32)])
def test_products_read_addresses_that_were_written(d, dv, mask):
    """ptxas 12.8 drops the address of V's tile where K and V share a buffer and V's swizzle is narrower than K's."""
    p = problem(FORWARD, dtype="float16", s=1000, d=d, dv=dv, lse=False, **mask)
    p = with_operands(p, **{name: {"base_alignment": 2} for name in "qkv"})  # only one stage is legal
    (one,) = built(p)
    assert one.counts["HGMMA"] and not one.spills
    assert not never_written(one)


WIDTHS = (16, 32, 64, 128, 256)
SWIZZLED = covering(
    [(d, dv) for d in WIDTHS for dv in WIDTHS if dv <= d or dv == 256],
    lambda row: [(min(row[0], 64), min(row[1], 64))],  # 128 bytes are the widest swizzle
    lambda row: [("d", row[0]), ("dv", row[1])],
)


@pytest.mark.skipif(not PINNED, reason="the fault was looked at with one Triton's ptxas")
@pytest.mark.parametrize(
    "name, dtype, d, dv",
    [
        *[(FORWARD, "float16", *pair) for pair in SWIZZLED],
        (FORWARD, "float32", 128, 32),
        *[(BACKWARD, "float16", *pair) for pair in ((64, 16), (16, 64), (32, 128), (256, 32))],
    ],
)
def test_one_stage_configs_read_addresses_that_were_written(name, dtype, d, dv):
    p = problem(name, dtype=dtype, s=1000, d=d, dv=dv, causal=False)
    stages = ("num_stages", "query_stages", "key_stages")
    configs = [c for c in variants()[name].configs_for(p) if all(c.get(stage, 1) == 1 for stage in stages)]
    assert configs
    for one in (one for config in configs for one in built(p, config)):
        assert has_registers(one) and (name == BACKWARD or one.counts["HGMMA"])
        assert not never_written(one), one.name


@reading
def never_written(build):
    """Uniform registers that an instruction reads although none before it in the text wrote them."""
    written, found = {"URZ"}, set()
    for opcode, operands in re.findall(r"\*/\s+(?:@\S+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", build.sass):
        first, _, rest = operands.partition(",")
        target = re.fullmatch(r"UR(\d+)", first)
        read = set(re.findall(r"UR\w+", rest if target else operands))
        if opcode.startswith("HGMMA"):  # four registers, two for each operand in shared memory; A may be in registers
            quad, a_is_shared = int(re.search(r"gdesc\[UR(\d+)", operands)[1]), rest.lstrip().startswith("gdesc")
            read = {f"UR{quad + i}" for i in range(0 if a_is_shared else 2, 4)}
        found |= read - written
        if target:
            width = 2 if ".64" in opcode or "WIDE" in opcode else 1
            written |= {f"UR{int(target[1]) + i}" for i in range(width)}
    return sorted(found)


# --- asynchronous copies ------------------------------------------------------------------------------------------


def with_operands(p, **changes):
    """The problem with changed memory facts of some operands: k={"base_alignment": 2} and so on."""
    operands = tuple(dataclasses.replace(fact, **changes.get(fact.name, {})) for fact in p.operands)
    return dataclasses.replace(p, operands=operands, layout="strided")


def padded_rows(fact: OperandFact, by: int) -> dict:
    b, h, s, d = fact.shape
    return {"strides": (h * s * (d + by), s * (d + by), d + by, 1)}


P = problem(FORWARD, "sm86", s=1000)
K = next(fact for fact in P.operands if fact.name == "k")
UNALIGNED = {
    "row of 65 elements": (with_operands(P, k=padded_rows(K, 1)), "k", "stride_alignment"),
    "base at 2 bytes": (with_operands(P, k={"base_alignment": 2}), "k", "base_alignment"),
    "inner stride 2": (with_operands(P, v={"strides": (2 * 1000 * 128, 1000 * 128, 128, 2)}), "v", "unit_inner_stride"),
}


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89"])
@pytest.mark.parametrize("case", UNALIGNED)
def test_pipelined_configs_are_illegal_where_copies_cannot_be_asynchronous(arch, case):
    p, operand, field = UNALIGNED[case]
    p = p.on(Target.named(arch))
    variant = variants()[FORWARD]
    assert all(config["num_stages"] == 1 for config in variant.legal_configs(p)), "only the config without a pipeline"
    assert variant.legal_configs(p), "which still runs"
    staged = next(config for config in variant.configs_for(p) if config["num_stages"] > 1)
    reasons = [r for r in variant.requires.rule(p, staged) if r.operand == operand and r.field == field]
    assert reasons and reasons[0].fix and operand in reasons[0].fix


@pytest.mark.parametrize("case", UNALIGNED)
def test_no_asynchronous_copy_where_it_cannot_be(case):
    p = UNALIGNED[case][0]
    (one,) = built(p)
    assert not mentions(one, r"cp\.async")
    staged = next(config for config in variants()[FORWARD].configs_for(p) if config["num_stages"] > 1)
    if case == "row of 65 elements":  # what the rule prevents: Triton takes the config and drops the pipeline silently
        assert not mentions(built(p, staged)[0], r"cp\.async\.cg")


@pytest.mark.parametrize("by", [0, 2, 4, 8])
def test_asynchronous_copies_where_rows_allow_them(by):
    """Rows that are multiples of 4, 8 and 16 bytes are copied asynchronously, by so many bytes at a time."""
    changes = {fact.name: padded_rows(fact, by) for fact in P.operands} if by else {}
    p = with_operands(P, **changes)
    config = variants()[FORWARD].legal_configs(p)[0]
    assert config["num_stages"] > 1
    (one,) = built(p, config)
    assert mentions(one, r"cp\.async\.")
    size = min(16, (64 + by) * 2 & -((64 + by) * 2))
    assert mentions(one, f", ({hex(size)}|{size})")
