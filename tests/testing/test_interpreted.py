"""Triton's interpreter as the kit mends it, at both ends of Triton's range. Runs itself once more, interpreted."""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

import registry
from registry import InvalidArgument, Requires, Target, Variant
from registry.contract.target import interpreting
from registry.testing import check_variant, interpreted

WITH_NEWEST_TRITON = r"bfloat16"

if not INTERPRETED:

    def test_it_is_asked_for_before_triton_is_imported(monkeypatch):
        pytest.importorskip("triton")
        monkeypatch.delenv(interpreted.VARIABLE, raising=False)
        with pytest.raises(InvalidArgument, match="TRITON_INTERPRET=1 in the environment from the start"):
            interpreted.ask_for_it()

    def test_an_interpreter_that_is_not_known_is_a_notice(monkeypatch):
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.delattr(interpreter, "TensorHandle")
        for kind in (interpreter.tl.core.block_type, interpreter.tl.core.tensor):  # kernels are compiled here again
            monkeypatch.setattr(kind, "__init__", kind.__init__)
        interpreted.mend.cache_clear()
        try:
            left = interpreted.mend()
        finally:
            interpreted.mend.cache_clear()
        assert len(left) == 2 and all("TensorHandle" in text for text in left)

    def test_cpu_tensors_stand_for_those_of_the_gpu_whose_kernels_are_interpreted():
        here = torch.device("cpu")
        x = torch.randn(64, 64)
        with interpreting(Target.named("H100")):
            assert Target.of(here).name == "H100"
            decision = registry.matmul.explain(x, x)
            assert registry.matmul.variants[decision.variant].design.dsl == "triton"
            refused = {c.variant: c.reasons for c in decision.candidates}
            assert "without the GPU" in str(refused["torch_matmul"]) and refused["gluon_matmul_ws"]
            assert registry.matmul.explain(x, x, target=Target.named("cpu")).variant == "torch_matmul"
        assert Target.of(here).arch == "cpu" and registry.matmul.explain(x, x).variant == "torch_matmul"

else:
    import interpreter  # noqa: F401 (it mends Triton's)
    import triton
    import triton.language as tl

    @triton.jit
    def _arithmetic(x_ptr, y_ptr, out_ptr, count, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        total = tl.zeros([SIZE], tl.bfloat16)
        for _ in range(count):  # a scalar argument as a bound
            total += tl.load(x_ptr + at) * tl.load(y_ptr + at)
        total = tl.where(total < 0.0, -total, total) + tl.full([SIZE], 3, tl.int32).to(tl.bfloat16)
        tl.store(out_ptr + at, total / 2 - 1.5)

    @triton.jit
    def _sums(x_ptr, out_ptr, SIZE: tl.constexpr):
        x = tl.load(x_ptr + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
        tl.store(out_ptr + tl.arange(0, SIZE), tl.max(x, 1) + tl.min(x, 1) + tl.sum(x, 1))

    @triton.jit
    def _rounded(x_ptr, out_ptr, SIZE: tl.constexpr):
        tl.store(out_ptr + tl.arange(0, SIZE), tl.load(x_ptr + tl.arange(0, SIZE)).to(tl.bfloat16))

    def test_arithmetic_of_bfloat16():
        x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
        out = torch.empty_like(x)
        _arithmetic[(1,)](x, y, out, 3, 64)
        total = torch.zeros_like(x)
        for _ in range(3):
            total = total + x * y
        want = (torch.where(total < 0, -total, total) + torch.tensor(3.0).bfloat16()) / 2 - 1.5
        torch.testing.assert_close(out, want, rtol=2.0**-7, atol=2.0**-7)

    def test_reductions_of_bfloat16():
        x = torch.randn(32, 32).bfloat16()
        out = torch.empty(32, dtype=torch.bfloat16)
        _sums[(1,)](x, out, 32)
        want = x.double().amax(1) + x.double().amin(1) + x.double().sum(1)
        torch.testing.assert_close(out.double(), want, rtol=2.0**-6, atol=0.1)

    def test_bfloat16_is_rounded_to_the_nearest():
        x = torch.cat([torch.randn(1020), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, float("inf"), float("nan")])])
        out = torch.empty(1024, dtype=torch.bfloat16)
        _rounded[(1,)](x, out, 1024)
        torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)

    def _calls_the_registry_again(a, b, *, config):
        return registry.matmul(a, b, variant="triton_matmul")

    def test_a_variant_may_call_the_registry_again():
        requires = Requires(arch=("sm90",), dtypes=("float16",), layouts=("nn",))
        again = Variant("acme.again", op="matmul", run=_calls_the_registry_again, requires=requires)
        report = check_variant(again, Target.named("H100"), only=lambda name: not name.startswith("right"))
        assert report.passed, str(report)
        assert sum(case.error is not None for case in report.cases) > 3
