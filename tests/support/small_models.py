"""What transformers' models are made of where tests make them, so small that each takes no time; and what is asked
of them."""

import torch

import registry

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tokens(batch=2, length=11):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(2))


def run(model, implementation, function):
    """What a model gives by an implementation, and what the registry saw."""
    model.set_attn_implementation(implementation)
    with registry.record() as recorder:
        return function(model), recorder.counts


def agreed(model, function, grad=False, **tolerances):
    """What the registry saw, where a model gives by our attention what it gives by its eager one."""
    with torch.set_grad_enabled(grad):
        theirs, _ = run(model, "eager", function)
        ours, counts = run(model, "kernel_registry", function)
    torch.testing.assert_close(ours, theirs, **{"rtol": 1e-4, "atol": 1e-5} | tolerances)
    return counts
