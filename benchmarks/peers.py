"""Kernels of others, as variants to be timed beside ours and never dispatched to: tables leave `peer.*` out.

cuDNN, FlashAttention-2 and cuBLAS are the torch_* variants already. Here:

peer.fa3         FlashAttention-3, where FA3_LIBRARY names a build of it (vLLM's, which takes only the packed form)
peer.flex        torch.compile(flex_attention). It compiles for seconds a shape, so only on the shapes of the paper18
                 grid; PEER_FLEX=all for all shapes, PEER_FLEX=0 for none
peer.fa4         FlashAttention-4, where flash_attn.cute can be imported
peer.flashinfer  FlashInfer's prefill of a single sequence, where flashinfer can be imported

The last two are written from their documentation and were never run by us: the gate of `kreg tune` decides about them.

    kreg tune attention --grid paper18 --plugin benchmarks/peers.py
"""

from __future__ import annotations

import functools
import importlib
import os

import torch

from registry import Design, Reason, Requires, Variant, attention
from registry.tuning.grids import grid

HALVES = ("float16", "bfloat16")
UNLIMITED = -1
MOST_SETS = 32


class Packed:
    """Dense copies in the order [batch, row, head, width], made once so that copying is not timed."""

    def __init__(self, q, k, v):
        self.originals = (q, k, v)  # held, so that their addresses stay theirs
        self.q, self.k, self.v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        self.flat = tuple(t.flatten(0, 1) for t in (self.q, self.k, self.v))
        self.starts = [self._starts(t) for t in (q, k)]

    def _starts(self, tensor):
        batch, _, length, _ = tensor.shape
        return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=tensor.device)


def on_packed(call):
    """A launch that hands `call(packed, scale) -> (out, lse)` the packed form of each set of tensors that it meets."""
    held: dict[tuple[int, ...], Packed] = {}

    def launch(q, k, v, *, scale):
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        packed = held.get(key)
        if packed is None:
            if len(held) >= MOST_SETS:
                held.clear()
            packed = held[key] = Packed(q, k, v)
        out, lse = call(packed, scale)
        return out.view(*packed.q.shape[:3], v.shape[3]).transpose(1, 2), lse

    return launch


def fa3_prepare(problem, config):
    causal, return_lse, nothing = problem.causal, problem.lse, (None,) * 9

    def call(packed, scale):
        (batch, rows, heads, _), keys = packed.q.shape, packed.k.shape[1]
        masks = (causal, UNLIMITED, UNLIMITED, 0.0)
        packing = (*packed.flat, *nothing[:4], *packed.starts, *nothing[:3], rows, keys)
        rest = (*nothing, scale, *masks, True, None, 1, None, 0, None, 1, 0, None)
        out, lse = torch.ops._vllm_fa3_C.fwd(*packing, *rest)[:2]
        return out, lse.view(heads, batch, rows).transpose(0, 1) if return_lse else None

    return on_packed(call)


def fa4_prepare(problem, config):
    attend, causal = importlib.import_module("flash_attn.cute").flash_attn_func, problem.causal

    def call(packed, scale):
        found = attend(packed.q, packed.k, packed.v, softmax_scale=scale, causal=causal)
        return (found[0] if isinstance(found, tuple) else found), None

    return on_packed(call)


def flashinfer_prepare(problem, config):
    attend = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    causal = problem.causal

    def call(packed, scale):
        q, k, v = packed.q[0], packed.k[0], packed.v[0]
        return attend(q, k, v, causal=causal, kv_layout="NHD", sm_scale=scale), None

    return on_packed(call)


def flashinfer_rule(problem, config):
    if problem.batch != 1:
        yield Reason("range", "batch", problem.batch, 1)


def flex_prepare(problem, config):
    """Compiles here, on tensors like those to come, so that no launch does."""
    import torch._inductor.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it stops compiling one function again after a few shapes
    torch._inductor.config.compile_threads = 1  # one kernel: its pool of processes would start for nothing
    mask, offset = None, problem.seqlen_k - problem.seqlen_q
    if problem.causal:
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + offset, None, None, problem.seqlen_q, problem.seqlen_k, device="cuda"
        )
    grouped = problem.heads_q != problem.heads_kv
    attend = functools.partial(flex_attention, block_mask=mask, enable_gqa=grouped)
    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    like = [
        torch.empty_strided(fact.shape, fact.strides, dtype=getattr(torch, problem.dtype), device="cuda")
        for fact in problem.operands
        if fact.name in ("q", "k", "v")
    ]
    compiled(*like, scale=problem.head_dim**-0.5)
    return lambda q, k, v, *, scale: (compiled(q, k, v, scale=scale), None)


@functools.cache
def _worth_compiling() -> frozenset[tuple[int, ...]]:
    found = (case.sizes for case in grid("attention", "paper18"))
    return frozenset((s.get("b", 1), s["hq"], s["hq"], s["s"], s["s"], s["d"]) for s in found)


def flex_rule(problem, config):
    p = problem
    shape = (p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim)
    if p.head_dim not in (64, 128, 256):
        yield Reason("range", "head_dim", p.head_dim, (64, 128, 256))
    elif os.environ.get("PEER_FLEX") != "all" and shape not in _worth_compiling():
        yield Reason("range", "shape", shape, "the paper18 grid", "PEER_FLEX=all")


def _peer(name, prepare, dsl, summary, **requires):
    def run(q, k, v, *, scale, config, causal=False, return_lse=False):
        problem, _ = attention.problem_of(q, k, v, causal=causal, return_lse=return_lse)
        return prepare(problem, config)(q, k, v, scale=scale)

    claims = Requires(dtypes=HALVES, layouts=("bhsd", "bshd"), causal=True, gqa=True, cross_length=True, **requires)
    traits = {"warp_groups": 2, "pipeline_stages": 2, "warp_specialized": True} if name == "fa3" else {}
    design = Design(dsl=dsl, **traits)
    return Variant(
        f"peer.{name}", op="attention", run=run, prepare=prepare, requires=claims, design=design, summary=summary
    )


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # not installed, or not for this machine
        return False
    return True


def registry_variants():
    aligned = {"base_alignment": 16, "stride_alignment": 16, "head_dim_multiple": 64}
    to_256, to_128 = {"head_dim": (64, 256)}, {"head_dim": (64, 128)}
    ampere, by_64 = {"arch": ("sm80+",)}, {"head_dim_multiple": 64}
    found = []
    if library := os.environ.get("FA3_LIBRARY"):
        torch.ops.load_library(library)
        text = "FlashAttention-3 (vLLM's build, variable-length op; packed beforehand)"
        found.append(_peer("fa3", fa3_prepare, "cuda", text, arch=("sm90",), lse=True, **to_256, **aligned))
    if os.environ.get("PEER_FLEX") != "0":
        text = "torch.compile(flex_attention)"
        found.append(_peer("flex", flex_prepare, "triton", text, rule=flex_rule, **ampere, **to_256, **by_64))
    if _importable("flash_attn.cute"):
        text = "FlashAttention-4 (packed beforehand)"
        found.append(_peer("fa4", fa4_prepare, "cutedsl", text, arch=("sm90", "sm100"), **to_128, **aligned))
    if _importable("flashinfer"):
        text = "FlashInfer's single prefill (packed beforehand)"
        claims = {"rule": flashinfer_rule, **ampere, **to_256, **aligned}
        found.append(_peer("flashinfer", flashinfer_prepare, "cuda", text, **claims))
    return found
