"""vLLM's attention backend over paged caches, against the definition.

vLLM itself needs its GPU build; where it is not installed, the few names that a backend takes from it stand in for it,
as version 0.33 declares them, and metadata of its steps are written down here.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

import registry
from registry import notices

PAGE, HEAD, HEADS, KV_HEADS = 16, 16, 4, 2


@dataclasses.dataclass
class Common:
    """The fields of vLLM's CommonAttentionMetadata that a builder reads."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    causal: Any = True


def step(queries: list[int], keys: list[int], **more: Any) -> Common:
    """Metadata of one step, as the scheduler makes it: pages in any order, lengths bounded from above."""
    pages = max(-(-n // PAGE) for n in keys)
    table = torch.randperm(len(keys) * pages).view(len(keys), pages).to(torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(keys, dtype=torch.int32)
    return Common(starts, lengths, sum(queries), max(queries), max(keys) + 3, table, **more)


STEPS = {"prefill": ([5, 17], [5, 17]), "decode": ([1, 1, 1], [7, 40, 16]), "mixed": ([1, 1, 9], [33, 4, 20])}


def stand_in() -> dict[str, types.ModuleType]:
    class Builder:
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.device = device

    backend = dict(
        AttentionBackend=type("AttentionBackend", (), {}),
        AttentionImpl=type("AttentionImpl", (), {}),
        AttentionMetadataBuilder=Builder,
        AttentionType=types.SimpleNamespace(DECODER="decoder"),
        MultipleOf=lambda base: base,
    )
    found = {}
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        found[name] = types.ModuleType(name)
    found["vllm.v1.attention.backend"] = types.SimpleNamespace(**backend)
    names: dict[str, str] = {}
    found["vllm.v1.attention.backends.registry"] = types.SimpleNamespace(
        AttentionBackendEnum=types.SimpleNamespace(__members__=names), register_backend=names.__setitem__
    )
    return found


@pytest.fixture
def door(monkeypatch):
    if importlib.util.find_spec("vllm") is None:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "registry.integrations.vllm", raising=False)
    yield importlib.import_module("registry.integrations.vllm")
    sys.modules.pop("registry.integrations.vllm", None)


def run(door, common, dtype=torch.bfloat16, cache_dtype="auto", **layer):
    """(what the backend wrote, what the definition says), for one layer over a random cache."""
    torch.manual_seed(0)
    impl = door.Impl(HEADS, HEAD, 0.3, KV_HEADS, kv_cache_dtype=cache_dtype, **layer)
    metadata = door.MetadataBuilder(None, ["0"], None, torch.device("cpu")).build(0, common)
    pages = common.block_table_tensor.numel()
    cache = torch.randn(pages, PAGE, KV_HEADS, 2 * HEAD).to(dtype).transpose(1, 2)  # heads beside heads in memory
    scales = types.SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    if cache_dtype != "auto":
        cache = cache.to(torch.float8_e4m3fn)
    padded = common.num_actual_tokens + 3
    query = torch.randn(padded, HEADS, HEAD).to(dtype)
    output = torch.full_like(query, 7.0)
    given = cache if cache_dtype == "auto" else cache.view(torch.uint8)
    assert impl.forward(scales, query, query, query, given, metadata, output) is output
    assert (output[common.num_actual_tokens :] == 7).all()
    whole = cache.to(torch.float32)
    keys, values = whole[..., :HEAD], whole[..., HEAD:]
    if cache_dtype != "auto":
        keys, values = keys * 0.5, values * 2.0
    window = layer.get("sliding_window")
    rows = []
    for i, used in enumerate(common.seq_lens.tolist()):
        table = common.block_table_tensor[i].long()
        k, v = (x[table].transpose(0, 1).flatten(1, 2)[None, :, :used] for x in (keys, values))
        q = query[common.query_start_loc[i] : common.query_start_loc[i + 1]].transpose(0, 1)[None].float()
        if window:
            how = {"window": (window - 1, 0 if common.causal else window - 1)}
        else:
            how = {}
        cap = layer.get("logits_soft_cap") or 0.0
        sinks = layer.get("sinks")
        out = registry.attention.reference(q, k, v, causal=common.causal, scale=0.3, softcap=cap, sinks=sinks, **how)
        rows.append(out[0].transpose(0, 1))
    return output[: common.num_actual_tokens].double(), torch.cat(rows).double()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "layer", [{}, {"sliding_window": 8}, {"logits_soft_cap": 2.0}, {"sinks": torch.linspace(-1, 1, HEADS)}], ids=str
)
def test_steps_agree_with_the_definition(door, name, layer):
    got, expected = run(door, step(*STEPS[name]), **layer)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_all_keys_are_seen_where_the_step_is_not_causal(door):
    for layer in ({}, {"sliding_window": 8}):
        got, expected = run(door, step(*STEPS["mixed"], causal=False), **layer)
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_a_cache_of_8_bits(door):
    got, expected = run(door, step(*STEPS["decode"]), cache_dtype="fp8_e4m3")
    torch.testing.assert_close(got, expected, atol=5e-2, rtol=5e-2)


def test_what_it_cannot_do_is_refused(door):
    with pytest.raises(registry.InvalidArgument, match="attn_type"):
        door.Impl(HEADS, HEAD, 0.3, attn_type="encoder_only")
    with pytest.raises(registry.InvalidArgument, match="kv_cache_dtype"):
        door.Impl(HEADS, HEAD, 0.3, kv_cache_dtype="fp8_e5m2")
    builder = door.MetadataBuilder(None, ["0"], None, torch.device("cpu"))
    with pytest.raises(registry.InvalidArgument, match="causal"):
        builder.build(0, step(*STEPS["decode"], causal=torch.tensor([True, False, True])))
    impl = door.Impl(HEADS, HEAD, 0.3)
    with pytest.raises(registry.InvalidArgument, match="output_scale"):
        impl.forward(None, *[torch.zeros(1)] * 4, None, torch.zeros(1), output_scale=torch.ones(1))


def test_a_run_that_measures_memory_writes_zeros(door):
    output = torch.ones(3, HEADS, HEAD)
    door.Impl(HEADS, HEAD, 0.3).forward(None, *[torch.zeros(1)] * 4, None, output)
    assert not output.any()


def test_the_name_is_made_known_once(door):
    assert door.register() == door.register() == "KERNEL_REGISTRY"
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert "KERNEL_REGISTRY" in AttentionBackendEnum.__members__


def test_a_process_of_vllm_starts_where_the_name_cannot_be_made_known(door, monkeypatch):
    def refuse(*args):
        raise AttributeError("an older interface")

    from vllm.v1.attention.backends import registry as names

    monkeypatch.setattr(door, "NAME", "KERNEL_REGISTRY_TOO")
    monkeypatch.setattr(names, "register_backend", refuse)
    before = notices.counts()
    door.plugin()
    assert any("older interface" in text for text in notices.counts() if text not in before)
