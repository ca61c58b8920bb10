"""Kernels of others, as variants to be timed beside ours and never dispatched to: tables leave `peer.*` out.

cuDNN, FlashAttention-2 and cuBLAS are the torch_* variants already. Here: FlashAttention-3 where FA3_LIBRARY names a
build of it (vLLM's, whose op takes only the variable-length form), and FlexAttention where PEER_FLEX=1 (it compiles for
seconds a shape).

    kreg tune attention --grid paper18 --plugin benchmarks/peers.py
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import torch

from registry import Design, Requires, Variant

HALVES = ("float16", "bfloat16")
UNLIMITED = -1


class Packed:
    """The variable-length form of one set of tensors: [B * S, H, D]. Made once, so that copies are not timed."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.q, self.k, self.v = (t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in (q, k, v))
        self.starts = [self._starts(t) for t in (q, k)]

    def _starts(self, tensor: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = tensor.shape
        return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=tensor.device)


def fa3_prepare(problem, config):
    held: dict[tuple[int, ...], Packed] = {}

    causal, return_lse = problem.causal, problem.lse

    def launch(q, k, v, *, scale):
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        packed = held.get(key)
        if packed is None:
            held.clear()
            packed = held[key] = Packed(q, k, v)
        out, lse = torch.ops._vllm_fa3_C.fwd(
            packed.q, packed.k, packed.v, None, None, None, None, packed.starts[0], packed.starts[1], None, None, None,
            q.shape[2], k.shape[2], None, None, None, None, None, None, None, None, None, scale, causal, UNLIMITED,
            UNLIMITED, 0.0, True, None, 1, None, 0, None, 1, 0, None,
        )[:2]  # fmt: skip
        out = out.view(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        return out, lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1) if return_lse else None

    return launch


def fa3(q, k, v, *, causal, return_lse, scale, config):
    return fa3_prepare(SimpleNamespace(causal=causal, lse=return_lse), config)(q, k, v, scale=scale)


@functools.cache
def _flex(batch_heads: int, seqlen_q: int, seqlen_k: int, causal: bool):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        offset = seqlen_k - seqlen_q
        mask = create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, seqlen_q, seqlen_k, device="cuda")
    return torch.compile(functools.partial(flex_attention, block_mask=mask, enable_gqa=True), dynamic=False)


def flex(q, k, v, *, causal, scale, config):
    compiled = _flex(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], causal)
    return compiled(q, k, v, scale=scale), None


def registry_variants():
    found = []
    library = os.environ.get("FA3_LIBRARY")
    if library:
        torch.ops.load_library(library)
        requires = Requires(
            arch=("sm90",), dtypes=HALVES, head_dim=(64, 256), head_dim_multiple=64, layouts=("bhsd", "bshd"),
            causal=True, gqa=True, lse=True, cross_length=True, base_alignment=16, stride_alignment=16,
        )  # fmt: skip
        found.append(
            Variant("peer.fa3", op="attention", run=fa3, prepare=fa3_prepare, requires=requires,
                    design=Design(warp_groups=2, pipeline_stages=2, warp_specialized=True, dsl="cuda"),
                    summary="FlashAttention-3 (vLLM's build, variable-length op; inputs packed outside of the timing)")
        )  # fmt: skip
    if os.environ.get("PEER_FLEX") == "1":
        requires = Requires(
            arch=("sm80+",), dtypes=HALVES, head_dim=(16, 256), head_dim_multiple=16, layouts=("bhsd", "bshd"),
            causal=True, gqa=True, cross_length=True,
        )  # fmt: skip
        found.append(
            Variant("peer.flex", op="attention", run=flex, requires=requires, design=Design(dsl="triton"),
                    summary="torch.compile(flex_attention)")
        )  # fmt: skip
    return found
