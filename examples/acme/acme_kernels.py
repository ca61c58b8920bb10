"""A third-party variant in one file. `pip install examples/acme` and the registry finds it: `kreg list --op attention`.

The kernel here is torch code that walks over blocks of queries, so that it runs anywhere. With Triton, only `attention`
differs: it would allocate with `new_out` and `new_lse`, and launch a @triton.jit function.
"""

import torch

from registry import Design, Requires, Variant, hookimpl
from registry.ops.attention.outputs import new_lse, new_out


def attention(q, k, v, *, causal, return_lse, scale, config):
    """q [B, H, S, D], k and v [B, H, T, D]: exactly the arguments whose features are claimed below, and `config`."""
    out, lse = new_out(q, v), new_lse(q)
    length, keys = q.shape[2], k.shape[2]
    for start in range(0, length, config["BLOCK_M"]):
        rows = slice(start, min(start + config["BLOCK_M"], length))
        scores = (q[:, :, rows].float() @ k.float().transpose(-1, -2)) * scale
        if causal:  # bottom-right: query i sees keys up to i + keys - length
            row = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + keys - length
            scores.masked_fill_(torch.arange(keys, device=q.device) > row, float("-inf"))
        lse[:, :, rows] = torch.logsumexp(scores, dim=-1)
        shift = lse[:, :, rows, None].nan_to_num(neginf=0.0)  # a row that sees no key gives 0
        out[:, :, rows] = (torch.exp(scores - shift) @ v.float()).to(q.dtype)
    return out, lse if return_lse else None


@hookimpl
def registry_variants():
    return [
        Variant(
            "acme.blocked",
            op="attention",
            run=attention,
            requires=Requires(
                arch=("any",),
                dtypes=("float16", "bfloat16", "float32"),
                head_dim=(16, 256),
                head_dim_multiple=8,
                layouts=("bhsd", "bshd", "strided"),
                unit_inner_stride=False,
                causal=True,
                cross_length=True,
                lse=True,
                deterministic=True,
                ieee=True,
            ),
            design=Design(tile=(128,), dsl="torch"),
            configs=[{"BLOCK_M": 128}, {"BLOCK_M": 64}],
            summary="an example: softmax over blocks of queries",
        )
    ]
