"""What is launched through `kernel[grid]`, without clusters, gives what a bound launch gives."""

from __future__ import annotations

import pytest
import torch

from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
pytest.importorskip("triton")
CASES = [
    ("gluon_matmul_pairs", "m=1000,n=1416,k=520,layout=nt"),
    ("gluon_matmul_pairs", "m=300,n=1032,k=4096,layout=nt,bias,activation=gelu"),
    ("gluon_matmul_pairs", "m=300,n=696,k=520,layout=nt,activation=silu"),
    ("gluon_matmul_pairs", "m=1000,n=1408,k=512,layout=nt,dtype=float8_e4m3fn,scaling=rowwise"),
    ("gluon_matmul_pairs", "m=300,n=1408,k=4096,layout=nt,dtype=float8_e4m3fn,scaling=scalar,bias,activation=relu"),
    ("gluon_matmul_row_pairs", "m=200,n=1416,k=4096,layout=nt"),
    ("gluon_matmul_row_pairs", "m=200,n=1416,k=4096,layout=nt,bias,activation=gelu"),
    ("gluon_matmul_rows", "m=40,n=1418,k=4096,layout=nt,bias,activation=silu"),
]


@pytest.mark.parametrize("name, text", CASES, ids=[f"{name} {text}" for name, text in CASES])
def test_without_clusters(name, text):
    load = workload(Case.parse("matmul", text), "cuda")
    problem, variant = load.problem(), op_named("matmul").variants[name]
    legal = list(variant.legal_configs(problem))
    if not legal:
        pytest.skip(f"{name} needs another GPU")
    wanted = load.expected()
    for config in legal[:3]:
        bound = load.call(load.op.bind(variant, problem, config), load.tensors)
        alone = load.call(load.op._running(variant, problem, config), load.tensors)
        assert torch.equal(bound, alone), config
        assert load.judge(alone, wanted).ok, config
