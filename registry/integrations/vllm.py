"""An attention backend for vLLM: paged caches by `registry.attention_varlen`.

    from registry.integrations import vllm
    vllm.register()                                  # then: LLM(..., attention_config={"backend": "KERNEL_REGISTRY"})

vLLM starts processes of its own, which load what the entry points of `vllm.general_plugins` name: that of this package
is `plugin` below. It only makes the name known; who does not ask for the backend does not get it.

Made for the interface of vLLM 0.33 (`vllm.v1.attention.backend`). What it cannot do it refuses where vLLM asks for it,
or by an error: nothing goes elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (  # type: ignore[import-not-found]
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import registry
from registry.errors import InvalidArgument
from registry.notices import notice, what_failed

NAME = "KERNEL_REGISTRY"
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def register() -> str:
    """Make the backend's name known to vLLM, in this process; again is no error."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # type: ignore[import-not-found]

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.{Backend.__qualname__}")
    return NAME


def plugin() -> None:
    """What vLLM calls in each of its processes, whether or not the backend is wanted: a failure is said, not raised."""
    try:
        register()
    except Exception as error:
        notice(f"vLLM does not know the backend {NAME}: {what_failed(error)}")


@dataclass
class Metadata:
    """One step's sequences, shared by the layers of a group: arguments of attention_varlen, and what is no argument."""

    tokens: int
    causal: bool
    arguments: dict[str, Any]


class MetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise InvalidArgument("causal", "a tensor", "one bool for all sequences")
        arguments = {
            "cu_seqlens_q": common.query_start_loc,
            "max_seqlen_q": common.max_query_len,
            "seqused_k": common.seq_lens,
            "max_seqlen_k": common.max_seq_len,
            "block_table": common.block_table_tensor,
        }
        return Metadata(common.num_actual_tokens, common.causal, arguments)


class Impl(AttentionImpl):  # type: ignore[misc]
    """One layer: its scale, window, softcap and sinks are fixed when the model is made."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise InvalidArgument("attn_type", attn_type, "decoder: attention over a paged cache")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise InvalidArgument("kv_cache_dtype", kv_cache_dtype, ", ".join(Backend.supported_kv_cache_dtypes))
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.shares_cache = kv_cache_dtype, kv_sharing_target_layer_name is not None
        self.window = sliding_window
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.how: dict[str, Any] = {"scale": float(scale), "softcap": float(logits_soft_cap or 0.0), "sinks": sinks}

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of query [T, H, D] over the cache [pages, Hkv, page, 2 D] into `output`, and give it back."""
        if output_scale is not None or output_block_scale is not None:
            raise InvalidArgument("output_scale", "a tensor", "None: results are not quantized")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        keys, values = self._pages(kv_cache)
        scales: dict[str, Any] = {}
        if keys.dtype in EIGHT_BITS.values():
            scales = {"k_scale": layer._k_scale.reshape(1), "v_scale": layer._v_scale.reshape(1)}
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        causal, window = attn_metadata.causal, None
        if self.window is not None:
            window = (self.window - 1, 0 if causal else self.window - 1)
        n = attn_metadata.tokens
        registry.attention_varlen(
            query[:n],
            keys,
            values,
            causal=causal,
            window=window,
            alibi_slopes=self.slopes,
            out=output[:n],
            **attn_metadata.arguments,
            **scales,
            **self.how,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """What vLLM calls before `forward`: its own kernel writes the new keys and values."""
        from vllm.v1.attention.backends.fa_utils import reshape_and_cache_flash  # type: ignore[import-not-found]

        if not self.shares_cache:
            keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            scales = (layer._k_scale, layer._v_scale)
            reshape_and_cache_flash(key, value, keys, values, slot_mapping, self.kv_cache_dtype, *scales)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kv_cache_dtype in EIGHT_BITS:
            kv_cache = kv_cache.view(EIGHT_BITS[self.kv_cache_dtype])
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values


class Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it takes a backend."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


__all__ = ["NAME", "Backend", "Impl", "Metadata", "MetadataBuilder", "plugin", "register"]
