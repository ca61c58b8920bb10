"""The problems that tools/replay.py puts to two trees: the same in both, since nothing here asks a tree anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

SEED = 20240607
TARGETS = ("cpu", "RTX 3090", "A100", "H100", "H200", "B200")
BUILD_TARGETS = ("A100", "RTX 3090", "H100", "B200")

# Values are drawn alike, so one that is listed often is asked often.
ATTENTION: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",) * 4 + ("float16", "float16", "float32", "float32", "float64", "float8_e4m3fn"),
    "b": (1, 1, 2, 4, 16),
    "heads": ((16, 16), (16, 16), (32, 8), (8, 1), (7, 7), (1, 1), (64, 8)),
    "s": (1, 17, 64, 128, 512, 1024, 1536, 4096, 4096, 8192, 16384),
    "sk": (None,) * 6 + (1, 77, 2048, 4096),
    "d": (64, 64, 64, 128, 128, 128, 128, 256, 96, 80, 72, 40, 16, 192, 33, 320),
    "dv": (None,) * 8 + (64, 128, 48),
    "layout": ("bhsd", "bhsd", "bshd"),
    "causal": (False, True),
    "window": (None,) * 6 + (255, (255, 0), (128, 64), (-1, 0), (-1, 32)),
    "softcap": (0.0,) * 5 + (30.0, 50.0),
    "lse": (False, True),
    "ieee": (False, False, True),
    "deterministic": (False, False, False, True),
}
MATMUL: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",) * 4 + ("float16", "float16", "float32", "float64", "int8", "float8_e4m3fn"),
    "m": (1, 8, 16, 64, 100, 128, 512, 1024, 4096, 8192),
    "n": (1, 77, 128, 512, 1024, 4096, 4096, 14336),
    "k": (1, 33, 64, 256, 1024, 4096, 4096, 8192),
    "b": (1,) * 6 + (2, 8, 64),
    "layout": ("nn", "nt", "tn", "tt"),
    "bias": (False, False, True),
    "activation": ("", "", "", "relu", "gelu", "silu"),
    "out_dtype": (None,) * 6 + ("float32", "bfloat16", "int32"),
    "scaling": ("",) * 4 + ("scalar", "rowwise"),
    "dtype_b": (None,) * 8 + ("float8_e5m2",),
    "ieee": (False, False, True),
    "deterministic": (False,) * 3 + (True,),
}
SPACES = {"attention": ATTENTION, "attention_backward": {**ATTENTION, "grad_lse": (False, False, True)}}
SPACES["matmul"] = MATMUL
VARLEN: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16",) * 4 + ("float16", "float32", "float64"),
    "b": (1, 1, 4, 16, 128),
    "heads": ((32, 8), (32, 8), (16, 16), (64, 8), (8, 1), (7, 7)),
    "sq": (1, 1, 1, 4, 77, 512, 4096),
    "sk": (1, 77, 1024, 4096, 4096, 32768),
    "d": (64, 64, 128, 128, 128, 256, 96, 80, 33),
    "dv": (None,) * 8 + (64, 128),
    "causal": (False, True, True),
    "window": (None,) * 6 + (255, (255, 0), (-1, 32)),
    "softcap": (0.0,) * 5 + (30.0,),
    "sinks": (False, False, True),
    "alibi": (False,) * 4 + (True,),
    "ieee": (False, False, True),
    "deterministic": (False, False, False, True),
}
SPACES["attention_varlen"] = {
    **VARLEN,
    "kv": ("packed", "cache", "paged", "paged"),
    "page": (1, 16, 64, 64, 128, 256),
    "kv_dtype": (None,) * 5 + ("float8_e4m3fn", "int8"),
    "lse": (False, True),
    "out": (False, False, True),
}
SPACES["attention_varlen_backward"] = {**VARLEN, "lse": (True,), "grad_lse": (False, False, True)}
_REFUSED = ("dtype", "int8"), ("heads", (6, 4)), ("window", (-5, 3)), ("softcap", -1.0), ("layout", "sbhd"), ("d", -8)
ODD: dict[str, tuple[tuple[str, Any], ...]] = {
    "attention": _REFUSED,
    "attention_backward": _REFUSED,
    "attention_varlen": (("kv", "ragged"), ("window", (-5, 3)), ("d", -8), ("heads", (6, 4)), ("kv_dtype", "int4")),
    "attention_varlen_backward": (("window", (-5, 3)), ("d", -8), ("heads", (6, 4)), ("softcap", -1.0)),
    "matmul": (("dtype", "complex64"), ("activation", "tanh"), ("k", -1), ("layout", "xx"), ("scaling", "tilewise")),
}
"""What must be refused: every tenth problem is asked with one of these."""

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


def drawn(op: str, count: int) -> Iterator[dict[str, Any]]:
    """The same problems in every tree: what `of_shape` takes, with defaults left out by chance."""
    draw = random.Random(f"{SEED} {op}")
    for number in range(count):
        words = {name: draw.choice(values) for name, values in SPACES[op].items()}
        if number % 10 == 9:
            words.update([ODD[op][number // 10 % len(ODD[op])]])
        if "heads" in words:
            words["hq"], words["hkv"] = words.pop("heads")
        yield {name: value for name, value in words.items() if value not in (None, "", False, 0.0)}


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
