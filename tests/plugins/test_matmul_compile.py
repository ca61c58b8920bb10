"""The three matmul kernels compiled for GPUs that are not here: resources, instructions, and Ampere's cp.async rule."""

from __future__ import annotations

import dataclasses

import pytest

from registry import Target
from registry.contract.problem import OperandFact
from registry.ops.matmul.calls import MATMUL
from registry.ops.matmul.problem import MatmulProblem

pytest.importorskip("triton")

from compiled import instructions, loop_spills, matrix_units, mentions, reading, resources

from registry.plugins import gluon_matmul_ws, triton_matmul, triton_matmul_tma
from registry.plugins.gluon_matmul_ws.cost import cost

WITH_NEWEST_TRITON = r"everywhere|descriptors|warp_specialized|columns|rules|full_precision|along_k|where_it_is_legal"
POINTERS, DESCRIPTORS, SPECIALIZED = (
    module.registry_variants()[0] for module in (triton_matmul, triton_matmul_tma, gluon_matmul_ws)
)
GPUS = {"sm80": "A100", "sm86": "RTX 3090", "sm89": "RTX 4090", "sm90": "H100", "sm100": "B200"}


def problem(arch="sm90", m=4096, n=4096, k=4096, **more):
    return MatmulProblem.of_shape(Target.named(GPUS[arch]), m=m, n=n, k=k, **more)


def compiled(variant, p, config, slack=0):
    """The kernel's resources, after the checks that hold for every shipped config."""
    assert not variant.reasons(p)
    (build,) = variant.builds(p, config)
    found = resources(build, p.target)
    # Triton 3.9 parks a few registers beside the loops of split float32 products; in a loop it must not.
    assert not found.spills or (not Target.named("H100").triton.startswith("3.6.") and not loop_spills(found))
    declared = variant.requires.shared_memory(p, config)
    assert found.shared <= declared <= found.shared + slack
    assert (
        found.registers * found.threads <= variant.requires.registers(p, config) + 168 * 128
        or variant is not SPECIALIZED
    )
    assert p.ieee or matrix_units(found)
    return found


@pytest.mark.parametrize("arch", GPUS)
def test_pointers_everywhere(arch):
    p = problem(arch)
    first = POINTERS.legal_configs(p)[0]
    found = compiled(POINTERS, p, first)
    assert first["num_stages"] > 1 and instructions(found)["cp.async"] >= 8
    assert matrix_units(found) == {{"sm90": "wgmma", "sm100": "tcgen05"}.get(arch, "mma")}


@pytest.mark.parametrize(
    "arch, more",
    [
        ("sm90", {"m": 16, "layout": "nt"}),
        ("sm80", {"m": 16, "layout": "nt"}),
        ("sm86", {"m": 64, "dtype": "float16"}),
        ("sm90", {"m": 1, "layout": "nt"}),
        ("sm80", {"m": 1, "layout": "nt"}),
        ("sm90", {"m": 32, "layout": "nt"}),
        ("sm90", {"n": 16, "layout": "nt"}),
        ("sm80", {"dtype": "float32", "layout": "nt"}),
        ("sm100", {"dtype": "float32"}),
        ("sm90", {"layout": "nt"}),
        ("sm89", {"dtype": "float8_e4m3fn", "layout": "nt", "scaling": "rowwise"}),
        ("sm80", {"dtype": "float32", "ieee": True}),
        ("sm90", {"dtype": "float32", "layout": "nt"}),
        ("sm80", {"dtype": "int8", "layout": "nt"}),
        ("sm90", {"bias": True, "activation": "gelu", "layout": "tn"}),
        ("sm90", {"m": 1001, "n": 999, "k": 997, "dtype": "float16", "layout": "tt"}),
        ("sm80", {"b": 3, "m": 200, "n": 300, "k": 100}),
    ],
)
def test_pointers_features(arch, more):
    p = problem(arch, **more)
    compiled(POINTERS, p, POINTERS.legal_configs(p)[0], slack=1 << 16)


@pytest.mark.parametrize(
    "arch, more",
    [
        ("sm90", {}),
        ("sm100", {}),
        ("sm90", {"m": 64, "layout": "nt"}),
        ("sm90", {"layout": "tt", "b": 2}),
        ("sm90", {"dtype": "float8_e4m3fn", "layout": "nt", "scaling": "rowwise"}),
        ("sm90", {"dtype": "float32"}),
        ("sm90", {"dtype": "float32", "layout": "nt"}),
        ("sm100", {"dtype": "float32", "layout": "tn"}),
        ("sm90", {"bias": True}),
        ("sm90", {"m": 48, "dtype": "float8_e5m2", "layout": "nt", "scaling": "rowwise"}),
        ("sm90", {"n": 4100, "layout": "nt", "bias": True, "activation": "silu"}),
    ],
)
def test_descriptors(arch, more):
    p = problem(arch, **more)
    found = compiled(DESCRIPTORS, p, DESCRIPTORS.legal_configs(p)[0], slack=1 << 16 if "n" in more else 1024)
    asked = instructions(found)
    assert asked["TMA load"] and asked["cp.async"] == 0
    assert bool(asked["TMA store"]) == ("n" not in more)


@pytest.mark.parametrize(
    "which, more",
    [
        (0, {}),
        (2, {}),
        (0, {"m": 512, "n": 10240, "k": 8192, "layout": "nt"}),
        (0, {"m": 1024, "n": 1024, "k": 1024, "layout": "tt"}),
        (0, {"m": 512, "n": 6144, "dtype": "float16"}),
        (0, {"bias": True, "activation": "gelu"}),
        (0, {"n": 4100, "layout": "nt"}),
        (0, {"dtype": "float8_e4m3fn", "layout": "nt", "scaling": "rowwise"}),
        (0, {"dtype": "int8", "layout": "nt"}),
        (0, {"m": 8192, "n": 8192, "dtype": "float8_e5m2", "layout": "nt", "scaling": "scalar"}),
        (0, {"dtype": "float32", "layout": "nt"}),
        (0, {"m": 128, "n": 256, "k": 16384}),
        (0, {"m": 128, "n": 128, "k": 16384, "dtype": "float32", "layout": "nt"}),
    ],
)
def test_warp_specialized(which, more):
    p = problem(**more)
    config = SPECIALIZED.legal_configs(p)[which]
    found = compiled(SPECIALIZED, p, config, slack=256)
    assert {240, 24} <= set(found.setmaxnreg)
    asked = instructions(found)
    assert asked["wgmma"] >= 8
    assert asked["TMA load"] and bool(asked["TMA store"]) == (more.get("n") != 4100)
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"
    assert found.threads == 384
    design = SPECIALIZED.design_for(config)
    assert design.warp_specialized and design.warp_groups == 2 and design.pipeline_stages == config["STAGES"]


# --- int8: fp32 before the epilogue, unless the result is int32 ------------------------------------------------------

INT8 = {"dtype": "int8", "layout": "nt", "bias": True}


@pytest.mark.parametrize(
    "variant, arch, more",
    [
        (POINTERS, "sm90", {"m": 300, "n": 1, "k": 77, "b": 3, "out_dtype": "float16", "activation": "silu"}),
        (POINTERS, "sm80", {"out_dtype": "float32", "activation": "gelu"}),
        (DESCRIPTORS, "sm90", {"m": 8, "k": 2048, "out_dtype": "float32", "activation": "silu"}),
        (DESCRIPTORS, "sm90", {"m": 8, "k": 2048, "b": 3, "out_dtype": "float32"}),
        (DESCRIPTORS, "sm90", {"m": 8192, "n": 8192, "out_dtype": "bfloat16"}),
        (SPECIALIZED, "sm90", {"m": 2048, "n": 1024, "k": 1536, "b": 2, "out_dtype": "float16", "activation": "relu"}),
        (SPECIALIZED, "sm90", {"m": 300, "out_dtype": "float32", "activation": "silu"}),
    ],
)
def test_no_bias_turns_into_an_integer(variant, arch, more):
    p = problem(arch, **INT8, **more)
    found = compiled(variant, p, variant.legal_configs(p)[0], slack=1 << 16)
    assert mentions(found, r"cvt\.rn\.f32\.s32") and not mentions(found, r"cvt\.rzi")
    assert variant is not SPECIALIZED or not [line for line in found.ptxas_warnings if "C75" in line]


@pytest.mark.parametrize("variant", [POINTERS, DESCRIPTORS, SPECIALIZED], ids=lambda variant: variant.name)
def test_integers_stay_integers(variant):
    p = problem(**INT8, out_dtype="int32", activation="relu")
    found = compiled(variant, p, variant.legal_configs(p)[0], slack=1 << 16)
    assert not mentions(found, r"cvt\.rn\.f32\.s32|cvt\.rzi")


# --- Ampere's rule: cp.async moves at least four contiguous bytes -------------------------------------------------

CLASSIC = triton_matmul.config_of(128, 128, 32, warps=4, stages=2)


def strided(letter_strides, base=16, arch="sm86"):
    """8192 x 8192 fp16 with b's memory facts changed."""
    dense = problem(arch, 8192, 8192, 8192, dtype="float16")
    b = OperandFact("b", "float16", (8192, 8192), letter_strides, 2, base)
    layout = "n" + ("n" if letter_strides[1] == 1 else "t" if letter_strides[0] == 1 else "n")
    return dataclasses.replace(dense, layout=layout, operands=(dense.operands[0], b))


def test_cp_async_where_it_is_legal():
    p = problem("sm86", 8192, 8192, 8192, dtype="float16")
    assert not list(POINTERS.requires.rule(p, CLASSIC))
    assert mentions(compiled(POINTERS, p, CLASSIC, slack=1 << 14), r"cp\.async\.c") >= 16


@pytest.mark.parametrize(
    "strides, base, field, words",
    [
        ((8193, 1), 16, "stride", ("16386 bytes", "pad b")),
        ((1, 8193), 16, "stride", ("16386 bytes", "pad b")),
        ((8192, 1), 2, "base_alignment", (".clone()",)),
        ((16384, 2), 16, "stride", (".contiguous()",)),
    ],
)
def test_single_elements_rule_out_the_pipeline(strides, base, field, words):
    p = strided(strides, base)
    (reason,) = POINTERS.requires.rule(p, CLASSIC)
    assert (reason.code, reason.operand, reason.field) == ("cp_async", "b", field)
    assert all(word in reason.fix for word in (*words, "num_stages=1"))
    assert reason.got in (*strides, strides, base)
    legal = POINTERS.legal_configs(p)
    assert legal and all(config["num_stages"] == 1 for config in legal)


def test_single_stage_builds_cleanly():
    p = strided((8193, 1))
    found = compiled(POINTERS, p, POINTERS.legal_configs(p)[0], slack=1 << 14)
    assert instructions(found)["cp.async"] == 0 and matrix_units(found) == {"mma"}


@reading
def loads_behind_stores(found):
    """Of the loop that multiplies: loads from memory behind a store to shared memory, which wait for what is stored."""
    (loop,) = [loop for loop in found.loops if loop.tensor_core and loop.innermost]
    code = [line for line in found.sass.splitlines() if line.lstrip().startswith("/*")]
    first = next(at for at, line in enumerate(code) if f"/*{loop.address:04x}*/" in line)
    body = code[first : first + loop.instructions]
    stored = next(at for at, line in enumerate(body) if " STS" in line)
    return sum(" LDG" in line for line in body[stored:])


def test_a_block_is_loaded_while_the_one_before_is_multiplied():
    """Left to the compiler, 1 to 12 loads of the loop stand behind the first store, in three of the four tiles."""
    p = problem(m=8, n=2194, k=1600)
    for config in POINTERS.legal_configs(p):
        assert config["num_stages"] == 1
        (build,) = POINTERS.builds(p, config)
        assert loads_behind_stores(resources(build, p.target)) == 0


def test_an_unlucky_edge_is_named():
    """a is contiguous along M, and M is odd: its ragged edge would be masked one element at a time."""
    p = problem("sm86", 8191, 8192, 8192, dtype="float16", layout="tn")
    (reason,) = POINTERS.requires.rule(p, CLASSIC)
    assert reason.operand == "a" and "num_stages=1" in reason.fix


def test_hopper_is_not_bound_by_it():
    assert not list(POINTERS.requires.rule(strided((8193, 1), arch="sm90"), CLASSIC))


@pytest.mark.parametrize(
    "more",
    [
        {"m": 16, "n": 10686, "k": 13822},
        {"m": 2, "n": 178, "k": 154},
        {"m": 300, "n": 302, "k": 303, "dtype": "float32", "layout": "nt"},
        {"m": 4092, "n": 4092, "k": 4092, "dtype": "int8", "layout": "nt"},
    ],
)
def test_hopper_does_not_pipeline_four_bytes_at_a_time(more):
    p = problem(**more)
    legal = POINTERS.legal_configs(p)
    assert legal and all(config["num_stages"] == 1 for config in legal)
    assert instructions(compiled(POINTERS, p, legal[0], slack=1 << 14))["cp.async"] == 0


@pytest.mark.parametrize("n, first", [(4096, True), (4100, False)])
def test_hopper_pipelines_longer_copies(n, first):
    """Runs of 16 bytes at once; of 8 bytes where that is expected to be faster."""
    stages = [config["num_stages"] for config in POINTERS.legal_configs(problem(n=n))]
    assert max(stages) > 1 and (stages[0] > 1 or not first)


# --- what TMA cannot address ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [DESCRIPTORS, SPECIALIZED], ids=lambda variant: variant.name)
def test_tma_rules(variant):
    odd = problem(m=64, n=64, k=63, dtype="float16")
    (reason,) = {str(r): r for r in variant.reasons(odd)}.values()
    assert reason.operand == "a" and reason.field == "stride_alignment" and "126 bytes" in str(reason)
    assert not variant.reasons(problem(m=63, n=64, k=64, dtype="float16"))
    assert {r.field for r in variant.reasons(strided((8192, 1), 2, "sm90"))} == {"base_alignment"}


@pytest.mark.parametrize("variant", [DESCRIPTORS, SPECIALIZED], ids=lambda variant: variant.name)
def test_full_precision_is_left_to_the_pointers(variant):
    """Its products are FMAs, which spill from descriptors, and which wgmma does not have."""
    (reason,) = {str(r): r for r in variant.reasons(problem(dtype="float32", ieee=True, layout="nt"))}.values()
    assert reason.field == "ieee" and '"high"' in reason.fix


@pytest.mark.parametrize("dtype, layout, copies", [("int8", "nn", 1), ("float32", "tn", 1), ("float32", "nt", 0)])
def test_all_but_sixteen_bits_are_read_along_k(dtype, layout, copies):
    """Other operands are copied first, each by a launch of its own, or one of float32 comes from registers."""
    p = problem(dtype=dtype, layout=layout, m=1000, n=1008, k=1040)
    *first, product = SPECIALIZED.builds(p, SPECIALIZED.legal_configs(p)[0])
    assert len(first) == copies and all(resources(build, p.target).spills == 0 for build in first)
    assert resources(product, p.target).spills == 0


# --- split-K -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k", [(128, 256, 16384), (256, 256, 16384), (128, 4096, 14336), (64, 64, 65536)])
def test_long_k_is_split(m, n, k):
    """Too few tiles for the chip: the first choice cuts K, and no range is empty."""
    p = problem(m=m, n=n, k=k, layout="nt")
    first = SPECIALIZED.legal_configs(p)[0]
    assert first["SPLIT_K"] != 1 and first["SPLIT_K"] <= -(-k // first["BLOCK_K"])
    found = compiled(SPECIALIZED, p, first, slack=256)
    assert mentions(found, r"atom\.global\.gpu\.acq_rel\.add") and mentions(found, r"ld\.global\.cg")
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"


@pytest.mark.parametrize("swap", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("more", [{}, {"n": 10244}, {"dtype": "float8_e4m3fn", "scaling": "rowwise", "bias": True}])
def test_equal_shares_of_few_rows(swap, more):
    """What has to be added up is written and read 16 bytes at a time, and nothing but rows that are there is loaded."""
    p = problem(**{"m": 41, "n": 10240, "k": 8192, "layout": "nt", **more})
    depth = 128 // p.operands[0].itemsize
    config = gluon_matmul_ws.config("coop", 128, 64, 6, depth, split_k=0) | ({"SWAP": True} if swap else {})
    found = compiled(SPECIALIZED, p, config, slack=256)
    assert mentions(found, r"ld\.global\.cg(\.L1::no_allocate)?\.v4") and mentions(found, r"st\.global\.v4")
    (build,) = SPECIALIZED.builds(p, config)
    few = build.constants["cfg"].FEW
    assert few == (48 if swap else 24)


def test_rows_are_shared_out_evenly():
    """A row of a box that lies outside of a takes as long as two inside. Eight numbers of rows share a kernel."""
    few = {}
    config = gluon_matmul_ws.config("coop", 128, 48, 8)
    for m in (1, 29, 96, 128, 150, 250, 300):
        p = problem(m=m, n=6144, layout="nt")
        (call,) = gluon_matmul_ws.host.call(p, config, MATMUL.operands(p), 1.0)
        few[m] = call.constants["cfg"].FEW, call.arguments["last"]
    rest = {1: (8, 1), 29: (16, 13), 96: (48, 48), 128: (64, 64), 150: (40, 110), 250: (64, 186), 300: (0, 300)}
    assert few == rest, "no consumer reaches beyond the last row, where there are as many"
    p = problem(m=150, n=6144, layout="nt")
    (call,) = gluon_matmul_ws.host.call(p, {**config, "SPLIT_K": 0}, MATMUL.operands(p), 1.0)
    assert call.arguments["last"] == 150, "two tiles, whose sums over K are cut elsewhere, must not share a row"


@pytest.mark.parametrize("layout, swap, copies", [("nn", True, 0), ("tt", False, 0), ("tn", True, 1), ("nn", False, 1)])
def test_float32_across_k_comes_from_registers(layout, swap, copies):
    """The first factor, that is; two blocks a round of the loop, so that wgmma never waits for the registers."""
    p = problem(dtype="float32", layout=layout)
    config = gluon_matmul_ws.config("coop", 128, 256, 4, 32, swap=swap)
    *turns, build = SPECIALIZED.builds(p, config)
    found = resources(build, p.target)
    cfg = build.constants["cfg"]
    assert len(turns) == copies and cfg.A_REGS is (swap or layout[0] == "t")
    assert not found.spills and not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"


@pytest.mark.parametrize("m", [1, 40, 96, 200, 300, 4096])
@pytest.mark.parametrize(
    "more", [{}, {"dtype": "float32"}, {"dtype": "int8", "layout": "nt"}, {"k": 4100, "activation": "gelu"}]
)
def test_configs_are_declared_by_what_they_are_guessed_to_cost(m, more):
    p = problem(m=m, **more)
    costs = [cost(p, config) for config in SPECIALIZED.configs_for(p)]
    assert costs and costs == sorted(costs) and costs[0] > 0


def test_what_split_k_cannot():
    p = problem(m=128, n=256, k=512)
    for wrong in ({"MODE": "pingpong"}, {"SPLIT": 2}, {"SPLIT_K": 9}, {"SPLIT_K": 0, "MODE": "pingpong"}):
        config = {**gluon_matmul_ws.config("coop", 128, 128, 4, split_k=2), **wrong}
        assert "SPLIT_K" in {reason.field for reason in SPECIALIZED.requires.rule(p, config)}
