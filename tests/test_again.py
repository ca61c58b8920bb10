"""What needs a process of its own is run once more here: see tests/support/again.py."""

from __future__ import annotations

import pytest
from again import INTERPRETED, files_that, needs_newest_triton, run_interpreted, run_with_newest_triton

pytestmark = [
    pytest.mark.timeout(2400),  # minutes of work in one test, on a machine that may be busy
    pytest.mark.skipif(INTERPRETED, reason="this is the run under the interpreter"),
]

PARTS = 2
"""So that both cores have a share; each more costs a collection of its own."""


@pytest.mark.slow(25)
@pytest.mark.parametrize("part", range(PARTS))
def test_under_the_interpreter(part):
    pytest.importorskip("triton")
    run_interpreted(*files_that("from again import INTERPRETED")[part::PARTS])


@pytest.mark.slow(30)
@needs_newest_triton
def test_with_the_newest_triton():
    run_with_newest_triton(*files_that("WITH_NEWEST_TRITON = "))


@pytest.mark.slow(9)
@needs_newest_triton
def test_the_interpreter_of_the_newest_triton():
    interpreted = set(files_that("from again import INTERPRETED"))
    run_with_newest_triton(*sorted(interpreted & set(files_that("WITH_NEWEST_TRITON = "))), TRITON_INTERPRET="1")
