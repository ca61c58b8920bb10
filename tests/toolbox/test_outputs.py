"""Outputs of bound launches are what the plain allocations are, and who watches allocations sees them."""

import pytest
import torch

from registry.ops.attention.calls import dense_like, out_of, row_sums
from registry.ops.attention.outputs import new_lse, new_out
from registry.ops.parts.memory import WatchedAllocations
from registry.toolbox import outputs
from registry.toolbox.launch import StandIn
from registry.toolbox.outputs import allocator, dense


def same_geometry(found, expected):
    assert (tuple(found.shape), found.stride(), found.dtype) == (
        tuple(expected.shape),
        expected.stride(),
        expected.dtype,
    )


@pytest.mark.parametrize("shape", [(3, 4, 5), (1,), (2, 1, 7), ()])
def test_dense_is_contiguous(shape):
    assert dense(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_calls_of_attention_allocate_as_new_out_does(order):
    shapes = (2, 4, 33, 64), (2, 2, 40, 64), (2, 2, 40, 128)
    q, k, v = (torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes)
    if order == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    given = {name: StandIn.of_tensor(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    same_geometry(out_of(given), new_out(q, v))
    same_geometry(row_sums(given["q"], "lse"), new_lse(q))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        same_geometry(dense_like(given[name], "gradient"), new_out(tensor, tensor))


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
