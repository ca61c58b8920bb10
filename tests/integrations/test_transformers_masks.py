"""Models that compute with their mask, or choose keys beside it, give by our attention what they give by eager one."""

from __future__ import annotations

import copy
import pickle

import pytest
import small_models
import torch
from small_models import agreed, tokens

import registry

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from registry.integrations import transformers as door  # noqa: E402
from registry.integrations.transformers.chosen import of_them  # noqa: E402

SMALL = small_models.SMALL | {"num_key_value_heads": 4}
SPARSE = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    index_topk=4,
    index_head_dim=16,
    index_n_heads=2,
)
BLOCKS = dict(
    head_dim=16,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=2,
    index_topk_blocks=2,
    index_local_blocks=1,
    layer_types=["full_attention", "minimax_m3_sparse"],
    dense_intermediate_size=32,
    shared_intermediate_size=16,
)
CHOOSING = {"deepseek_v32": SMALL | SPARSE, "glm_moe_dsa": SMALL | SPARSE, "minimax_m3_vl_text": SMALL | BLOCKS}
LEFT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])


def made(kind, **config):
    """A model of that kind, where this transformers has it."""
    door.enable()
    try:
        config = transformers.AutoConfig.for_model(kind, **config)
    except ValueError:
        pytest.skip(f"transformers has no {kind} yet")
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", CHOOSING)
def test_keys_that_a_model_chooses_are_all_that_is_seen(kind):
    def forward(model):
        padded = model(tokens(), attention_mask=LEFT, use_cache=False).logits[LEFT.bool()]
        return model(tokens(), use_cache=False).logits, padded

    counts = agreed(made(kind, **CHOOSING[kind]), forward)
    layers = 1 if kind.startswith("minimax") else 2
    assert counts["elsewhere"] == {"transformers: keys that the model chooses": 2 * layers}


PADDINGS = {
    "left": [[1] * 11, [0] * 4 + [1] * 7],
    "right": [[1] * 11, [1] * 7 + [0] * 4],
    "both": [[1] * 11, [0] * 2 + [1] * 6 + [0] * 3],
    "between": [[1] * 11, [1] * 4 + [0] * 3 + [1] * 4],
}


@pytest.mark.parametrize("side", PADDINGS)
def test_a_window_to_both_sides_stays_where_it_is_beside_padding(side):
    door.enable()
    windows = dict(local_attention=6, global_attn_every_n_layers=2, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    try:
        config = transformers.ModernBertConfig(**SMALL | windows)
    except AttributeError:
        pytest.skip("transformers has no ModernBERT yet")
    torch.manual_seed(1)
    model, mask = transformers.ModernBertModel(config).eval(), torch.tensor(PADDINGS[side])
    kept = mask.bool()
    counts = agreed(model, lambda model: model(tokens(), attention_mask=mask).last_hidden_state[kept])
    between = {"attention_varlen", "elsewhere"} if side == "between" else {"attention_varlen"}
    assert set(counts) == between


@pytest.mark.parametrize(("queries", "keys", "offset", "ours"), [(4, 9, 0, False), (4, 9, 5, True), (9, 9, 0, True)])
def test_a_window_to_both_sides_counts_from_where_the_queries_stand(queries, keys, offset, ours):
    door.enable()
    window = transformers.masking_utils.sliding_window_bidirectional_mask_function(2)
    mask = door.mask(2, queries, keys, q_offset=offset, mask_function=window, device="cpu")
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(q, k, v, attn_mask=mask.dense(), enable_gqa=True).transpose(1, 2)
    with registry.record() as ran:
        found, _ = door.attention(torch.nn.Identity(), q, k, v, mask, is_causal=False)
    torch.testing.assert_close(found, wanted)
    assert set(ran.counts) == {"attention" if ours else "elsewhere"}


@pytest.mark.parametrize("kind", ["causal_mask_function", "bidirectional_mask_function"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_one_row_is_that_of_every_row(kind, padded):
    door.enable()
    padding = torch.tensor([[1, 1, 1, 0, 0]]).bool() if padded else None
    function = getattr(transformers.masking_utils, kind)
    mask = door.mask(1, 5, 5, mask_function=function, attention_mask=padding, device="cpu")
    q, k, v = torch.randn(3, 3, 2, 5, 8)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense()).transpose(1, 2)
    with registry.record() as ran:
        found, _ = door.attention(torch.nn.Identity(), q, k, v, mask)
    torch.testing.assert_close(found[:, :3], wanted[:, :3])
    assert ran.counts == {"elsewhere": {"transformers: a mask of another batch or of other queries": 1}}
    with pytest.raises(RuntimeError, match="size of tensor"):
        door.attention(torch.nn.Identity(), q[:, :, 1:], k, v, mask)


def test_a_model_that_passes_over_masks_that_are_no_tensors_is_given_one():
    model = made("doge", **SMALL | {"num_key_value_heads": 2}, keep_window_size=5)
    counts = agreed(model, lambda model: model(tokens(), attention_mask=LEFT, use_cache=False).logits[LEFT.bool()])
    assert counts == {"elsewhere": {"transformers: a dense mask": 2}}


def test_a_model_that_asks_a_prepared_mask_for_its_dimensions_generates():
    model = made("gpt2", vocab_size=64, n_embd=32, n_head=4, n_layer=2, bos_token_id=1, eos_token_id=None)

    def generate(model):
        how = dict(max_new_tokens=4, do_sample=False, disable_compile=True, cache_implementation="static")
        return model.generate(tokens(), attention_mask=LEFT, pad_token_id=0, **how)

    assert set(agreed(model, generate)) == {"attention_varlen"}


def test_to_who_computes_with_it_a_mask_is_the_tensor_of_sdpa():
    door.enable()
    mask = door.mask(2, 11, 11, attention_mask=LEFT.bool(), device="cpu")
    dense = mask.dense()
    assert dense.dtype == torch.bool and mask.shape == dense.shape and mask.ndim == mask.dim() == 4
    assert mask.dtype == torch.bool and mask.device == dense.device and mask.size(-1) == 11
    assert torch.equal(mask[:, 0], dense[:, 0]) and torch.equal(~mask, ~dense)
    some = torch.rand(2, 1, 11, 11) > 0.5
    assert torch.equal(mask & some, dense & some) and torch.equal(some & mask, dense & some)
    assert torch.equal(mask == 0, dense == 0) and torch.equal(1.0 - mask.to(torch.float32), 1.0 - dense.float())
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(some.masked_fill(mask, False), some.masked_fill(dense, False))
    scores = torch.randn(2, 4, 11, 11)
    hidden = scores + torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    assert torch.equal(scores + mask, hidden) and torch.equal(mask + scores, hidden)
    assert torch.equal(torch.add(scores, mask), hidden)
    with pytest.raises(TypeError):
        1.0 - mask
    assert mask.to("cpu") is mask and len({mask: 1}) == 1
    assert torch.equal(copy.deepcopy(mask).dense(), dense) and copy.copy(mask).prefix == mask.prefix
    with pytest.raises(AttributeError, match="kv_indices"):
        mask.kv_indices  # noqa: B018
    assert torch.equal(pickle.loads(pickle.dumps(mask)).dense(), dense)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_are_hidden_whatever_mask_there_is(causal):
    chosen = torch.rand(2, 2, 5, 7) > 0.5
    every = chosen.repeat_interleave(2, 1)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    assert torch.equal(of_them(mask, chosen, 4, causal), mask & every)
    added = of_them(torch.zeros(2, 1, 5, 7), chosen, 4, causal)
    assert torch.equal(added == 0, every) and added.min() == torch.finfo(torch.float32).min
    assert torch.equal(of_them(None, chosen, 4, causal), every.tril() if causal else every)
