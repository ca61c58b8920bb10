"""Gated MLPs of transformers' own models, tiny and random, give fused what they give as they are."""

from __future__ import annotations

import copy
import io

import pytest
import small_models
import torch
from torch import nn

import registry
from registry import notices

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from registry.integrations import transformers as door  # noqa: E402
from registry.integrations.transformers.mlp import GatedMlp, _both  # noqa: E402

SMALL = small_models.SMALL | {"intermediate_size": 48}
FUSED = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Granite", "Olmo2", "Cohere", "SmolLM3")
KERNELS_ACTIVATION = set(FUSED) - {"Gemma", "Gemma2"}  # whose GELU is one by tanh
IDS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(2))


def model_of(family="Llama", dtype=torch.float32, **more):
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def seen_giving(model, expected):
    """What the registry saw, where the model gives these logits."""
    with registry.record() as ran:
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    return {op: sum(counts.values()) for op, counts in ran.counts.items()}, ran.counts.get("elsewhere")


def mlps(model):
    return [layer.mlp for layer in model.model.layers]


@pytest.mark.parametrize("family", FUSED)
def test_families_agree_with_themselves(family):
    model = model_of(family)
    theirs, names, classes = logits(model), list(model.state_dict()), [type(one) for one in mlps(model)]
    assert door.fuse(model) == ("model.layers.0.mlp", "model.layers.1.mlp")
    ran, _ = seen_giving(model, theirs)
    assert ran == {"matmul" if family in KERNELS_ACTIVATION else "elsewhere": 2}
    assert list(model.state_dict()) == names
    assert door.unfuse(model) == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert [type(one) for one in mlps(model)] == classes
    assert torch.equal(logits(model), theirs)


def test_in_sixteen_bits_it_is_nearer_to_the_truth_than_the_library_or_as_near():
    exact = logits(model_of(dtype=torch.float64))
    model = model_of(dtype=torch.bfloat16)
    theirs = (logits(model) - exact).abs().mean()
    door.fuse(model)
    assert (logits(model) - exact).abs().mean() <= 1.1 * theirs


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients(family, checkpointed):
    def gradients(model):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model = model_of(family)
    theirs = gradients(model)
    door.fuse(model)
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-6)


def test_an_optimizer_made_before_goes_on_and_the_fused_product_sees_it():
    model, plain = model_of(), model_of()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
    door.fuse(model)
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            one(IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
    assert all(_lies_joined(one) for one in mlps(model))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-4)


def _lies_joined(mlp):
    return _both(mlp.gate_proj.weight, mlp.up_proj.weight) is not None


def _saved(model):
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def _assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    return model


def _filled(model):
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.to_empty(device="meta").to_empty(device="cpu")
    model.load_state_dict(state)
    for name, buffer in model_of().named_buffers():
        model.get_buffer(name).copy_(buffer)
    return model


@pytest.mark.parametrize(
    "change",
    [copy.deepcopy, _saved, _assigned, _filled, lambda model: model.to(torch.float64).to(torch.float32)],
    ids=["deepcopy", "torch.save", "assign", "meta", "to"],
)
def test_weights_stay_side_by_side(change):
    model = model_of()
    theirs = logits(model)
    door.fuse(model)
    changed = change(model)
    assert all(isinstance(one, GatedMlp) and _lies_joined(one) for one in mlps(changed))
    assert seen_giving(changed, theirs) == ({"matmul": 2}, None)
    if changed is not model:  # a copy is of its own
        mlps(changed)[0].gate_proj.weight.data.zero_()
        torch.testing.assert_close(logits(model), theirs, rtol=1e-4, atol=1e-5)


def test_pretrained_files_are_those_of_the_library(tmp_path):
    model = model_of()
    theirs = logits(model)
    door.fuse(model)
    model.save_pretrained(tmp_path)
    back, how = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(how.values())
    torch.testing.assert_close(logits(back), theirs, rtol=1e-4, atol=1e-5)


def test_weights_that_were_moved_apart_are_seen():
    model = model_of()
    door.fuse(model)
    mlp = mlps(model)[0]
    mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.clone() * 2
    plain = copy.deepcopy(model)
    door.unfuse(plain)
    expected = logits(plain)
    ran, elsewhere = seen_giving(model, expected)
    assert ran["matmul"] == 1
    assert elsewhere == {"transformers: a gated MLP whose weights were moved apart: call fuse(model) again": 1}
    assert len(door.fuse(model)) == 2
    assert seen_giving(model, expected) == ({"matmul": 2}, None)


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def _adapter(mlp):
    mlp.up_proj = Adapter(mlp.up_proj)


def _hook(mlp):
    mlp.gate_proj.register_forward_hook(lambda module, args, out: out + 1)


def _own_forward(mlp):
    inner = mlp.up_proj.forward
    mlp.up_proj.forward = lambda x: inner(x) + 1


@pytest.mark.parametrize(
    ("change", "why"), [(_adapter, "an? Adapter"), (_hook, "a Linear with hooks"), (_own_forward, "forward of its own")]
)
def test_what_somebody_took_hold_of_is_the_librarys(change, why):
    model, other = model_of(), model_of()
    door.fuse(model)
    change(mlps(model)[0])
    change(mlps(other)[0])
    _, elsewhere = seen_giving(model, logits(other))
    ((because, times),) = elsewhere.items()
    assert times == 1 and because.startswith("transformers: a gated MLP with ")
    notices.clear()
    assert door.fuse(other) == ("model.layers.1.mlp",)
    (told,) = [text for text in notices.counts() if "transformers.fuse leaves model.layers.0.mlp" in text]
    assert pytest.importorskip("re").search(why, told)


def test_an_activation_that_somebody_looks_at_is_computed():
    model = model_of()
    door.fuse(model)
    seen = []
    mlps(model)[1].act_fn.register_forward_hook(lambda module, args, out: seen.append(out))
    theirs = logits(model_of())
    torch.testing.assert_close(logits(model), theirs, rtol=1e-4, atol=1e-5)
    assert len(seen) == 1


def test_an_adapter_behind_the_gate_is_the_models_own_business():
    model, other = model_of(), model_of()
    for one in (model, other):
        mlps(one)[0].down_proj = Adapter(mlps(one)[0].down_proj)
    assert len(door.fuse(model)) == 2
    assert seen_giving(model, logits(other)) == ({"matmul": 2}, None)


def test_biases():
    model = model_of(mlp_bias=True)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    theirs = logits(model)
    door.fuse(model)
    torch.testing.assert_close(logits(model), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi3", "GptOss"])
def test_a_model_without_gated_mlps_is_an_error(family):
    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "GptOss" else {}
    model = model_of(family, **more)
    with pytest.raises(registry.InvalidArgument, match="gate_proj, up_proj, down_proj"):
        door.fuse(model)
    with pytest.raises(registry.InvalidArgument, match=r"model.*str"):
        door.fuse("a model")


def test_experts_with_a_gate_of_their_own_are_left():
    """A module with the parts and another forward: its class is not taken for what it looks like."""

    class Clamped(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
                mlp.gate_proj,
                mlp.up_proj,
                mlp.down_proj,
                mlp.act_fn,
            )

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1) * self.up_proj(x))

    model = model_of()
    model.model.layers[0].mlp = Clamped(model.model.layers[0].mlp)
    assert door.fuse(model) == ("model.layers.1.mlp",)


def test_autocast_and_fake_tensors_and_functional_calls():
    model, plain = model_of(), model_of()
    door.fuse(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(logits(model), logits(plain), rtol=2e-2, atol=2e-2)
    doubled = {name: p * 2 for name, p in plain.named_parameters() if "mlp" in name}
    with torch.no_grad():
        ours, theirs = (
            torch.func.functional_call(one, doubled, (IDS,), {"use_cache": False}).logits for one in (model, plain)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    from torch.utils.flop_counter import FlopCounterMode

    counted = []
    for one in (model, plain):
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            mlps(one)[0](torch.randn(2, 7, 32))
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] == 2 * 14 * 32 * 48 * 3


@pytest.mark.slow(3, together="inductor")
@pytest.mark.parametrize("grad", [False, True])
def test_a_fused_mlp_compiles_into_one_graph(grad):
    model = model_of()
    mlp, x = mlps(model)[0], torch.randn(2, 7, 32)

    def call(function):
        with torch.set_grad_enabled(grad):
            out = function(x)
        if grad:
            mlp.zero_grad()
            out.sum().backward()
            return [out.detach(), *(p.grad.clone() for p in mlp.parameters())]
        return [out]

    theirs = call(mlp)
    door.fuse(model)
    mlp = mlps(model)[0]
    torch._dynamo.reset()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    with registry.record() as ran:
        torch.testing.assert_close(call(compiled), theirs, rtol=1e-4, atol=1e-5)
    assert ("matmul" in ran.counts) == (not grad) and "elsewhere" not in ran.counts
    if not grad:  # weights that change their place under a compiled graph
        with torch.no_grad():
            mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.clone() * 2
            torch.testing.assert_close(compiled(x), mlp(x), rtol=1e-4, atol=1e-5)


def test_a_fused_model_exports():
    model = model_of()
    mlp, x = mlps(model)[0], torch.randn(2, 7, 32)
    theirs = mlp(x)
    door.fuse(model)
    with torch.no_grad():
        program = torch.export.export(mlps(model)[0], (x,))
    torch.testing.assert_close(program.module()(x), theirs, rtol=1e-4, atol=1e-5)
    assert "gated_product" not in str(program.graph)  # which `import registry` alone does not know
