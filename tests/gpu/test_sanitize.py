"""tests/gpu/sanitize.py without a GPU: what it would launch, that operands move as they are, and how it reads logs."""

from __future__ import annotations

import sys

import pytest
import torch
from ran import printed

pytest.importorskip("triton")

import sanitize

from registry import Target
from registry.ops.known import op_named
from registry.ops.parts import memory

pytestmark = pytest.mark.usefixtures("quick_python")

SCRIPT = sanitize.__file__


H200 = Target.named("H200")


@pytest.fixture(scope="module")
def drawn():
    """The trials of each kernel of ours."""
    return [(variant, sanitize.trials(variant, H200, 10)) for variant in sanitize.chosen("*")]


def test_every_kernel_of_ours_has_trials(drawn):
    assert {v.name for v, _ in drawn} >= {
        "gluon_fa3",
        "triton_fa2",
        "triton_fa2_backward",
        "triton_autows",
        "triton_matmul",
    }
    assert not any(v.name.startswith("torch_") for v, _ in drawn)
    for variant, found in drawn:
        assert 5 <= len(found) <= 10, variant.name
        assert all(sanitize.kernels(variant, trial) for trial in found), variant.name


def test_operands_keep_their_form_and_values(monkeypatch, drawn):
    """Moving is from CPU to CPU here; the problem must stay the one that was drawn."""
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(memory, "GUARD_BYTES", 0)
    for variant, trials in drawn:
        op = op_named(variant.op)
        kit = op.conformance
        for number, trial in enumerate(trials):
            made = kit.make(trial.spec, torch.device("cpu"), number)
            moved = sanitize.Moved(16 if variant.name in sanitize.WHOLE_UNITS else 1).sample(made)
            for one, other in zip(made.tensors, moved.tensors, strict=True):
                assert one.data_ptr() != other.data_ptr() and one.stride() == other.stride()
                torch.testing.assert_close(other.double(), one.double(), rtol=0, atol=0, equal_nan=True)
            with sanitize.spec_conditions(trial.spec):
                problem = op.problem_of(*moved.tensors, target=H200, **moved.arguments)[0]
            assert problem.facts() == trial.problem.facts(), trial.name


MEMCHECK = """\
========= COMPUTE-SANITIZER
started: float16 causal
========= Invalid __global__ read of size 4 bytes
=========     at attention_forward+0x1230 in forward.py:12
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f11c5c00080 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at 0x1230 in attention_forward
=========     by thread (1,0,0) in block (0,0,0)
done: float16 causal
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at matmul_ws+0x2a30 in k.py:1 and Read access at matmul_ws+0x10 [9 hazards]
=========
========= Warning: Race reported between Read access at 0x00000140 in other_kernel and Write access at 0x150 in other_kernel
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (MEMCHECK, [("attention_forward", "Invalid __global__ read of size 4 bytes")] * 2),
        (
            RACECHECK,
            [
                ("matmul_ws", "Error: Race reported between Write access and Read access"),
                ("?", "Warning: Race reported between Read access and Write access"),
            ],
        ),
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", []),
    ],
)
def test_logs_are_summed_up_by_kernel(log, found):
    assert list(sanitize.reports_in(log.splitlines(), ["attention", "attention_forward", "matmul_ws"])) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_lists():
    assert printed(sys.executable, SCRIPT) == "skipped: there is no CUDA GPU\n"
    listed = printed(sys.executable, SCRIPT, "--dry-run", "--variant", "triton_fa2*", "--cases", "3").splitlines()
    assert len(listed) == 6 and all("triton_fa2" in line for line in listed)
