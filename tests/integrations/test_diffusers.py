"""diffusers' own models, tiny and random: its native attention is torch's, so the door of that is the door of these."""

from __future__ import annotations

import pytest
import torch

import registry
from registry.integrations import sdpa

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, dict(
        hidden_states=torch.randn(1, 16, 4),
        encoder_hidden_states=torch.randn(1, 5, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([0.5]),
        img_ids=torch.randn(16, 3),
        txt_ids=torch.randn(5, 3),
    )


def unet():
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return model, dict(sample=torch.randn(1, 4, 8, 8), timestep=1, encoder_hidden_states=torch.randn(1, 5, 32))


@pytest.mark.parametrize("make", [flux, unet])
def test_models(make):
    torch.manual_seed(0)
    model, inputs = make()
    with torch.no_grad():
        expected = model.eval()(**inputs).sample
        with sdpa.replaced(), registry.record() as recorder:
            found = model(**inputs).sample
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert set(recorder.counts) == {"attention"}
