"""torch_one_group: rows behind the only group are zeroes, and ends that lie are told of, under Triton's interpreter;
its launch compiled for GPUs that are not here.

Its products are torch's, which the kit holds against the oracle on a CPU. This file runs itself once more, with
TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    from registry.ops.grouped_mm.offsets import OFFSETS
    from registry.plugins.torch_one_group.behind import PROGRAMS, zero_behind
    from registry.testing import interpreted

    assert not interpreted.mend()

    @pytest.mark.parametrize("columns", [5, 1030])
    @pytest.mark.parametrize("end", [-3, 0, 1, PROGRAMS + 2, PROGRAMS + 7, PROGRAMS + 8])
    def test_rows_behind_the_end(end, columns):
        rows = PROGRAMS + 7
        wide = torch.full((rows, columns + 3), float("nan"), dtype=torch.float16)
        out = wide[:, :columns].fill_(1)
        OFFSETS.taken()
        zero_behind(out, torch.tensor([end], dtype=torch.int32))
        kept = min(max(end, 0), rows)
        assert bool((out[:kept] == 1).all()) and not out[kept:].any()
        assert bool(wide[:, columns:].isnan().all())
        assert bool(OFFSETS.taken()) == (end != kept)

else:
    pytest.importorskip("triton")

    from registry.plugins.torch_one_group.behind import BLOCK, _zero_behind
    from registry.toolbox.builds import Build, compile_build

    @pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
    def test_the_launch_compiles(arch):
        sizes = dict.fromkeys(("rows", "columns", "stride"), "i32")
        pointers = {"end_ptr": "*i32", "c_ptr": "*bf16", "word_ptr": "*i32"}
        made = compile_build(Build(_zero_behind, {**pointers, **sizes}, {"BLOCK": BLOCK}), arch)
        assert made.asm["cubin"]
