"""Kernels of others, as variants to be timed beside ours and never dispatched to: tables leave `peer.*` out.

cuDNN, FlashAttention-2 and cuBLAS are the torch_* variants already. Here:

peer.fa3         FlashAttention-3 and its backward, where FA3_LIBRARY names the library of torch.ops.flash_attn_3, with
                 dense kernels (builds with the variable-length form alone are up to 1.3 times as slow); FA3_CUDART
                 names the CUDA runtime that it was linked against, if that is not torch's
peer.fa3_varlen  its kernel for packed sequences, caches and pages, of the same library (`kreg tune attention_varlen`)
peer.flex        torch.compile(flex_attention). It compiles for seconds a shape, so only on the shapes of the paper18
                 grid; PEER_FLEX=all for all shapes, PEER_FLEX=0 for none
peer.fa4         FlashAttention-4 and its backward, where flash_attn.cute can be imported; FA4_SITE names the folder of
                 its packages, if they were unpacked and not installed. It compiles for seconds a kind of problem
peer.flashinfer  FlashInfer's prefill of a single sequence, where flashinfer can be imported

The last one is written from its documentation and was never run by us: the gate of `kreg tune` decides about it.

    kreg tune attention --grid paper18 --plugin benchmarks/peers.py
    kreg tune attention_backward --grid paper18 --plugin benchmarks/peers.py
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from pathlib import Path

import torch

from registry import Design, Reason, Requires, Variant, attention, attention_varlen
from registry.tuning.grids import grid

HALVES = ("float16", "bfloat16")
UNLIMITED = -1
MOST_SETS = 32


class Packed:
    """Dense copies in the order [batch, row, head, width], made once so that copying is not timed."""

    def __init__(self, q, k, v):
        self.originals = (q, k, v)  # held, so that their addresses stay theirs
        self.q, self.k, self.v = (t.transpose(1, 2).contiguous() for t in (q, k, v))


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


NOT_GIVEN = (None,) * 20
"""New keys and values, an output, offsets and lengths, pages, rotary embedding, scales of fp8: all that is optional."""
ONE_SPLIT = (None, 1, None, 0)
"""No metadata of a scheduler, one part of the keys, groups of heads packed as it likes, all SMs."""


def fa3_prepare(problem, config):
    return_lse, masks = problem.lse, (problem.causal, UNLIMITED, UNLIMITED, 0, 0.0, False)

    def call(packed, scale):
        found = torch.ops.flash_attn_3.fwd(packed.q, packed.k, packed.v, *NOT_GIVEN, scale, *masks, *ONE_SPLIT)
        return found[0], found[1] if return_lse else None

    return on_packed(call)


MANY_SPLITS = (None, 0, None, 0)
"""The same, and as many parts of the keys as it likes."""


def fa3_varlen_prepare(problem, config):
    left, right = problem.window or (UNLIMITED, UNLIMITED)
    masks = problem.causal, left, right, 0, problem.softcap, False
    most = problem.max_seqlen_q, problem.max_seqlen_k

    def launch(q, k, v, *, scale, cu_seqlens_q, cu_seqlens_k=None, seqused_k=None, block_table=None, out=None, **_):
        lengths = cu_seqlens_q, cu_seqlens_k, None, None, seqused_k, *most, block_table
        given = None, None, None, out, *lengths, *NOT_GIVEN[len(lengths) + 4 :]
        found = torch.ops.flash_attn_3.fwd(q, k, v, *given, scale, *masks, *MANY_SPLITS)
        return found[0], found[1] if problem.lse else None

    return launch


def on_rows_first(call):
    """The launch of a backward whose tensors are [batch, row, head, width]: copies are made at the first sight of each,
    untimed. `call(rows_first, lse, grads, scale)` fills `grads`; rows_first are grad_out, q, k, v, out."""
    held: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def launch(grad_out, q, k, v, out, lse, *, scale):
        key = tuple(t.data_ptr() for t in (grad_out, q, k, v, out))
        rows_first = held.get(key)
        if rows_first is None:
            if len(held) >= MOST_SETS:
                held.clear()
            rows_first = held[key] = [t.transpose(1, 2).contiguous() for t in (grad_out, q, k, v, out)]
        grads = [torch.empty_like(t) for t in rows_first[1:4]]
        call(rows_first, lse, grads, scale)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return launch


def fa3_backward_prepare(problem, config):
    bounds = (None,) * 6
    masks = (problem.causal, UNLIMITED, UNLIMITED, 0.0, False, 0)

    def call(rows_first, lse, grads, scale):
        torch.ops.flash_attn_3.bwd(*rows_first, lse, *grads, *bounds, scale, *masks)

    return on_rows_first(call)


@functools.cache
def fa4():
    """FlashAttention-4's module of direct calls. Its language lies in a folder that only a .pth file would name."""
    if site := os.environ.get("FA4_SITE"):
        folders = [site, str(Path(site, "nvidia_cutlass_dsl", "dsl_packages"))]
        sys.path[:0] = folders
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])  # of compile workers
    return importlib.import_module("flash_attn.cute.interface")


def fa4_prepare(problem, config):
    attend, settings = fa4()._flash_attn_fwd, {"causal": problem.causal, "return_lse": problem.lse}
    return on_packed(lambda packed, scale: attend(packed.q, packed.k, packed.v, softmax_scale=scale, **settings)[:2])


def fa4_backward_prepare(problem, config):
    gradients, causal = fa4()._flash_attn_bwd, problem.causal

    def call(rows_first, lse, grads, scale):
        grad_out, q, k, v, out = rows_first
        dq, dk, dv = grads
        gradients(q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal, dq=dq, dk=dk, dv=dv)

    return on_rows_first(call)


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


def _varlen_peer(name, prepare, summary):
    def run(q, k, v, *, scale, config, **given):
        problem, _ = attention_varlen.problem_of(q, k, v, **given)
        return prepare(problem, config)(q, k, v, scale=scale, **given)

    claims = Requires(
        arch=("sm90",),
        dtypes=HALVES,
        head_dim=(64, 256),
        head_dim_multiple=64,
        kv_layouts=("packed", "cache", "paged"),
        page_size=(8, 1 << 20),
        causal=True,
        window=True,
        softcap=True,
        gqa=True,
        lse=True,
        base_alignment=16,
        stride_alignment=16,
    )
    design = Design(dsl="cuda", warp_groups=2, pipeline_stages=2, warp_specialized=True)
    return Variant(
        f"peer.{name}", op="attention_varlen", run=run, prepare=prepare, requires=claims, design=design, summary=summary
    )


def _backward_peer(name, prepare, dsl, summary):
    def run(grad_out, q, k, v, out, lse, *, scale, config, causal=False):
        problem, _ = attention.backward.problem_of(grad_out, q, k, v, out, lse, causal=causal)
        return prepare(problem, config)(grad_out, q, k, v, out, lse, scale=scale)

    claims = Requires(
        arch=("sm90",),
        dtypes=HALVES,
        head_dim=(64, 256),
        head_dim_multiple=64,
        layouts=("bhsd", "bshd"),
        causal=True,
        gqa=True,
        lse=True,
        base_alignment=16,
        stride_alignment=16,
    )
    design = Design(dsl=dsl, warp_groups=2, pipeline_stages=2, warp_specialized=True)
    return Variant(
        f"peer.{name}_backward",
        op="attention_backward",
        run=run,
        prepare=prepare,
        requires=claims,
        design=design,
        summary=summary,
    )


def _works(import_it) -> bool:
    try:
        import_it()
    except Exception:  # not installed, or not for this machine
        return False
    return True


def registry_variants():
    aligned = {"base_alignment": 16, "stride_alignment": 16, "head_dim_multiple": 64}
    to_256 = {"head_dim": (64, 256)}
    ampere, by_64 = {"arch": ("sm80+",)}, {"head_dim_multiple": 64}
    found = []
    if library := os.environ.get("FA3_LIBRARY"):
        if runtime := os.environ.get("FA3_CUDART"):
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
        text = "FlashAttention-3 (dense kernels; rows before heads)"
        found.append(_peer("fa3", fa3_prepare, "cuda", text, arch=("sm90",), lse=True, **to_256, **aligned))
        found.append(_backward_peer("fa3", fa3_backward_prepare, "cuda", text))
        found.append(_varlen_peer("fa3_varlen", fa3_varlen_prepare, "FlashAttention-3, packed, cached or paged"))
    if os.environ.get("PEER_FLEX") != "0":
        text = "torch.compile(flex_attention)"
        found.append(_peer("flex", flex_prepare, "triton", text, rule=flex_rule, **ampere, **to_256, **by_64))
    if os.environ.get("FA4_SITE") or _works(fa4):
        text = "FlashAttention-4 (rows before heads)"
        found.append(_peer("fa4", fa4_prepare, "cutedsl", text, arch=("sm90",), lse=True, **to_256, **aligned))
        found.append(_backward_peer("fa4", fa4_backward_prepare, "cutedsl", text))
    if _works(lambda: importlib.import_module("flashinfer")):
        text = "FlashInfer's single prefill (packed beforehand)"
        claims = {"rule": flashinfer_rule, **ampere, **to_256, **aligned}
        found.append(_peer("flashinfer", flashinfer_prepare, "cuda", text, **claims))
    return found
