"""Gradients of attention on a GPU: against float64 beside the peers, over a training, and the same bits every time.

`gluon_fa3_backward` where it may run, else what is dispatched. Where FA3_LIBRARY names FlashAttention-3's library (see
benchmarks/peers.py), it is a peer as cuDNN and FlashAttention-2 are.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import registry
from registry import IllegalVariant
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.tuning.extra import load_plugins

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
OURS = "gluon_fa3_backward"
BY_TORCH = "torch's operations"
PEERS = ("torch_cudnn_backward", "torch_flash_backward", "peer.fa3_backward")
TIMES_PEER = 1.2
"""An error may be so much larger than the worst peer's; where none may run, than that of torch's own operations in the
same dtype."""
FEATURES = (
    "b=2,hq=4,s=512,d=64",
    "b=2,hq=4,s=512,d=64,causal,dtype=float16",
    "b=1,hq=3,s=333,d=96,causal",
    "b=2,hq=4,s=1024,d=128,causal",
    "b=2,hq=4,s=777,d=128,dtype=float16",
    "b=1,hq=4,s=600,d=192",
    "b=1,hq=4,s=512,d=192,dv=128,causal",
    "b=1,hq=2,s=512,d=256,causal",
    "b=1,hq=2,s=389,d=256,dtype=float16",
    "b=2,hq=8,hkv=2,s=640,d=128,causal",
    "b=2,hq=6,hkv=1,s=500,d=64,causal,layout=bshd",
    "b=1,hq=4,s=300,sk=700,d=128,causal",
    "b=1,hq=4,s=700,sk=300,d=64,causal",
    "b=1,hq=4,s=512,d=72",
    "b=1,hq=4,s=800,d=128,window=100:50",
    "b=1,hq=4,s=640,d=64,causal,window=127:0",
    "b=1,hq=4,s=512,d=128,causal,softcap=20.0",
    "b=1,hq=4,s=512,d=128,causal,grad_lse",
    "b=1,hq=8,hkv=2,s=512,d=128,causal,window=200:0,softcap=30.0,deterministic",
)
FIXED = (
    "b=2,hq=8,s=1024,d=64,deterministic",
    "b=2,hq=8,hkv=2,s=1536,d=128,causal,deterministic",
    "b=1,hq=4,s=1024,d=256,causal,deterministic",
)
REPEATS = 200
STEPS, WIDTH, DEPTH, LENGTH, WORDS = 200, 256, 2, 256, 64
FORWARD = "gluon_fa3"


def chosen(case: Case) -> tuple[str, dict]:
    """Ours with its config, or what is dispatched."""
    op, problem = op_named(case.op), case.problem(registry.Target.of(torch.device("cuda")))
    try:
        decision = op.explain(problem, variant=OURS)
    except IllegalVariant:
        decision = op.explain(problem)
    return decision.variant, dict(decision.config)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """All kernels at once in processes of their own; one after the other they take minutes."""
    if os.environ.get("FA3_LIBRARY"):
        os.environ.setdefault("PEER_FLEX", "0")
        load_plugins([str(Path(__file__).parents[2] / "benchmarks" / "peers.py")])
    training = f"b=4,hq={WIDTH // 64},s={LENGTH},d=64,causal,layout=bshd"
    cases = [f"attention {training},lse", *(f"attention_backward {text}" for text in (training, *FEATURES, *FIXED))]
    with ours():
        warmed = registry.warm(cases, launch=False, jobs=os.cpu_count())
    failed = [found for found in warmed if found.error]
    assert not failed or not legal()


def legal() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def ours():
    """Ours inside the block, where this GPU runs it."""
    return registry.use(FORWARD, OURS) if legal() else contextlib.nullcontext()


def errors(case: Case, names: list[str], load) -> dict[str, dict[str, float]]:
    """The relative error of each gradient in float64, by variant; peers that may not run are left out."""
    op, problem, tensors = load.op, load.problem(), load.tensors
    given = [tensors[name] for name in ("grad_out", "q", "k", "v")]
    how = {**load.mask(), "scale": load.scale, "grad_lse": tensors["grad_lse"]}
    wanted = op.reference(*given, **how)
    found = {BY_TORCH: _apart(load.outputs, op.reference(*given, **how, dtype=load.dtype), wanted)}
    for name in names:
        if name not in op.variants or op.variants[name].reasons(problem):
            continue
        poisoned = [torch.full_like(t, torch.nan) for t in tensors.values() if isinstance(t, torch.Tensor)]
        del poisoned
        config = op.explain(problem, variant=name).config
        with load.settings():
            results = load.call(op.bind(op.variants[name], problem, config), tensors)
        assert all(bool(torch.isfinite(result).all()) for result in results), f"{name}: not finite"
        found[name] = _apart(load.outputs, results, wanted)
    return found


def _apart(names, results, wanted) -> dict[str, float]:
    pairs = zip(names, results, wanted, strict=True)
    return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in pairs}


@pytest.mark.parametrize("text", FEATURES)
def test_no_further_from_float64_than_the_peers(text):
    case = Case.parse("attention_backward", text)
    load = workload(case, "cuda")
    name, _ = chosen(case)
    found = errors(case, [name, *PEERS], load)
    peers = [found[peer] for peer in PEERS if peer in found and peer != name] or [found[BY_TORCH]]
    print(text, found)
    for output, error in found[name].items():
        limit = TIMES_PEER * max(peer[output] for peer in peers)
        assert error <= limit, f"{output} of {name}: {error:.3g}, allowed {limit:.3g}"


@pytest.mark.parametrize("text", FIXED)
def test_a_fixed_order_gives_the_same_bits_every_time(text):
    case = Case.parse("attention_backward", text)
    load = workload(case, "cuda")
    name, config = chosen(case)
    with load.settings():
        launch = load.op.bind(load.op.variants[name], load.problem(), config)
        first = [grad.clone() for grad in load.call(launch, load.tensors)]
        other = torch.zeros((), dtype=torch.bool, device="cuda")
        for turn in range(REPEATS):
            held = torch.full(
                (1 + turn % 7, 1 << 20), torch.nan, device="cuda"
            )  # other memory than before, and not zero
            for one, again in zip(first, load.call(launch, load.tensors), strict=True):
                other |= (one.view(torch.int16) != again.view(torch.int16)).any()
            del held
    assert not bool(other)


# --- a small transformer --------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        heads = self.qkv(self.before(x)).to(torch.bfloat16).unflatten(-1, (3, WIDTH // 64, 64))
        q, k, v = (t.transpose(1, 2) for t in heads.unbind(2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2).float())
        return x + self.down(F.gelu(self.up(self.between(x))))


def losses(attend) -> list[float]:
    """Of a model that learns to say eight words again and again, from the same start each time."""
    torch.manual_seed(0)
    embed, places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
    model = torch.nn.Sequential(*(Block(attend) for _ in range(DEPTH)), torch.nn.LayerNorm(WIDTH))
    head = torch.nn.Linear(WIDTH, WORDS)
    parts = torch.nn.ModuleList([embed, places, model, head]).cuda()
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        eight = torch.randint(WORDS, (4, 8), generator=generator) ** 3 // WORDS**2  # some words more often than others
        words = eight.repeat(1, LENGTH // 8).cuda()
        said = head(model(embed(words) + places.weight))[:, :-1]
        loss = F.cross_entropy(said.flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def test_a_training_follows_that_with_torchs_attention():
    torchs = losses(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with ours(), registry.record() as seen:
        found = losses(lambda q, k, v: registry.attention(q, k, v, causal=True))
    if legal():
        calls = STEPS * DEPTH
        assert seen.counts == {"attention": {FORWARD: calls}, "attention_backward": {OURS: calls}}
    apart = max(abs(one - other) for one, other in zip(found, torchs, strict=True))
    print(f"loss {torchs[0]:.4f} to {torchs[-1]:.4f}, and {found[-1]:.4f} with ours; at most {apart:.4f} apart")
    assert torchs[-1] < 0.9 * torchs[0]
    assert apart < 0.02
