"""triton_autows without a GPU: the machine code proves that the compiler specialises the warps where claimed."""

from __future__ import annotations

import pytest

from registry import Target, variants
from registry.compiling import compile_build, inspect
from registry.ops.attention_problem import AttentionProblem

triton = pytest.importorskip("triton")


pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="claimed for Triton 3.6 only")


def problem(**sizes):
    return AttentionProblem.of_shape(Target.named("H200"), **{"hq": 2, "s": 1024, "d": 64, **sizes})


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("number", [0, 1])
def test_the_compiler_specialises(d, number):
    variant = variants()["triton_autows"]
    config = variant.legal_configs(p := problem(d=d))[number]
    (build,) = variant.builds(p, config)
    found = inspect(compile_build(build, "sm90"))
    assert found.threads == 384 and ".reqntid 384" in found.ptx, "three warp groups from num_warps=4"
    assert {40, 232} <= set(found.setmaxnreg), "the producer hands its registers to the consumers"
    assert found.counts["HGMMA"] and found.counts["TMA load"] and found.counts["SYNCS"]
    assert found.spills == 0
    assert found.shared == variant.requires.shared_memory(p, config)


@pytest.mark.parametrize("features", [
    dict(causal=True), dict(window=(64, 64)), dict(d=256), dict(s=1000), dict(softcap=10.0), dict(dtype="float32"),
    dict(lse=True),
], ids=lambda f: "-".join(f))  # fmt: skip
def test_what_the_compiler_does_not_specialise_is_refused(features):
    assert variants()["triton_autows"].reasons(problem(**features))


def test_other_architectures_are_refused():
    for arch in ("sm80", "sm89", "sm100", "sm120"):
        reasons = variants()["triton_autows"].reasons(problem().on(Target.named(arch)))
        assert [r.field for r in reasons] == ["arch"], arch
