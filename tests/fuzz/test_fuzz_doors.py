"""What stands before the ops: calls of which one argument is something else are refused by its name, or answered."""

from __future__ import annotations

import inspect

import pytest
import torch
from drawn import HOSTILE, REFUSALS, TENSORS, outcome, same
from hypothesis import given
from hypothesis import strategies as st

import registry
from registry.compat import flash_attn
from registry.integrations import sdpa

_generator = torch.Generator().manual_seed(0)


def t(*shape):
    return torch.randn(*shape, generator=_generator)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


PACKED = {"q": t(10, 4, 16), "k": t(12, 2, 16), "v": t(12, 2, 16), "cu_seqlens_q": i32(0, 4, 10)}
MAXIMA = {"max_seqlen_q": 6, "max_seqlen_k": 8}
PAGES = {"k": t(5, 4, 2, 16), "v": t(5, 4, 2, 16)}
TABLE = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32)
DENSE = {"q": t(2, 6, 4, 16), "k": t(2, 8, 2, 16), "v": t(2, 8, 2, 16)}
NEW = {"q": t(2, 2, 4, 16), "k": t(2, 2, 2, 16), "v": t(2, 2, 2, 16), "cache_seqlens": i32(3, 6), "causal": True}
CACHE = {"k_cache": t(2, 8, 2, 16), "v_cache": t(2, 8, 2, 16)}
BHSD = {"q": t(2, 4, 6, 16), "k": t(2, 2, 8, 16), "v": t(2, 2, 8, 16)}
EVEN = {"query": t(2, 4, 6, 16), "key": t(2, 4, 8, 16), "value": t(2, 4, 8, 16)}

DOORS = {
    "ragged": (registry.attention, BHSD | {"key_lengths": i32(8, 3), "sinks": t(4), "causal": True}),
    "func": (flash_attn.flash_attn_func, DENSE | {"causal": True}),
    "func-alibi": (flash_attn.flash_attn_func, DENSE | {"alibi_slopes": t(4).abs(), "s_aux": t(4)}),
    "varlen": (flash_attn.flash_attn_varlen_func, PACKED | MAXIMA | {"cu_seqlens_k": i32(0, 5, 12)}),
    "varlen-used": (
        flash_attn.flash_attn_varlen_func,
        PACKED | MAXIMA | {"cu_seqlens_k": i32(0, 5, 12), "seqused_q": i32(4, 2), "seqused_k": i32(5, 3)},
    ),
    "varlen-paged": (
        flash_attn.flash_attn_varlen_func,
        PACKED | MAXIMA | PAGES | {"cu_seqlens_k": None, "seqused_k": i32(8, 5), "block_table": TABLE},
    ),
    "cache": (flash_attn.flash_attn_with_kvcache, NEW | CACHE | {"rotary_cos": t(8, 8), "rotary_sin": t(8, 8)}),
    "cache-paged": (
        flash_attn.flash_attn_with_kvcache,
        NEW | {"k_cache": PAGES["k"], "v_cache": PAGES["v"], "block_table": TABLE},
    ),
    "cache-indexed": (
        flash_attn.flash_attn_with_kvcache,
        NEW | {"k_cache": t(4, 8, 2, 16), "v_cache": t(4, 8, 2, 16), "cache_batch_idx": i32(3, 1)},
    ),
    "sdpa": (sdpa.attention, EVEN | {"is_causal": True, "scale": 0.3}),
}
NAMES = {
    name: [p.name for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, (call, _) in DOORS.items()
}


def ask(call, arguments):
    """The outcome of a call that writes into caches of its own."""
    return outcome(call, **{n: v.clone() if n in CACHE and _is_plain(v) else v for n, v in arguments.items()})


def _is_plain(value):
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


@pytest.mark.parametrize("door", DOORS)
@given(data=st.data())
def test_a_door_names_an_argument_that_is_none(door, data):
    call, good = DOORS[door]
    name = data.draw(st.sampled_from(NAMES[door]))
    bad = data.draw(HOSTILE)
    if isinstance(good.get(name), torch.Tensor) and data.draw(st.booleans()):
        try:
            bad = data.draw(TENSORS)(good[name])
        except (RuntimeError, IndexError, TypeError):
            return
    registry.forget_plans()
    try:
        cold = ask(call, good | {name: bad})
    except Exception as error:
        assert door == "sdpa" and not isinstance(error, REFUSALS), (name, error)
        with pytest.raises(type(error)):  # what stays torch's is refused by torch
            torch.nn.functional.scaled_dot_product_attention(**good | {name: bad})
        return
    assert ask(call, good)[0] == "gave"
    assert same(cold, ask(call, good | {name: bad})) and same(cold, ask(call, good | {name: bad}))
    assert cold[0] != "TypeError" or door == "sdpa", (name, cold[1])
    assert cold[0] == "gave" or "\x1b" not in cold[1]
