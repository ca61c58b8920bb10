"""One of the processes of test_dtensor.py: prints what it held to be wrong, and nothing else."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import registry
from registry.integrations import dtensor

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "uneven": (3, 3)}
BATCH, HEAD, ROWS, COLUMNS, K, ALL = Shard(0), Shard(1), Shard(-2), Shard(-1), Shard(-1), Replicate()
PRODUCTS = [  # shapes of a and b, placements of a, b and the bias, that of the result
    ("rows", (6, 8), (8, 10), ROWS, ALL, ALL, Shard(0)),
    ("columns", (6, 8), (8, 10), ALL, COLUMNS, Shard(0), Shard(1)),
    ("along k", (6, 8), (8, 10), K, Shard(0), None, Partial()),
    ("batches", (4, 6, 8), (4, 8, 10), BATCH, BATCH, ALL, Shard(0)),
    ("a batch of one each", (2, 6, 8), (2, 8, 10), BATCH, BATCH, ALL, Shard(0)),
    ("batches that no shard divides", (3, 6, 8), (8, 10), BATCH, ALL, ALL, ALL),
    ("batches of one b", (4, 6, 8), (8, 10), BATCH, ALL, ALL, Shard(0)),
    ("columns of batches", (4, 6, 8), (4, 8, 10), ALL, COLUMNS, Shard(0), Shard(2)),
]


def close(name, found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.full_tensor(), other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def attention(mesh):
    for name, (heads, kv_heads) in HEADS.items():
        qkv = [torch.randn(4, h, 6, 8, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
        for placement in (BATCH, HEAD, ALL):
            for how in ({}, {"causal": True, "window": (2, 0)}):
                what = f"attention {name} {placement} {how}"
                of_kv = ALL if placement == HEAD and kv_heads == 1 else placement
                given = [
                    distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
                    for x, p in zip(qkv, (placement, of_kv, of_kv), strict=True)
                ]
                with registry.record() as recorder:
                    out, lse = registry.attention(*given, **how, return_lse=True)
                    grads = torch.autograd.grad((out**2).sum() + lse.sum(), given)
                expected, expected_lse = registry.attention(*qkv, **how, return_lse=True)
                wanted = torch.autograd.grad((expected**2).sum() + expected_lse.sum(), qkv)
                close(what, (out, lse, *grads), (expected, expected_lse, *wanted))
                if name != "uneven":
                    assert out.placements == (placement,) and lse.placements == (placement,), (what, out.placements)
                    shard = (4 // 2 if placement == BATCH else 4), (heads // 2 if placement == HEAD else heads)
                    for ran in recorder.launches:
                        assert (ran.problem.batch, ran.problem.heads_q) == shard, (what, ran.problem)
        with torch.no_grad():
            inference = registry.attention(*(distribute_tensor(x.detach(), mesh, [BATCH]) for x in qkv))
        close(name, [inference], [registry.attention(*(x.detach() for x in qkv))])


def ragged(mesh):
    """Lengths and sinks of dense calls, which the op for packed sequences answers."""
    qkv, lengths, sinks = [torch.randn(4, 4, 6, 8) for _ in range(3)], torch.tensor([3, 6, 0, 5]), torch.randn(4)
    for placement in (BATCH, HEAD, ALL):
        for how in (
            {"key_lengths": lengths},
            {"sinks": sinks, "causal": True},
            {"key_lengths": lengths, "sinks": sinks},
        ):
            for grad in (False, True):
                own = [x.clone().requires_grad_(grad) for x in qkv]
                given = [distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(grad) for x in own]
                there = {n: distribute_tensor(x, mesh, [ALL]) if n != "causal" else x for n, x in how.items()}
                out, expected = registry.attention(*given, **there), registry.attention(*own, **how)
                found, wanted = [out], [expected]
                if grad:
                    found += torch.autograd.grad((out**2).sum(), given)
                    wanted += torch.autograd.grad((expected**2).sum(), own)
                close(f"ragged {placement} {sorted(how)} {grad}", found, wanted)
    odd = [x[:3] for x in qkv]  # which two processes do not divide
    given = [distribute_tensor(x, mesh, [BATCH]) for x in odd]
    found = registry.attention(*given, key_lengths=distribute_tensor(lengths[:3], mesh, [ALL]))
    close("odd batches", [found], [registry.attention(*odd, key_lengths=lengths[:3])])


def varlen(mesh):
    """Packed sequences with sinks and ALiBi, and a cache, by heads."""
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    everywhere = distribute_tensor(cu, mesh, [ALL])
    q, k, v, sinks = (torch.randn(*s, requires_grad=True) for s in ((8, 4, 16), (8, 2, 16), (8, 2, 16), (4,)))
    slopes = torch.rand(4)

    def results(q, k, v, sinks, slopes, cu, **how):
        how |= {"max_seqlen_q": 5, "max_seqlen_k": 5, "causal": True}
        out, lse = registry.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=sinks, alibi_slopes=slopes, return_lse=True, **how
        )
        leaves = [t for t in (q, k, v, sinks) if t is not None]
        return out, lse, *torch.autograd.grad((out**2).sum() + lse.sum(), leaves)

    for with_sinks in (True, False):
        leaves = [q, k, v, sinks if with_sinks else None]
        given = [
            None if t is None else distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(leaves, (HEAD, HEAD, HEAD, Shard(0)), strict=True)
        ]
        found = results(*given, distribute_tensor(slopes, mesh, [Shard(0)]), everywhere)
        assert found[0].placements == (HEAD,) and found[1].placements == (Shard(0),)
        close(f"varlen, sinks {with_sinks}", found, results(*leaves, slopes, cu))
    cache, used, step = torch.randn(2, 9, 2, 16), torch.tensor([4, 9], dtype=torch.int32), q.detach()[:2]
    one = torch.tensor([0, 1, 2], dtype=torch.int32)

    def decode(q, cache, cu, used):
        how = {"cu_seqlens_q": cu, "seqused_k": used, "max_seqlen_q": 1, "max_seqlen_k": 9}
        return registry.attention_varlen(q, cache, cache, **how)

    shards = zip((step, cache, one, used), (HEAD, Shard(2), ALL, ALL), strict=True)
    out = decode(*(distribute_tensor(t, mesh, [p]) for t, p in shards))
    assert out.placements == (HEAD,), out.placements
    close("a cache", [out], [decode(step, cache, one, used)])


def matmul(mesh):
    for name, a_shape, b_shape, of_a, of_b, of_bias, of_out in PRODUCTS:
        tensors = [torch.randn(s, requires_grad=True) for s in (a_shape, b_shape, (10,))[: 2 if of_bias is None else 3]]
        given = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(tensors, (of_a, of_b, of_bias), strict=False)
        ]

        def results(ts, **how):
            out = registry.matmul(*ts[:2], bias=ts[2] if len(ts) > 2 else None, **how)
            return out, torch.autograd.grad((out**2).sum(), ts)

        out, grads = results(given)
        expected, wanted = results(tensors)
        assert out.placements == (of_out,), (name, out.placements)
        close(name, (out, *grads), (expected, *wanted))
        close(name, results(given, activation="gelu")[1], results(tensors, activation="gelu")[1])
    a, b = torch.randn(6, 8), torch.randn(8, 10)
    da, db = distribute_tensor(a, mesh, [ROWS]), distribute_tensor(b, mesh, [ALL])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        out = registry.matmul(da, db, activation="relu", out_dtype=dtype)
        assert out.dtype == out.to_local().dtype == dtype, (out.dtype, dtype)
        assert isinstance(out, DTensor)


def compiled(mesh):
    """A gated product without gradients."""

    def gated(a, b):
        return registry.matmul(a, b, activation="silu", gated=True)

    a, b = torch.randn(6, 8), torch.randn(8, 10)
    given = distribute_tensor(a, mesh, [ROWS]), distribute_tensor(b, mesh, [ALL])
    close("gated", [torch.compile(gated, backend="eager", fullgraph=True)(*given)], [gated(a, b)])


def two_dimensions(mesh):
    """Batches along one dimension of the mesh, heads along the other."""
    q, k = torch.randn(4, 4, 6, 8), torch.randn(4, 2, 6, 8)
    given = [distribute_tensor(x, mesh, [BATCH, HEAD]) for x in (q, k, k)]
    out = registry.attention(*given, causal=True)
    assert out.placements == (BATCH, HEAD)
    close("two dimensions", [out], [registry.attention(q, k, k, causal=True)])


def main(rank, store, world):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    dtensor.enable()
    dtensor.enable()
    mesh = init_device_mesh("cpu", (world,))
    attention(mesh)
    ragged(mesh)
    varlen(mesh)
    matmul(mesh)
    two_dimensions(init_device_mesh("cpu", (1, world)))
    compiled(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
