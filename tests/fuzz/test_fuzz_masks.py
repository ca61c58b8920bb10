"""Drawn masks of transformers: whoever runs the attention, its rows are those of the dense mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils

from registry.integrations import transformers as door

KINDS = ("causal", "sliding", "chunked", "both ways", "window both ways")
PADDINGS = ("none", "left", "right", "both", "holes", "a row of it")


@st.composite
def masks(draw):
    """(mask, which queries are tokens) as models ask for them: with a cache, padded, of packed sequences."""
    kind, padding, window = (
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(PADDINGS)),
        draw(st.sampled_from((1, 2, 4, 20))),
    )
    batch, queries, packed = draw(st.integers(1, 3)), draw(st.sampled_from((1, 3, 7, 11))), draw(st.booleans())
    past = 0 if packed else draw(st.sampled_from((0, 0, 1, 5, 8)))
    before = draw(st.sampled_from((0, 0, 2))) if past > 2 else 0  # keys that a sliding cache has dropped
    keys = past + queries - before + (0 if packed else draw(st.sampled_from((0, 0, 4))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    given = None if padding == "none" else _padding(padding, batch, keys + before, generator)
    begins = torch.zeros(batch, dtype=torch.int64) if given is None else given.long().argmax(1)
    function = {
        "causal": lambda: masking_utils.causal_mask_function,
        "sliding": lambda: masking_utils.sliding_window_causal_mask_function(window),
        "chunked": lambda: masking_utils.chunked_causal_mask_function(max(window, 2), begins),
        "both ways": lambda: masking_utils.bidirectional_mask_function,
        "window both ways": lambda: masking_utils.sliding_window_bidirectional_mask_function(window),
    }[kind]()
    if packed:
        ids = (torch.rand(batch, queries, generator=generator) > 0.7).cumsum(1)
        function = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(ids), function)
    offset = torch.tensor(past) if draw(st.booleans()) and not packed else past
    shape = {"batch_size": batch, "q_length": queries, "kv_length": keys, "q_offset": offset, "kv_offset": before}
    mask = door.mask(**shape, mask_function=function, attention_mask=given, device="cpu")
    tokens = torch.ones(batch, queries, dtype=torch.bool) if given is None else given[:, past : past + queries]
    return mask, tokens


def _padding(kind, batch, length, generator):
    found = torch.ones(batch, length, dtype=torch.bool)
    for row in found:
        left, right = torch.randint(0, length // 2 + 1, (2,), generator=generator).tolist()
        if kind in ("left", "both"):
            row[:left] = False
        if kind in ("right", "both"):
            row[length - right :] = False
    if kind == "holes":
        found = torch.rand(batch, length, generator=generator) > 0.3
    elif kind == "a row of it":
        found[0] = False
    return found


@given(drawn=masks(), sinks=st.booleans(), softcap=st.sampled_from((None, None, 3.0)))
def test_drawn_masks_are_what_their_dense_ones_are(drawn, sinks, softcap):
    mask, tokens = drawn
    door.enable()
    torch.manual_seed(0)
    q = torch.randn(mask.batch, 4, mask.queries, 8)
    k, v = torch.randn(2, mask.batch, 2, mask.keys, 8)
    sink = torch.randn(4) if sinks else None
    found, _ = door.attention(torch.nn.Identity(), q, k, v, mask, softcap=softcap, s_aux=sink)
    seen = mask.dense().expand(mask.batch, 1, mask.queries, mask.keys)
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : mask.keys].nan_to_num()
    wanted = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    kept = tokens & seen.any(-1)[:, 0]
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[kept], wanted[kept], rtol=1e-4, atol=1e-5)
