"""gluon_fa3 without a GPU: what the compiler makes of every shipped config, and what it costs a plain call."""

import dataclasses
import itertools
import re

import pytest

from registry import Target
from registry.ops.attention.problem import AttentionProblem

pytest.importorskip("triton")

from compiled import exponentials_beside, hot_loops, loop_spills, reading, resources
from covering import all_of, configs_are_there_and_differ, covering_builds, first_of, named

from registry.plugins import gluon_fa3
from registry.plugins.gluon_fa3.tiles import first_place, known_places, slot_bytes
from registry.plugins.gluon_fa3.traits import SCHEDULES, config_rule, mask_kind, may_skip, traits_of, window_bounds

H200 = Target.named("H200")
VARIANT = gluon_fa3.VARIANT
first = first_of(VARIANT)
MEASURED_ON = "3.6."


def problem(**sizes):
    return AttentionProblem.of_shape(H200, **{"b": 2, "hq": 8, "s": 4096, "d": 128, **sizes})


PLAIN = [problem(d=d, causal=causal) for d, causal in itertools.product((64, 128, 256), (False, True))]
BETWEEN = [problem(d=80), problem(d=96, causal=True), problem(d=192, causal=True), problem(d=192, dv=128)]
FEATURES = [
    problem(d=64, s=1000, hkv=2, lse=True, layout="bshd"),
    problem(d=64, s=1000, causal=True, softcap=30.0),
    problem(d=128, s=1000, sk=777, causal=True, lse=True, dtype="float16"),
    problem(d=128, s=1000, window=(256, 64), softcap=15.0),
    problem(d=192, dv=128, causal=True, lse=True),
    problem(d=256, s=1000, window=(128, 0), softcap=15.0, lse=True),
    problem(d=40, dv=200, s=333),
]


def built(p, config):
    (build,) = VARIANT.builds(p, config)
    return resources(build)


ALWAYS = all_of(PLAIN + BETWEEN, first) + all_of(FEATURES, lambda p: VARIANT.legal_configs(p)[: 2 if p.softcap else 1])
BUILDS = covering_builds(all_of(PLAIN + BETWEEN, VARIANT.legal_configs), ALWAYS, ("BLOCK_N", "consumers", "stages"))


@pytest.mark.parametrize("p, config", named(BUILDS))
def test_build(p, config):
    found, t = built(p, config), traits_of(p, config)
    assert len(hot_loops(found)) == t.groups, "one steady loop for each consumer warp group"
    assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
    assert loop_spills(found) == []
    assert {t.consumer_registers, t.producer_registers} <= set(found.setmaxnreg)
    assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
    assert found.shared <= VARIANT.requires.shared_memory(p, config) < found.shared + 1024
    assert found.shared + 1024 <= 233472 // t.blocks_per_sm, "the blocks that the grid counts on must fit an SM"
    assert found.counts["HGMMA"] and found.counts["TMA load"] and found.counts["TMA store"]
    assert found.counts["HMMA"] == 0


@pytest.mark.parametrize("p, config", named(all_of(PLAIN + BETWEEN, first)))
def test_features_cost_the_plain_path_nothing(p, config):
    n = config["BLOCK_N"]
    for loop in hot_loops(built(p, config)):
        per_thread = 64 * n // 128
        assert loop.counts.get("FSEL", 0) == 2 and loop.counts.get("SEL", 0) == 0, "one for each row's maximum, no mask"
        assert loop.counts["MUFU"] == per_thread + 2, "one exponential a score, one for each row's rescaling"
        assert loop.counts["F2FP"] == per_thread // 2 and loop.counts.get("PRMT", 0) == 0, "packed once, carried packed"
        assert loop.counts["FMUL"] == 2 + p.head_dim_v // 2 and loop.counts["FFMA"] == per_thread + 2
        # QK: 64 x N x 16 each; PV: 64 x Dv x 16 each, or two of the parts of Dv
        t = traits_of(p, config)
        assert loop.counts["HGMMA"] == p.head_dim // 16 + n // 16 * (1 if t.one_product else len(t.value_parts))
        most = {64: 430, 80: 475, 96: 490, 128: 480, 192: 500, 256: 440}[p.head_dim]
        assert loop.instructions <= (most if MEASURED_ON in H200.triton else most * 1.06), "3.9 adds address arithmetic"


@reading
def barriers_set_up(found):
    """Where in shared memory."""
    bases = set(re.findall(r"mov\.[bu]32\s+(%r\d+), global_smem;", found.ptx))
    sums = re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", found.ptx)
    places = {register: int(offset) for register, base, offset in sums if base in bases}
    return sorted(places[at] for at in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", found.ptx))


WRITTEN = [(p, config) for p, config in all_of(PLAIN + BETWEEN, VARIANT.legal_configs) if config.get("written")]


@pytest.mark.parametrize("p, config", named(WRITTEN))
def test_keys_and_values_lie_where_what_is_written_out_looks_for_them(p, config):
    """At the beginning of shared memory, and their barriers behind them."""
    t = traits_of(p, config)
    _, units, words, first = known_places(t)
    behind = 8 * words * first
    assert units * 1024 <= behind and 2 * t.stages * t.block_n * (t.head + t.head_v) == units * 1024
    rings = [behind + 8 * (words * ring + slot) for ring in range(4) for slot in range(t.stages)]
    assert set(rings) <= set(barriers_set_up(built(p, config)))


@pytest.mark.parametrize("d, dv", [(96, 96), (72, 80), (40, 96), (8, 72)])
def test_values_begin_where_keys_end(d, dv):
    p = problem(d=d, dv=dv)
    config = next(config for config in VARIANT.legal_configs(p) if config.get("written"))
    t = traits_of(p, config)
    assert first_place("V", 0, t) * slot_bytes("V", t) == t.stages * slot_bytes("K", t)


@reading
def waits_of_groups(found):
    """In each steady loop, before its last jump: how often all warps of a group wait for each other."""
    code = [(int(at, 16), step) for at, step in re.findall(r"/\*(\w{4,5})\*/\s+(.*);", found.sass)]
    counted = []
    for loop in hot_loops(found):
        steps = [step for at, step in code if loop.address <= at < loop.address + 16 * loop.instructions]
        last = max(i for i, step in enumerate(steps) if " BRA " in f" {step} ")
        counted.append(sum("BAR.SYNC" in step and ", 0x80" in step for step in steps[:last]))
    return counted


@pytest.mark.parametrize("p, config", named(WRITTEN))
def test_warps_of_a_group_hardly_wait_for_each_other(p, config):
    assert max(waits_of_groups(built(p, config))) <= 1, "by barriers of the compiler's it is four times"


def test_what_cannot_be_written_out_is_refused():
    def refused(config, **sizes):
        p = problem(**sizes)
        return [reason.field for reason in config_rule(p, {**VARIANT.configs_for(p)[-1], **config})]

    assert refused({"written": True}, d=64, dv=256) == ["written"]
    assert refused({"written": True}, d=256, dv=64) == []
    assert refused({"one_product": True}, d=96) == ["one_product"], "not without knowing where V lies"
    assert refused({"one_product": True, "written": True}, d=96) == []
    assert refused({"one_product": True, "written": True}, d=192) == ["one_product"], "in two places"
    assert refused({"one_product": True, "written": True}, d=128) == ["one_product"]
    triton_38 = dataclasses.replace(H200, triton="3.8.0")
    elsewhere = [problem(d=128, causal=True).on(target) for target in (H200, triton_38)]
    assert [any(c.get("written") for c in VARIANT.legal_configs(p)) for p in elsewhere] == [True, False]


@pytest.mark.parametrize("p, config", named(all_of(PLAIN + BETWEEN, first)))
def test_exponentials_run_beside_the_product(p, config):
    """They come before the wait for it. Else groups would overlap each other only, not each itself."""
    found = built(p, config)
    assert exponentials_beside(found) == [loop.counts["MUFU"] for loop in hot_loops(found)], "none after the wait"


@reading
def jumps_after_votes(found):
    """Of each vote of a warp: how much later it jumps by it, and the instruction that is jumped over first."""
    code = re.findall(r"^\s+/\*\w{4}\*/\s+(.*);", found.sass, re.MULTILINE)
    jumps = []
    for i, any_lane in [(i, step.split()[1].strip(",")) for i, step in enumerate(code) if "VOTE.ANY" in step]:
        jump = next(j for j in range(i, len(code)) if code[j].startswith(f"@!{any_lane} BRA"))
        jumps.append([jump - i, code[jump + 1].split()[0].split(".")[0]])
    return jumps


@pytest.mark.parametrize("p, config", named(all_of(PLAIN, first)))
def test_what_was_summed_is_rescaled_behind_a_branch(p, config):
    """Of a warp as one: its 32 lanes vote, and jump over the multiplications unless one of them must."""
    found = jumps_after_votes(built(p, config))
    assert len(found) >= config["consumers"], "one in each steady loop"
    assert all(later < 100 and then == "FMUL" for later, then in found)


def test_parts_of_a_head_dim_hold_it():
    """Powers of two, each at a multiple of its width, without a gap and never beyond a panel that is there."""
    for d in range(8, 257, 8):
        t = traits_of(problem(d=d), {**VARIANT.configs_for(problem(d=d))[0], "q_columns": 0})
        for parts, least, room in ((t.head_parts(0), d, t.head), (t.value_parts, d, t.head_v)):
            ends = [first + wide for first, wide in parts]
            assert [first for first, _ in parts] == [0, *ends[:-1]] and least <= ends[-1] <= room
            assert all(wide.bit_count() == 1 and first % wide == 0 for first, wide in parts)
        assert len(t.value_parts) <= 2 and t.head_parts(0)[-1][1] >= 16
        assert sum(wide for _, wide in t.value_parts) <= {80: 80, 96: 96, 192: 192}.get(d, 256)


@reading
def messages(found):
    """Each read of a message, and each write after a wait, with the step before it and the two behind it."""
    steps = re.findall(r"\b(LDS\.64|STS\.64|BAR\.SYNC|SYNCS\.PHASECHK|SYNCS\.ARRIVE\.\S+A1T0)\b", found.sass)
    around = [steps[i - 1 : i + 3] for i in range(1, len(steps))]
    reads = [each for each in around if each[1] == "LDS.64"]
    return {"reads": reads, "writes": [each for each in around if each[:2] == ["SYNCS.PHASECHK", "STS.64"]]}


@pytest.mark.parametrize("p, config", named(all_of(PLAIN, first)))
def test_a_message_is_let_go_after_all_warps_of_a_group_have_read_it(p, config):
    """The tile messages between producer and consumers, which compute-sanitizer's racecheck cannot follow."""
    found = messages(built(p, config))
    assert len(found["reads"]) == 2 * config["consumers"], "each group's first message and its later ones"
    assert len(found["writes"]) == 2 and all(then.startswith("SYNCS.ARRIVE") for _, _, then, *_ in found["writes"])
    for before, _, after, later in found["reads"]:
        assert before == "SYNCS.PHASECHK", "read when it is announced"
        assert after == "BAR.SYNC" and later.startswith("SYNCS.ARRIVE"), "let go once all have read it"


def test_every_config_is_legal_somewhere_and_differs():
    for p in PLAIN + FEATURES:
        configs_are_there_and_differ(VARIANT, p)
    assert {c["schedule"] for p in PLAIN for c in VARIANT.configs_for(p)} <= set(SCHEDULES)
    assert {c["consumers"] for c in VARIANT.configs_for(PLAIN[0])} >= {2, 3}


@pytest.mark.parametrize(
    "sizes, kind",
    [
        (dict(s=1024), "none"),
        (dict(s=1000), "tail"),
        (dict(s=1000, sk=1024), "none"),
        (dict(s=1000, causal=True), "diagonal"),
        (dict(s=64, sk=1024, causal=True), "diagonal"),
        (dict(s=1024, sk=128, causal=True), "diagonal"),
        (dict(s=100, sk=1024, causal=True), "band"),
        (dict(s=1024, window=(100, 0)), "band"),
        (dict(s=1024, window=(-1, 3)), "band"),
    ],
)
def test_cheapest_mask(sizes, kind):
    p = problem(**sizes)
    assert mask_kind(p.seqlen_q, p.seqlen_k, *window_bounds(p.causal, p.window), 128) == kind


def test_diagonal_mask_suffices_wherever_it_is_chosen():
    """By brute force: with "diagonal", only the highest visited block can hide a key from a valid row."""
    for sq, sk, n in itertools.product((1, 64, 65, 128, 320), (1, 64, 65, 129, 384), (64, 128)):
        if mask_kind(sq, sk, *window_bounds(True, None), n) != "diagonal":
            continue
        for row in range(0, sq, 64):
            last = (sk - 1) // n
            high = min(max(row + 63 + sk - sq, 0) // n, last)
            for i in range(row, min(row + 64, sq)):
                assert (high + 1) * n > min(i + sk - sq, sk - 1), "no visible key lies above the highest block"
                assert i + sk - sq >= high * n - 1 or high == 0, "blocks below the highest are visible whole"


def test_groups_of_a_tile_begin_with_the_same_block_where_none_skips():
    """By brute force: else a group would take the copies of one block for those of another."""
    for sq, sk, (groups, n) in itertools.product((64, 192, 256), (192, 256, 320, 448), ((1, 128), (2, 128), (2, 64))):
        mask = mask_kind(sq, sk, *window_bounds(True, None), n)
        if mask != "diagonal" or may_skip(mask, groups, n, sk - sq):
            continue
        for row in range(0, sq, 64 * groups):
            highest = {min(max(row + 64 * g + 63 + sk - sq, 0) // n, (sk - 1) // n) for g in range(groups)}
            assert len(highest) == 1


def test_refusals_name_a_fix():
    q = problem().operands[0]
    unaligned = tuple(dataclasses.replace(o, base_alignment=2) for o in problem().operands)
    odd = tuple(dataclasses.replace(o, strides=(*o.strides[:2], q.shape[3] + 3, 1)) for o in problem().operands)
    for operands in (unaligned, odd):
        reasons = VARIANT.reasons(dataclasses.replace(problem(), operands=operands))
        assert reasons and all(r.fix for r in reasons)
    reasons = {reason.field: reason.fix for reason in VARIANT.reasons(problem(d=100, dv=96))}
    assert "pad head_dim 100 to 104" in reasons["head_dim"]
