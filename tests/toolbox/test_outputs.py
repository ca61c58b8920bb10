"""Outputs of bound launches are what the plain allocations are, and who watches allocations sees them."""

import pytest
import torch

import registry
from registry.ops.attention.outputs import grad_allocators, lse_allocator, new_lse, new_out, out_allocator
from registry.ops.parts.memory import WatchedAllocations
from registry.toolbox import outputs
from registry.toolbox.outputs import allocator, dense


def same_geometry(found, expected):
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1,), (2, 1, 7), ()])
def test_dense_is_contiguous(shape):
    assert dense(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_attention_allocates_as_new_out_does(order):
    shapes = (2, 4, 33, 64), (2, 2, 40, 64), (2, 2, 40, 128)
    q, k, v = (torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes)
    if order == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    problem, _ = registry.attention.problem_of(q, k, v, return_lse=True)
    same_geometry(out_allocator(problem)(q), new_out(q, v))
    same_geometry(lse_allocator(problem)(q), new_lse(q))
    for allocate, like in zip(grad_allocators(problem), (q, k, v), strict=True):
        same_geometry(allocate(like), new_out(like, like))
    without, _ = registry.attention.problem_of(q, k, v)
    assert lse_allocator(without)(q) is None


def test_the_direct_allocation_gives_way_to_dispatch_modes(monkeypatch):
    class OnTheGpu:
        """Looks like a CUDA tensor; what is allocated like it is on the CPU."""

        is_cuda = True

        def new_empty_strided(self, *geometry, dtype):
            return torch.empty_strided(*geometry, dtype=dtype)

    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(outputs, "_direct", lambda: lambda *geometry: taken.append(geometry))
    allocate = allocator((2, 3), torch.float32)
    assert allocate(OnTheGpu()) is None and taken == [((2, 3), (3, 1), torch.float32)]
    with WatchedAllocations():
        assert allocate(OnTheGpu()).isnan().all()
    assert len(taken) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    same_geometry(allocator((2, 3), torch.float32)(OnTheGpu()), torch.empty(2, 3))
    assert len(taken) == 1
