"""docs/trust.md promises nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
A_TEST = r"`(tests/[\w/]+\.py)::(test_\w+)`"


def test_the_tests_that_the_page_names_are_there():
    named = re.findall(A_TEST, PAGE)
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert named and not missing
    assert len(named) == PAGE.count("::")  # no test is named in a way that is overlooked here


def test_every_promise_names_a_test():
    promises = re.findall(r"^- (.*(?:\n  .*)*)", PAGE, re.MULTILINE)
    assert len(promises) > 40
    assert [promise for promise in promises if not re.search(A_TEST, promise)] == []
