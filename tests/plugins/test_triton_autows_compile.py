"""triton_autows without a GPU: the machine code proves that the compiler specialises the warps where it is legal, and
that it does not where an erratum refuses it. tests/support/autows_forms.py reads the
code; docs/autows.md shows the result.

Run with TRITON_INTERPRET=1, this file checks instead what the kernel computes, whoever computes it.
"""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from again import INTERPRETED  # noqa: E402

from registry import Target, variants  # noqa: E402
from registry.dispatch import in_force  # noqa: E402
from registry.dispatch.select import all_reasons  # noqa: E402

PINNED = triton.__version__.startswith("3.6.")
NAME = "triton_autows"
PLAINER = "window|softcap|log-sum-exp|ragged lengths|one row|grouped heads|head dim (72|128)|128 with|fp16"
WITH_NEWEST_TRITON = (
    rf"^test_(?!every_config)(?!.*\[({PLAINER}))"  # what these have is in "all of them", 256 and others
)


if INTERPRETED:
    import interpreter  # noqa: F401 (it mends Triton's)
    import numpy as np

    def test_it_is_right_where_it_is_legal():
        """In float16: the interpreter cannot round to bfloat16."""
        from registry.testing import check_variant

        with np.errstate(divide="ignore"):  # the logarithm of no key at all
            report = check_variant(NAME, Target.named("H200"), only=lambda name: name.startswith("float16"))
        assert report.passed and len(report.cases) > 20, str(report)

else:
    from autows_forms import FORMS, ILLEGAL, LEGAL, PAGE, SPECIALIZED, outcome, problem, with_forms
    from compiled import instructions, mentions, resources

    @pytest.mark.parametrize("title", FORMS)
    def test_the_compiler_does_what_is_known_of_it(title):
        assert outcome(title).verdict == FORMS[title].known

    @pytest.mark.parametrize("title", [*LEGAL, *ILLEGAL])
    def test_legal_is_what_is_specialised(title):
        reasons = all_reasons(variants()[NAME], problem(**{**LEGAL, **ILLEGAL}[title]))
        assert (not reasons) == (outcome(title).verdict == SPECIALIZED)
        assert {reason.code for reason in reasons} <= {"erratum"}

    @pytest.mark.parametrize("number", [e.index for e in in_force.tables().errata if e.variant == NAME])
    def test_each_erratum_refuses_something_that_is_not_specialised(number):
        erratum = next(e for e in in_force.tables().errata if e.variant == NAME and e.index == number)
        asked = {title: problem(**sizes) for title, sizes in {**LEGAL, **ILLEGAL}.items()}
        refused = [title for title, p in asked.items() if erratum.applies({**p.facts(), "arch": "sm90"}, p.target)]
        if not refused and erratum.toolchain:
            pytest.skip(f"not about triton {triton.__version__}")
        assert refused and all(outcome(title).verdict != SPECIALIZED for title in refused)

    @pytest.mark.parametrize(
        "sizes", [dict(), dict(d=128), dict(d=256), dict(d=128, causal=True, window=(64, 0), softcap=9.0, lse=True)]
    )
    def test_every_config_is_specialised_and_declared(sizes):
        variant, p = variants()[NAME], problem(**sizes)
        configs = variant.legal_configs(p)
        assert configs
        for config in configs:
            (build,) = variant.builds(p, config)
            found = resources(build)
            assert found.threads == 384 and mentions(found, r"\.reqntid 384"), "three warp groups from num_warps=4"
            assert {40, 232} <= set(found.setmaxnreg), "the producer hands its registers to the consumers"
            asked = instructions(found)
            assert asked["wgmma"] and asked["TMA load"] and asked["mbarrier"]
            assert found.spills == 0 and not found.ptxas_warnings
            assert found.shared <= variant.requires.shared_memory(p, config) <= found.shared + 128

    def test_other_architectures_are_refused():
        for arch in ("sm80", "sm89", "sm100", "sm120"):
            reasons = variants()[NAME].reasons(problem().on(Target.named(arch)))
            assert [r.field for r in reasons] == ["arch"], arch

    @pytest.mark.skipif(not PINNED, reason="the page is about the oldest Triton")
    def test_the_page_is_current():
        text = PAGE.read_text(encoding="utf-8")
        assert with_forms(text) == text, "python tests/support/autows_forms.py --write"
