"""Plans of the ops on a GPU: several devices, streams and threads, and memory that is freed and used again.

Every variant that is legal for a small call takes part; each is held against its own result, got alone beforehand.
"""

from __future__ import annotations

import pytest
import torch
from races import in_threads

import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTHS = (64, 128, 200, 264)


def qkv(length: int, device: str = "cuda", seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed * 1000 + length)
    return [torch.randn(2, 4, length, 64, generator=made).to(device, torch.bfloat16) for _ in range(3)]


def ab(length: int, device: str = "cuda", seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed * 1000 + length)
    return [torch.randn(length, length, generator=made).to(device, torch.bfloat16) for _ in range(2)]


CALLS = {"attention": (registry.attention, qkv), "matmul": (registry.matmul, ab)}


def legal() -> list[tuple[str, str]]:
    """(op, variant) of all that runs every length here."""
    if not torch.cuda.is_available():
        return []
    found = []
    for name, (op, tensors) in CALLS.items():
        sets = [{c.variant for c in op.explain(*tensors(n)).candidates if c.legal} for n in LENGTHS]
        found += [(name, variant) for variant in sorted(set.intersection(*sets))]
    return found


@pytest.mark.parametrize(("op", "variant"), legal())
def test_threads_on_streams_of_their_own(op, variant):
    call, tensors = CALLS[op]
    alone = {(n, s): call(*tensors(n, seed=s), variant=variant) for n in LENGTHS for s in range(4)}
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            inputs = {n: tensors(n, seed=seed) for n in LENGTHS}
            for turn in range(20):
                length = LENGTHS[(turn + seed) % len(LENGTHS)]
                found = call(*inputs[length], variant=variant)
                torch.cuda.current_stream().synchronize()
                assert torch.equal(found, alone[length, seed]), (seed, turn, length)

    in_threads(work, 4)


@pytest.mark.parametrize(("op", "variant"), legal())
def test_memory_freed_and_used_again_for_other_shapes(op, variant):
    call, tensors = CALLS[op]
    alone = {n: call(*tensors(n), variant=variant).clone() for n in LENGTHS}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for turn in range(40):
        length = LENGTHS[turn % len(LENGTHS)]
        assert torch.equal(call(*tensors(length), variant=variant), alone[length]), (turn, length)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("op", "variant"), legal())
def test_tensors_of_a_device_that_is_not_current(op, variant):
    call, tensors = CALLS[op]
    for current in (0, 1):
        with torch.cuda.device(current):
            for length in LENGTHS[:2] * 3:
                found = [call(*tensors(length, f"cuda:{index}"), variant=variant) for index in (0, 1)]
                assert [t.device.index for t in found] == [0, 1]
                assert torch.equal(found[0].cpu(), found[1].cpu())
                assert torch.cuda.current_device() == current


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_a_device_that_is_not_current():
    gradients = []
    for index in (0, 1):
        leaves = [t.requires_grad_() for t in qkv(128, f"cuda:{index}")]
        registry.attention(*leaves, causal=True).square().sum().backward()
        gradients.append([t.grad.cpu() for t in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


SHORT = ((69, 11524, 24), (300, 2048, 64))
"""Products (m, n, k) of a few microseconds."""


def short_product(m: int, n: int, k: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(m)
    return [torch.randn(rows, k, generator=made).to("cuda", torch.float16) for rows in (m, n)]


def legal_for_short_products() -> list[tuple[tuple[int, int, int], str]]:
    if not torch.cuda.is_available():
        return []
    made = {shape: short_product(*shape) for shape in SHORT}
    asked = {shape: registry.matmul.explain(a, b.mT).candidates for shape, (a, b) in made.items()}
    return [(shape, one.variant) for shape, candidates in asked.items() for one in candidates if one.legal]


@pytest.mark.parametrize(("shape", "variant"), legal_for_short_products())
def test_short_products_back_to_back(shape, variant):
    """What CTAs of a cluster still send to each other when one of them leaves is a fault, of one launch in many."""
    a, b = short_product(*shape)
    alone = registry.matmul(a, b.mT, variant=variant).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            found = registry.matmul(a, b.mT, variant=variant)
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, alone)
