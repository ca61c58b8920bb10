"""The gradient of sinks in Triton, for backward passes that leave a delta of each row.

A sink is a score without a value: its gradient is -sum(P_sink * delta) over all rows of its head.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total_q"])
def sink_pass(lse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, total_q, BLOCK: tl.constexpr):
    """The gradient of one head's sink, from all rows in order."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    lse_ptr += head.to(tl.int64) * total_q
    delta_ptr += head.to(tl.int64) * total_q
    sum_B = tl.zeros([BLOCK], tl.float32)
    for first in range(0, total_q, BLOCK):
        row_B = first + tl.arange(0, BLOCK)
        lse_B = tl.load(lse_ptr + row_B, mask=row_B < total_q, other=float("inf"))
        delta_B = tl.load(delta_ptr + row_B, mask=row_B < total_q, other=0.0)
        p_B = tl.exp2((sink - lse_B) * 1.4426950408889634)
        sum_B -= tl.where(lse_B == float("-inf"), 0.0, p_B * delta_B)
    tl.store(dsinks_ptr + head, tl.sum(sum_B, 0).to(dsinks_ptr.dtype.element_ty))
