"""Warming on a real GPU: what was warmed can be captured at once."""

from __future__ import annotations

import pytest
import torch

import registry
from registry.errors import CaptureError
from registry.warming import warm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def _compiling_variant():
    """A variant of ours that compiles, and may run here."""
    q = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
    decision = registry.attention.explain(q, q, q)
    ours = [c.variant for c in decision.candidates if c.legal and registry.variants()[c.variant].builds]
    if not ours:
        pytest.skip("no variant that compiles is legal on this GPU")
    return ours[0]


def test_first_call_of_a_warmed_problem_can_be_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    registry.forget_plans()
    with registry.use(_compiling_variant()):
        (found,) = warm(["attention b=1,hq=2,s=320,d=64,causal"], jobs=2)
        assert (found.kernels, found.launched, found.error) == (1, True, "")
        q, k, v = torch.randn(3, 1, 2, 320, 64, device="cuda").to(torch.bfloat16).unbind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = registry.attention(q, k, v, causal=True)
        graph.replay()
        expected = registry.attention.reference(q, k, v, causal=True)
        assert (out.double() - expected).norm() / expected.norm() < 1e-2


def test_first_call_of_a_cold_problem_cannot():
    registry.forget_plans()
    with registry.use(_compiling_variant()):
        q, k, v = torch.randn(3, 1, 2, 352, 64, device="cuda").to(torch.bfloat16).unbind()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError):
            registry.attention(q, k, v, causal=True)


def test_warming_in_a_capture_is_refused():
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError):
        warm(["attention s=128,d=64"])
