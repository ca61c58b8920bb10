"""The conformance kit is believed because it fails what is wrong: every mutant, in quick mode, and no original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mutants import MUTANTS, ORIGINALS, Mutant, original

import registry.testing
from registry import Variant
from registry.ops.parts import trials
from registry.ops.parts.trials import Drawn
from registry.testing import check_variant, checks_for


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def drawn_once() -> Iterator[None]:
    """A mutant claims what its original claims, and has its name: so it is tried on the same problems."""
    drawn: dict[str, Drawn] = {}

    def draw(variant: Variant, *rest: Any) -> Drawn:
        if variant.name not in drawn:
            drawn[variant.name] = trials.draw(variant, *rest)
        return drawn[variant.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry.testing, "draw_trials", draw)
        yield


@pytest.mark.parametrize("kernel", ORIGINALS)
def test_a_right_kernel_passes(kernel: str) -> None:
    report = check_variant(original(kernel), repeat=10)
    assert report.passed, str(report)
    assert report.worst < 1.0


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    checks = checks_for(mutant.variant())
    assert any(not check.run().passed for check in checks), f"all {len(checks)} checks passed"


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 40
    assert {mutant.kernel for mutant in MUTANTS} == set(ORIGINALS)
