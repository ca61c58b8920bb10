"""Widths of published decoders and encoders, from their configuration files: what real calls are drawn from."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """One model's attention and MLP widths."""

    name: str
    hidden: int
    inner: int
    """Width of the MLP between its two products."""
    heads: int
    heads_kv: int
    head_dim: int
    gated: bool = True
    """Whether the MLP's first product makes a gate beside the values."""
    window: int | None = None
    """Keys to the left that its sliding layers see."""
    softcap: float = 0.0


MODELS = (
    Model("BERT large", 1024, 4096, 16, 16, 64, gated=False),
    Model("Command R", 8192, 22528, 64, 64, 128),
    Model("Falcon 7B", 4544, 18176, 71, 1, 64, gated=False),
    Model("GPT-2", 768, 3072, 12, 12, 64, gated=False),
    Model("GPT-NeoX 20B", 6144, 24576, 64, 64, 96, gated=False),
    Model("Gemma 2 9B", 3584, 14336, 16, 8, 256, window=4095, softcap=50.0),
    Model("Gemma 2 27B", 4608, 36864, 32, 16, 128, window=4095, softcap=50.0),
    Model("Gemma 3 27B", 5376, 21504, 32, 16, 128, window=1023),
    Model("Llama 3.2 1B", 2048, 8192, 32, 8, 64),
    Model("Llama 3.2 3B", 3072, 8192, 24, 8, 128),
    Model("Llama 3 8B", 4096, 14336, 32, 8, 128),
    Model("Llama 3 70B", 8192, 28672, 64, 8, 128),
    Model("Mistral 7B", 4096, 14336, 32, 8, 128, window=4095),
    Model("OLMo 2 7B", 4096, 11008, 32, 32, 128),
    Model("Phi-3 mini", 3072, 8192, 32, 32, 96, window=2046),
    Model("Phi-4", 5120, 17920, 40, 10, 128),
    Model("Qwen 2.5 0.5B", 896, 4864, 14, 2, 64),
    Model("Qwen 2.5 7B", 3584, 18944, 28, 4, 128),
    Model("Qwen 2.5 32B", 5120, 27648, 40, 8, 128),
    Model("Qwen 2.5 72B", 8192, 29568, 64, 8, 128),
    Model("SmolLM 135M", 576, 1536, 9, 3, 64),
    Model("StarCoder 2 15B", 6144, 24576, 48, 4, 128, gated=False, window=4095),
    Model("Whisper large", 1280, 5120, 20, 20, 64, gated=False),
)
