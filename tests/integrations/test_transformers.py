"""transformers' own models, tiny and random, give by our attention what they give by their eager one."""

from __future__ import annotations

import functools
import types

import pytest
import small_models
import torch
from small_models import agreed, run, tokens

import registry

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from registry.integrations import transformers as door  # noqa: E402
from registry.integrations.transformers.masks import Pattern, pattern_of  # noqa: E402

SMALL = small_models.SMALL | {"head_dim": 8}
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=4)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1)
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SMALL,
            attention_chunk_size=5,
            intermediate_size_mlp=32,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["chunked_attention", "full_attention"],
        )
    ),
}
DECODERS = pytest.mark.parametrize("family", FAMILIES)
PADDINGS = {
    "none": None,
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 11],
    "right": [[1] * 11, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "both": [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
}


@pytest.fixture(autouse=True)
def enabled():
    door.enable()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def models():
    """Each family once: its eager results are what ours are held to."""
    made = {}

    def model(family):
        if family not in made:
            torch.manual_seed(1)
            made[family] = FAMILIES[family]().eval()
            for name, parameter in made[family].named_parameters():
                if "sinks" in name or "bias" in name:
                    torch.nn.init.normal_(parameter)
        return made[family]

    return model


def padded(padding):
    """The mask of a padding, and the tokens that it keeps."""
    mask = None if PADDINGS[padding] is None else torch.tensor(PADDINGS[padding])
    return mask, torch.ones(2, 11, dtype=torch.bool) if mask is None else mask.bool()


@DECODERS
@pytest.mark.parametrize("padding", PADDINGS)
def test_decoders_agree_with_eager(models, family, padding):
    mask, kept = padded(padding)

    counts = agreed(models(family), lambda model: model(tokens(), attention_mask=mask).logits[kept])
    assert "elsewhere" not in counts and sum(sum(c.values()) for c in counts.values()) == 2
    if padding == "none" and family in ("llama", "mistral", "gemma2"):
        assert set(counts) == {"attention"}
    elif padding != "none":
        assert set(counts) == {"attention_varlen"}


def test_padded_rows_stay_where_they_are(models):
    """And a batch of one shape is one problem, however it is padded; tokens that lie apart are moved together."""
    model, problems = models("llama"), set()
    apart = [[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 11]
    for padding in (*(PADDINGS[side] for side in ("left", "right", "both")), [[0] * 11, [1] * 11], apart):
        kept = torch.tensor(padding).bool()
        model.set_attn_implementation(door.NAME)
        with torch.no_grad(), registry.record() as ran:
            ours = model(tokens(), attention_mask=kept.long()).logits
        theirs, _ = run(model, "eager", lambda model, kept=kept: model(tokens(), attention_mask=kept.long()).logits)
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-4, atol=1e-5)
        (problem,) = ran.problems
        assert (problem.total_q == tokens().numel()) is (padding is not apart)
        if padding is not apart:
            problems.add(problem)
    assert len(problems) == 1


MORE = [
    *("Cohere", "Cohere2", "Gemma", "Gemma3Text", "Glm", "GPTNeoX", "Granite", "Mixtral", "Olmo2", "Phi3"),
    *("Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Starcoder2"),
]


@pytest.mark.parametrize("family", MORE)
def test_more_families_agree_with_eager(family):
    """Whatever else a family does, no layer of it goes elsewhere."""
    causal_lm = f"{family.removesuffix('Text')}ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**SMALL, sliding_window=4)
    model = getattr(transformers, causal_lm)(config).eval()
    mask = torch.tensor(PADDINGS["left"])

    def forward(model):
        return model(tokens()).logits, model(tokens(), attention_mask=mask).logits * mask[..., None]

    counts = agreed(model, forward)
    assert {op: sum(ran.values()) for op, ran in counts.items()} == {"attention": 2, "attention_varlen": 2}


@DECODERS
def test_decoders_train(models, family):
    mask = torch.tensor(PADDINGS["right"])
    labels = torch.where(mask.bool(), tokens(), -100)

    def gradients(model):
        model.zero_grad()
        model(tokens(), attention_mask=mask, labels=labels).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    counts = agreed(models(family), gradients, grad=True, rtol=1e-3)
    assert set(counts) == {"attention_varlen", "attention_varlen_backward"}


@DECODERS
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("builds", [False, True], ids=["", "built by shape"])
def test_decoders_generate(models, family, padding, cache, builds, monkeypatch):
    monkeypatch.setattr(door, "_builds_by_shape", lambda device: builds)
    if (family, cache) == ("llama4", "static"):
        pytest.skip("transformers itself cannot: create_chunked_causal_mask takes no block_sequence_ids")
    mask = torch.ones(2, 11, dtype=torch.int64) if padding == "none" else torch.tensor(PADDINGS[padding])

    def generate(model):
        found = model.generate(
            tokens(),
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return *found.logits, found.sequences

    counts = agreed(models(family), generate)
    assert "elsewhere" not in counts
    if family == "llama" and padding == "none":
        assert ("attention_varlen" in counts) == (builds or cache == "static")


@DECODERS
def test_packed_sequences_do_not_see_each_other(models, family):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]])

    counts = agreed(models(family), lambda model: model(tokens(1), position_ids=positions, use_cache=False).logits)
    assert set(counts) == {"attention_varlen"}


@pytest.mark.parametrize("padding", PADDINGS)
def test_encoders(padding):
    config = transformers.BertConfig(**SMALL)
    model = transformers.BertModel(config).eval()
    mask, kept = padded(padding)

    counts = agreed(model, lambda model: model(tokens(), attention_mask=mask).last_hidden_state[kept])
    assert set(counts) == {"attention" if mask is None else "attention_varlen"}


def test_cross_attention_over_a_padded_encoder():
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = transformers.BartModel(config).eval()
    mask = torch.tensor(PADDINGS["right"])

    def forward(model):
        decoded = (tokens(length=11), tokens(length=5))
        return [model(tokens(), attention_mask=mask, decoder_input_ids=ids).last_hidden_state for ids in decoded]

    counts = agreed(model, forward)
    assert set(counts) == {"attention", "attention_varlen"}


# --- what no variant can run is computed all the same, and counted ---------------------------------------------------


def test_a_mask_of_the_users_own(models):
    seen = torch.rand(2, 1, 11, 11) > 0.4
    seen |= torch.eye(11, dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    counts = agreed(models("llama"), lambda model: model(tokens(), attention_mask=mask).logits)
    assert counts == {"elsewhere": {"transformers: a dense mask": 2}}


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_over_holes(models, family):
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1], [1] * 11])

    counts = agreed(models(family), lambda model: model(tokens(), attention_mask=mask).logits[mask.bool()])
    layers = {"mistral": 2, "gemma2": 1, "gpt_oss": 1}[family]
    assert counts["elsewhere"] == {"transformers: a window over padding between tokens": layers}


def test_mask_functions_of_others_have_no_pattern():
    masks = transformers.masking_utils
    own = masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: q != k + 1)
    either = masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function)
    for function in (own, either, functools.partial(own), lambda b, h, q, k: k <= q):
        assert pattern_of(function) is None
    window = masks.and_masks(masks.sliding_window_overlay(4), masks.sliding_window_causal_mask_function(7))
    assert pattern_of(window) == Pattern(causal=True, left=3)
    # As a graph that breaks on Python 3.10 makes it anew: without the name of that which made it.
    nameless = types.FunctionType(window.__code__, {}, "inner", None, window.__closure__)
    nameless.__qualname__, nameless.__module__ = "inner", None
    assert pattern_of(nameless) == Pattern(causal=True, left=3)


def test_dropout_of_weights():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attention_dropout=0.5)).train()
    loss, counts = run(model, door.NAME, lambda model: model(tokens(), labels=tokens()).loss)
    loss.backward()
    assert counts == {"elsewhere": {"transformers: dropout of attention weights": 2}}


def test_a_bias_of_positions():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=64)
    model = transformers.T5Model(config).eval()

    def forward(model):
        with torch.no_grad():
            return model(tokens(), decoder_input_ids=tokens(length=5)).last_hidden_state

    expected = forward(model)
    ours = transformers.T5Model._from_config(config, attn_implementation=door.NAME).eval()
    ours.load_state_dict(model.state_dict())
    with registry.record() as recorder:
        torch.testing.assert_close(forward(ours), expected, rtol=1e-4, atol=1e-5)
    assert recorder.counts["elsewhere"]["transformers: a position bias"] >= 2


def test_masks_are_what_transformers_would_have_made(models):
    """The meaning of a mask, spelled out by transformers, is the mask of its sdpa."""
    config = models("mistral").config
    made = {}
    for name in ("sdpa", door.NAME):
        config._attn_implementation = name
        made[name] = transformers.masking_utils.create_sliding_window_causal_mask(
            config, torch.empty(2, 11, 32), torch.tensor(PADDINGS["left"]), None
        )
    assert torch.equal(made["sdpa"], made[door.NAME].dense())
    assert "padding=True" in repr(made[door.NAME])


@pytest.mark.slow(6, together="inductor")
def test_a_model_compiles():
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]] * 2)
    padding = torch.tensor(PADDINGS["left"])
    cases = ({}, {"position_ids": packed}, {"attention_mask": padding})

    def forward(model, given):
        kept = given.get("attention_mask", torch.ones(2, 11)).bool()
        with torch.no_grad():
            return model(tokens(), **given, use_cache=False).logits[kept]

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1})).eval()
    expected, _ = run(model, "eager", lambda model: [forward(model, given) for given in cases])
    model.set_attn_implementation(door.NAME)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for given, wanted in zip(cases, expected, strict=True):
        with registry.record() as recorder:
            torch.testing.assert_close(forward(compiled, given), wanted, rtol=1e-4, atol=1e-5)
        assert set(recorder.counts) == {"attention_varlen" if given else "attention"}


def test_an_exported_model_is_right_and_says_what_it_lost(models):
    model = models("llama")
    expected, _ = run(model, "eager", lambda model: model(tokens(), use_cache=False).logits)
    model.set_attn_implementation(door.NAME)
    with registry.record() as recorder:
        program = torch.export.export(model, (tokens(),), {"use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(tokens(), use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    (because,) = recorder.counts["elsewhere"]
    assert "exported" in because  # whether positions are packed is data, which an export cannot look at
