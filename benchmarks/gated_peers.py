"""What a product that ends with its gate is held against, for the tuner: a library's product, and torch after it.

    kreg tune grouped_mm --graph --plugin benchmarks/gated_peers.py --shapes SHAPES --out OUT/gated.jsonl

with shapes such as `e=1,m=4096,n=14336,k=4096,activation=silu,gated`: one group is a dense product. It multiplies by
cuBLAS once for both halves, as a fused layer does, and has the gate in torch's own operations; and `registry.matmul`
answers the same call as the tables in force dispatch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

import registry
from registry import Design, Reason, Requires, Variant

ACTIVATIONS = {"": lambda x: x, "silu": torch.nn.functional.silu, "relu": torch.relu}


def in_parts(a: torch.Tensor, b: torch.Tensor, *, config: Any, activation: str, gated: bool, **_: Any) -> torch.Tensor:
    gate, up = torch.matmul(a, b[0]).chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul(up)


def dispatched(a: torch.Tensor, b: torch.Tensor, *, config: Any, activation: str, gated: bool, **_: Any) -> Any:
    return registry.matmul(a, b[0], activation=activation, gated=True)


def one_group(problem: Any, config: Any) -> Iterable[Reason]:
    if problem.groups != 1 or not problem.gated:
        yield Reason("groups", "groups", problem.groups, "1, with a gate")


def registry_variants() -> Iterator[Variant]:
    requires = Requires(
        arch=("any",),
        dtypes=("float16", "bfloat16", "float32"),
        forms=("rows",),
        layouts=("nn", "nt", "tn", "tt"),
        activations=("silu", "relu"),
        gated=True,
        ieee=True,
        rule=one_group,
    )
    for name, run, dsl in (("cublas_and_gate", in_parts, "cublas"), ("matmul_gated", dispatched, "any")):
        yield Variant(f"peer.{name}", op="grouped_mm", run=run, requires=requires, design=Design(dsl=dsl))
