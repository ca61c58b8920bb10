"""Kernels on a GPU of which others hold a part until they are through, as two collectives do that wait for each other.

A block of a kernel then begins when another one has ended: none may wait for one that has not begun.
"""

from __future__ import annotations

import time

import pytest
import torch

from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
HELD = 32
LONGEST_NS, PATIENCE_S = 8_000_000_000, 4.0
"""What is held is let go of in the end, whatever comes."""
CASES = [
    ("attention_backward", "b=1,hq=16,s=4096,d=64"),
    ("attention_backward", "b=1,hq=16,s=4096,d=64,causal"),
    ("attention_backward", "b=2,hq=8,hkv=1,s=3000,d=64,causal,window=700:0"),
    ("attention_backward", "b=16,hq=16,s=1024,d=128"),
    ("attention_backward", "b=1,hq=2,s=4096,d=64"),  # fewer tiles than SMs
    ("attention_backward", "b=1,hq=16,s=4096,d=128,causal"),  # a block a tile
    ("attention_varlen_backward", "b=8,hq=16,sq=2048,sk=2048,d=64"),
    ("attention_varlen_backward", "b=8,hq=16,sq=2048,sk=2048,d=64,causal"),
    ("attention_varlen_backward", "b=16,hq=16,sq=777,sk=1024,d=128,causal"),
    ("attention_varlen_backward", "b=3,hq=2,sq=500,sk=500,d=64"),
]
NAMES = {"attention_backward": "gluon_fa3_backward", "attention_varlen_backward": "gluon_fa3_varlen_backward"}


@triton.jit
def hold(let_go, limit):
    """An SM, for as long as nobody lets go."""
    begun = tl.extra.cuda.globaltimer()
    holds = tl.load(let_go, volatile=True) == 0
    while holds:
        holds = (tl.load(let_go, volatile=True) == 0) & (tl.extra.cuda.globaltimer() - begun < limit)


def beside_held(run):
    """What `run` gives while SMs are held, or None when it has not come by then."""
    let_go, one = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32).pin_memory()
    holding, running, third = (torch.cuda.Stream() for _ in range(3))
    hold[(1,)](let_go, 1000, num_warps=32)  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(holding):
        hold[(HELD,)](let_go, LONGEST_NS, num_warps=32)
    time.sleep(0.2)
    ended = torch.cuda.Event()
    with torch.cuda.stream(running):
        got = run()
        ended.record()
    until = time.monotonic() + PATIENCE_S
    while not ended.query() and time.monotonic() < until:
        time.sleep(0.01)
    in_time = ended.query()
    with torch.cuda.stream(third):
        let_go.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    return got if in_time else None


def gradients(load, launch):
    return [found for found in load.call(launch, load.tensors) if found is not None]


@pytest.mark.parametrize("order", ["any", "fixed"])
@pytest.mark.parametrize("op, text", CASES, ids=[f"{op} {text}" for op, text in CASES])
def test_gradients_end_beside_what_holds_sms(op, text, order):
    load = workload(Case.parse(op, text), "cuda")
    problem, variant = load.problem(), op_named(op).variants[NAMES[op]]
    legal = [c for c in variant.legal_configs(problem) if c.get("method") == "sums" and c["order"] == order]
    if not legal:
        pytest.skip("no kernel here adds gradients up in that order")
    with load.settings():
        launch = load.op.bind(variant, problem, legal[0])
        wanted = gradients(load, launch)
        got = beside_held(lambda: gradients(load, launch))
        assert got is not None, "waits for what has no SM"
        again = gradients(load, launch)  # by the same counter
    for one, beside, after in zip(wanted, got, again, strict=True):
        if order == "fixed":
            assert torch.equal(one, beside) and torch.equal(one, after)
        else:
            near = 0.02 * float(one.float().abs().max())
            assert max(float((one - x).float().abs().max()) for x in (beside, after)) <= near
