"""The second kernel of gluon_matmul_pairs, which adds up the sums of the ranges of K, under Triton's interpreter.

As test_triton_fa2_interpreter.py, this file runs itself once more in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    import interpreter  # noqa: F401 (mends what the interpreter lacks)

    @pytest.mark.parametrize(("bias", "activation"), [(None, ""), (torch.bfloat16, "relu"), (torch.float32, "silu")])
    @pytest.mark.parametrize(
        ("m", "n", "chosen"),
        [
            (130, 72, dict(high=128, width=96, pair=1, ways=2)),
            (200, 264, dict(high=128, width=104, pair=1, swap=True, ways=5)),
            (129, 40, dict(high=256, width=48, pair=2, swap=True, ways=33)),
            (300, 8, dict(high=192, width=128, pair=2, ways=17)),
            (2600, 1016, dict(high=128, width=96, pair=2, ways=3, full=True)),
            (1100, 2600, dict(high=64, width=136, pair=1, swap=True, ways=4, turns=True, full=True)),
        ],
    )
    def test_sums_are_added_and_turned(m, n, chosen, bias, activation):
        """Of the tiles of the last round; what lies beyond the product holds NaN, and so does C where nobody writes."""
        from registry import Target
        from registry.ops.matmul.problem import MatmulProblem
        from registry.ops.parts.products import activate
        from registry.plugins.gluon_matmul_pairs import config, host
        from registry.plugins.gluon_matmul_pairs.parts import COLUMNS, ROWS, add_parts

        problem = MatmulProblem.of_shape(Target.named("H200"), m=m, n=n, k=4096, layout="nt")
        one = config(**chosen)
        (high, wide), (full, rest), ways = host.pairs(problem, one), host.rounds(problem, one), one["WAYS"]
        tall, broad = one["HIGH"] * (1 + (one["PAIR"] == 2)), one["WIDTH"] * (1 + (one["PAIR"] == 1))
        assert (full > 0) == chosen.get("full", False) and rest and not tall % ROWS.value and not broad % COLUMNS.value
        first, second = (n, m) if one["SWAP"] else (m, n)
        torch.manual_seed(0)
        want = torch.full((high * tall, wide * broad), float("nan"))
        sums = torch.full((ways, rest, tall, broad), float("nan"))
        for place, (row, column) in enumerate(_in_order(high, wide, one["GROUP"])[full:]):
            down, across = min(tall, first - row * tall), min(broad, second - column * broad)
            sums[:, place, :down, :across] = found = torch.randn(ways, down, across)
            want[row * tall :, column * broad :][:down, :across] = found.sum(0)
        want = want[:first, :second].t() if one["SWAP"] else want[:first, :second]
        added = torch.randn(n).to(bias or torch.float32)
        want = activate(want + added.float(), activation) if bias else want
        c = torch.full((m + 1, n), float("nan"), dtype=torch.bfloat16)
        grid = (tall * broad // (ROWS.value * COLUMNS.value), rest)
        sizes = (m, n // 8, high, wide, one["GROUP"], full, ways, tall, broad)
        at_once = min(16, 1 << (ways - 1).bit_length())
        ends = {"BIAS": bias is not None, "ACT": activation}
        add_parts[grid](sums, c, added, *sizes, SWAP=one["SWAP"], AT_ONCE=at_once, PDL=False, **ends)
        assert torch.allclose(c[:m].float(), want, rtol=1e-2, atol=1e-2, equal_nan=True)
        assert c[m].isnan().all() and (full or not c[:m].isnan().any())

    def _in_order(high, wide, group):
        """Pairs of tiles as kernels number them: in groups of so many rows, column by column."""
        groups = [range(first, min(first + group, high)) for first in range(0, high, group)]
        return [(row, column) for rows in groups for column in range(wide) for row in rows]
