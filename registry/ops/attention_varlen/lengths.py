"""Lengths and page numbers, which live on the device: what they must be, and what happens where they are not.

On a CPU every call looks at them and raises. On a GPU nobody waits for them: kernels hold them to their bounds, so that
nothing is read or written where no operand is, and leave a bit in a word that `registry.check()` raises for. A variant
whose kernels do both claims `checks_lengths`; before any other the op launches one small kernel (bounds.py), whose
lengths are within bounds whatever was given. Results of sequences that lied are unspecified.

What holds of a kernel that checks, with T rows of q and at most N keys a sequence (rows of packed k, slots of a cache,
a block table's width times the page size)::

    begin = clamp(cu_seqlens[b], 0, T);  end = clamp(cu_seqlens[b + 1], begin, T)      # likewise for packed keys
    keys = clamp(seqused_k[b], 0, N);    page = clamp(block_table[b, i], 0, pages - 1)
"""

from __future__ import annotations

from typing import Any

import torch

from registry.errors import InvalidArgument
from registry.ops.tensors import is_virtual
from registry.toolbox.complaints import Complaint

LENGTHS = Complaint(
    "attention_varlen: lengths",
    (
        "cu_seqlens_q does not rise from 0 to the rows of q",
        "cu_seqlens_k does not rise from 0 to the rows of k",
        "seqused_k has a length below 0, or above what the cache or the block table can hold",
        "a sequence has more queries than max_seqlen_q",
        "a sequence has more keys than max_seqlen_k",
        "block_table names a page that is not there",
    ),
)
BAD_CU_SEQLENS_Q, BAD_CU_SEQLENS_K, BAD_SEQUSED_K, ABOVE_MAX_Q, ABOVE_MAX_K, BAD_TABLE = (1 << i for i in range(6))
"""The bits of `LENGTHS.word(device)`."""


def refuse_lies(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    given: dict[str, Any],
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Raise InvalidArgument for lengths that cannot be right, on a CPU, where they can be seen at once."""
    if not q.is_cpu or any(map(is_virtual, (q, cu_seqlens_q))):
        return
    _check_rising("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
    if given["cu_seqlens_k"] is not None:
        _check_rising("cu_seqlens_k", given["cu_seqlens_k"], k.shape[0], "max_seqlen_k", max_seqlen_k)
        return
    table, seqused = given["block_table"], given["seqused_k"].tolist()
    holds = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    for b, length in enumerate(seqused):
        if not 0 <= length <= holds:
            raise InvalidArgument("seqused_k", f"{length} keys in sequence {b}", f"0 to {holds}, which it can hold")
        if length > max_seqlen_k:
            raise InvalidArgument("max_seqlen_k", int(max_seqlen_k), f"at least {length}, as sequence {b} has")
        if table is not None and length:
            used = table[b, : -(-length // k.shape[1])].tolist()
            if used and not 0 <= min(used) <= max(used) < k.shape[0]:
                bad = next(page for page in used if not 0 <= page < k.shape[0])
                raise InvalidArgument("block_table", f"page {bad} in sequence {b}", f"0 to {k.shape[0] - 1}")


def _check_rising(name: str, cu_seqlens: torch.Tensor, rows: int, maximum_name: str, maximum: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != rows or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        shown = str(bounds) if len(bounds) <= 9 else f"[{', '.join(map(str, bounds[:8]))}, ..., {bounds[-1]}]"
        raise InvalidArgument(name, shown, f"numbers that rise from 0 to {rows}, the rows there are")
    longest = max((b - a for a, b in zip(bounds, bounds[1:], strict=False)), default=0)
    if longest > maximum:
        raise InvalidArgument(maximum_name, int(maximum), f"at least {longest}, as the longest sequence has")
