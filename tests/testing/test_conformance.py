"""Every variant that may run on this machine, on every device that it claims, held to what its op promises.

All tests are generated from declarations: a new variant is tested because it exists. REGISTRY_CONFORMANCE_LEVEL=full
runs more problems, and every declared and shipped config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import registry
from registry.ops.known import all_ops
from registry.testing import Check, checks_for, checks_of_op, places

LEVEL = os.environ.get("REGISTRY_CONFORMANCE_LEVEL", "quick")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
REPEATS = {"cpu": 3, "cuda": 200}


def generated() -> Iterator[Any]:
    for name, variant in sorted(registry.variants().items()):
        for target in places(variant):
            device = "cpu" if target.arch == "cpu" else "cuda"
            marks = [pytest.mark.gpu, pytest.mark.timeout(180)] if device == "cuda" else []
            for check in checks_for(variant, target, LEVEL, repeat=REPEATS[device]):
                yield pytest.param(check, id=f"{name}-{device}-{check.name}", marks=marks)


def generated_for_ops() -> Iterator[Any]:
    for device in DEVICES:
        for op in all_ops():
            for check in checks_of_op(op, device):
                yield pytest.param(
                    check, id=f"{op}-{device}-{check.name}", marks=[pytest.mark.gpu] * (device == "cuda")
                )


@pytest.mark.parametrize("check", list(generated()))
def test_variant(check: Check) -> None:
    case = check.run()
    assert case.passed, case.detail


@pytest.mark.parametrize("check", list(generated_for_ops()))
def test_op(check: Check) -> None:
    case = check.run()
    assert case.passed, case.detail
