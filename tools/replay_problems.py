"""The problems that tools/replay.py puts to two trees: the same to both, since the new one's draw is handed to each."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

SEED = 20240607
TARGETS = ("cpu", "RTX 3090", "A100", "H100", "H200", "B200")
BUILD_TARGETS = ("A100", "RTX 3090", "H100", "B200")

VALUES: dict[str, tuple[Any, ...]] = {
    "int": (1, 16, 33, 72, 192, 4096),
    "bool": (True,),
    "float": (0.0, 30.0, 50.0),
    "Window | None": (255, (255, 0), (128, 64), (-1, 32)),
}
"""What a word of a kind may be; one of text may be what its op knows."""
REFUSED = {"int": -8, "str": "xx", "float": -1.0, "Window | None": (-5, 3)}

_ATTENTION_BUILDS: tuple[dict[str, Any], ...] = (
    dict(b=2, hq=16, s=4096, d=128),
    dict(b=2, hq=16, s=4096, d=64, causal=True),
    dict(b=1, hq=32, hkv=8, s=2048, d=128, causal=True, window=(255, 0), softcap=30.0, layout="bshd", dtype="float16"),
    dict(b=1, hq=8, s=1024, d=256, lse=True),
    dict(b=1, hq=4, s=300, d=64, dtype="float32", ieee=True),
    dict(b=8, hq=32, hkv=8, s=1, sk=4096, d=128),
    dict(b=1, hq=8, s=777, d=96, dv=64, lse=True, window=(64, 64)),
)
# Shapes of which every variant's every legal config is built: each feature that changes a kernel at least once.
BUILDS: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": _ATTENTION_BUILDS,
    "attention_backward": (*_ATTENTION_BUILDS, dict(b=1, hq=8, s=1024, d=128, grad_lse=True, deterministic=True)),
    "attention_varlen": (
        dict(b=16, hq=32, hkv=8, sq=1, sk=4096, d=128, kv="paged"),
        dict(b=8, hq=16, sq=2048, sk=2048, d=128, causal=True, lse=True),
        dict(b=4, hq=32, hkv=8, sq=512, sk=4096, d=128, causal=True, kv="paged", page=16, window=(255, 0), sinks=True),
        dict(b=4, hq=32, hkv=8, sq=4, sk=4096, d=64, causal=True, kv="cache", kv_dtype="int8", dtype="float16"),
    ),
    "attention_varlen_backward": (
        dict(b=8, hq=16, sq=2048, sk=2048, d=128, causal=True, lse=True),
        dict(b=8, hq=32, hkv=8, sq=777, sk=777, d=64, causal=True, lse=True, sinks=True, deterministic=True),
    ),
    "matmul": (
        dict(m=4096, n=4096, k=4096),
        dict(m=4096, n=4096, k=4096, layout="nt", dtype="float16", bias=True),
        dict(m=2048, n=2048, k=8192, activation="gelu", bias=True, layout="tn"),
        dict(m=16, n=14336, k=4096),
        dict(m=1024, n=1024, k=1024, dtype="float8_e4m3fn", layout="nt", scaling="rowwise", activation="silu"),
        dict(m=512, n=512, k=512, b=8, activation="relu"),
        dict(m=512, n=512, k=512, dtype="float32", ieee=True),
        dict(m=512, n=512, k=512, dtype="int8", layout="nt"),
        dict(m=100, n=77, k=33, layout="tt"),
        dict(m=1024, n=1024, k=1024, out_dtype="float32"),
    ),
}


def drawn(name: str, count: int) -> Iterator[dict[str, Any]]:
    """Problems of an op, as words of `of_shape`: shapes of its grids and of its draw, each with two words changed, and
    every tenth with one that must be refused. The same in each process of a tree."""
    from registry.ops.known import op_named

    op, draw = op_named(name), random.Random(f"{SEED} {name}")
    kinds, known = op.problem_type.fact_kinds(), op.problem_type.known_values
    fields = {word: op.tuning.fields.get(word, word) for word in inspect.signature(op.problem_type.of_shape).parameters}
    kind_of = {word: str(kinds[field]) for word, field in fields.items() if field in kinds}
    values = {word: VALUES.get(kind) or known.get(fields[word], known["dtype"]) for word, kind in kind_of.items()}
    grids = [case for grid in op.tuning.grids.values() for case in grid(name)]
    drawn = op.tuning.draws["random"] if hasattr(op.tuning, "draws") else op.tuning.draw  # of an older side
    for number in range(count):
        shape = draw.choice((draw.choice(grids), drawn(draw))).shape
        words = {word: value for word, value in shape if word in fields}
        words |= {word: draw.choice(values[word]) for word in draw.sample(sorted(values), 2)}
        if number % 10 == 9:
            word = draw.choice(sorted(word for word, kind in kind_of.items() if kind in REFUSED))
            words[word] = REFUSED[kind_of[word]]
        yield words


def odd_calls() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls with meta tensors whose strides, storage offsets, dtypes or ranks `of_shape` cannot say."""
    import torch

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, wide, square = meta(2, 8, 512, 64), meta(2, 8, 512, 136), meta(512, 512)
    swapped, rows = meta(2, 512, 8, 64).transpose(1, 2), wide[..., :64]
    return {
        "bshd views": ("attention", (swapped, swapped, swapped), {"causal": True}),
        "layout=bshd": ("attention", (meta(2, 512, 8, 64),) * 3, {"layout": "bshd", "window": 64}),
        "one bshd view": ("attention", (q, swapped, q), {}),
        "padded rows": ("attention", (rows, rows, rows), {"return_lse": True}),
        "an offset of one element": ("attention", (wide[..., 1:65], q, q), {}),
        "columns two apart": ("attention", (wide[..., 0:128:2], q, q), {}),
        "expanded heads": ("attention", (q, meta(2, 1, 512, 64).expand(2, 8, 512, 64), q), {}),
        "an empty batch": ("attention", (q[:0], q[:0], q[:0]), {}),
        "two dtypes": ("attention", (q, q.to(torch.float16), q), {}),
        "three dimensions": ("attention", (q[0], q[0], q[0]), {}),
        "saved bshd views": ("attention_backward", (q, swapped, q, q, q, meta(2, 8, 512, dtype=torch.float32)), {}),
        "transposed operands": ("matmul", (square.t(), square.t()), {}),
        "every second column": ("matmul", (meta(512, 1024)[:, ::2], square), {}),
        "an odd row stride": ("matmul", (meta(512, 515)[:, :512], square), {}),
        "an odd offset": ("matmul", (meta(512, 520)[:, 1:513], square), {"activation": "relu"}),
        "a vector": ("matmul", (meta(512), square), {}),
        "broadcast batches": ("matmul", (meta(3, 1, 64, 32), meta(4, 32, 16)), {}),
        "an empty inner size": ("matmul", (meta(8, 0), meta(0, 8)), {}),
        "sizes that differ": ("matmul", (meta(8, 3), meta(4, 8)), {}),
        "a bias of one row": ("matmul", (square, square), {"bias": meta(1, 512)}),
    }
