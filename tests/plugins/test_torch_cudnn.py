"""What torch's door to cuDNN cannot take."""

import pytest
import torch

import registry

H200 = registry.Target.named("H200")


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def refused(q, d, d_v, op=registry.attention):
    """What torch_cudnn is refused for, on an H200."""
    k, v = (empty(*q.shape[:3], size) for size in (d, d_v))
    (of_cudnn,) = (one for one in op.explain(q, k, v, target=H200).candidates if one.variant == "torch_cudnn")
    return [str(reason) for reason in of_cudnn.reasons]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded_queries_beside_other_head_dims_of_values(dim):
    """torch lays the result out by the order of q's strides: those of 0 come first, and cuDNN raised."""
    shape = [3, 4, 77, 64]
    plain = empty(*shape)
    one = empty(*shape[:dim], 1, *shape[dim + 1 :])
    (reason,) = refused(one.expand(shape), 64, 96)
    assert "q.strides" in reason and "q.contiguous()" in reason
    assert not refused(one.expand(shape), 64, 64) and not refused(plain, 64, 96)
    assert not refused(one.expand(shape).contiguous(), 64, 96)


def test_a_stride_of_one_row_says_nothing():
    q = empty(4, 77, 64).as_strided((1, 4, 77, 64), (0, 77 * 64, 64, 1))
    assert not refused(q, 64, 96)
