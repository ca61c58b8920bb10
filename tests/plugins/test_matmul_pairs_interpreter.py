"""The second kernel of gluon_matmul_pairs, which adds up the sums of the ranges of K, under Triton's interpreter.

As test_triton_fa2_interpreter.py, this file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    import interpreter  # noqa: F401 (mends what the interpreter lacks)

    @pytest.mark.parametrize(
        ("m", "n", "ways", "swap", "high", "width"),
        [
            (130, 72, 2, False, 128, 96),
            (200, 264, 5, True, 128, 112),
            (129, 40, 33, True, 256, 48),
            (300, 8, 17, False, 128, 128),
        ],
    )
    def test_sums_are_added_and_turned(m, n, ways, swap, high, width):
        """Rows and columns beyond the product's hold NaN, and so does C where nobody writes."""
        from registry import Target
        from registry.ops.matmul.problem import MatmulProblem
        from registry.plugins.gluon_matmul_pairs import config, host
        from registry.plugins.gluon_matmul_pairs.parts import COLUMNS, ROWS, add_parts

        problem = MatmulProblem.of_shape(Target.named("H200"), m=m, n=n, k=1024, layout="nt")
        rows, columns = host.plane(problem, config(high, width, 1, swap, ways=ways))
        first, second = (n, m) if swap else (m, n)
        assert rows >= first and columns >= second and not rows % ROWS.value and not columns % COLUMNS.value
        torch.manual_seed(0)
        sums = torch.full((ways, rows, columns), float("nan"))
        sums[:, :first, :second] = torch.randn(ways, first, second)
        c = torch.full((m + 1, n), float("nan"), dtype=torch.bfloat16)
        grid = (-(-first // ROWS.value), -(-second // COLUMNS.value))
        at_once = min(16, 1 << (ways - 1).bit_length())
        add_parts[grid](sums, c, m, n // 8, ways, columns, rows * columns, SWAP=swap, AT_ONCE=at_once, PDL=False)
        want = sums[:, :first, :second].sum(0)
        assert torch.allclose(c[:m].float(), want.t() if swap else want, rtol=1e-2, atol=1e-2)
        assert c[m].isnan().all()
