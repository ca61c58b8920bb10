"""The conformance kit is believed because it fails what is wrong: every mutant, in quick mode, and no original."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mutants import MUTANTS, ORIGINALS, Mutant, original

from registry.testing import check_variant, checks_for


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ORIGINALS)
def test_a_right_kernel_passes(kernel: str) -> None:
    report = check_variant(original(kernel))
    assert report.passed, str(report)
    assert report.worst < 1.0


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    checks = checks_for(mutant.variant())
    assert any(not check.run().passed for check in checks), f"all {len(checks)} checks passed"


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 40
    assert {mutant.kernel for mutant in MUTANTS} == set(ORIGINALS)
