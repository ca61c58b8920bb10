"""Kernels of all ops after and beside one another: threads on streams of their own launch what they draw, one right
after the other, into memory that the last one has just given back, by themselves and by graphs.

A launch may begin before the one before it has ended, leaves counters for the next one, and shares none with what
overlaps. What one kernel leaves behind, another one feels; the conformance kit launches each by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from races import in_threads

from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.toolbox.builds import compile_build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SECONDS = float(os.environ.get("MIXED_SECONDS", "20"))
THREADS = 4
CHAIN = 12
"""Launches in a graph."""
NEAR = 0.02
"""Of the largest number of a result: sums in any order differ by less."""
CASES = (
    ("attention", "b=2,hq=8,s=1000,d=128,causal"),
    ("attention", "b=1,hq=16,hkv=4,s=700,d=64,window=200:0"),
    ("attention", "b=1,hq=4,s=600,d=256,causal"),
    ("attention", "b=1,hq=2,s=300,d=512"),
    ("attention_backward", "b=2,hq=8,s=777,d=64,causal"),
    ("attention_backward", "b=1,hq=8,hkv=2,s=512,d=128,causal,deterministic"),
    ("attention_backward", "b=1,hq=4,s=512,d=256"),
    ("attention_varlen", "b=8,hq=16,hkv=4,sq=1,sk=3000,mix=lognormal,d=128,kv=paged,page=64,causal"),
    ("attention_varlen", "b=3,hq=8,hkv=8,sq=100,sk=900,mix=lognormal,d=64,kv=paged,page=16,causal"),
    ("attention_varlen", "b=4,hq=8,sq=500,mix=lognormal,d=64,causal"),
    ("attention_varlen_backward", "b=4,hq=8,sq=500,d=64,causal,deterministic"),
    ("attention_varlen_backward", "b=3,hq=8,hkv=2,sq=400,mix=lognormal,d=128"),
    ("matmul", "m=1000,n=1100,k=1200"),
    ("matmul", "m=8,n=4096,k=4096,layout=nt"),
    ("matmul", "m=1,n=2048,k=2048,layout=nt"),
    ("matmul", "m=256,n=512,k=8192"),
    ("matmul", "m=100,n=200,k=304,b=5"),
    ("grouped_mm", "e=8,m=700,n=512,k=768,spread=empty"),
)


class Item:
    """A launch, and what it gave alone."""

    def __init__(self, load, name, config):
        self.name, self.load = f"{load.op.name} {load.case} by {name} {dict(config)}", load
        self.launch = load.op.bind(load.op.variants[name], load.problem(), config)
        self.alone = [one.clone() for one in self()]
        self.near = [NEAR * float(one.float().abs().nan_to_num(0.0, 0.0).max()) for one in self.alone]

    def __call__(self):
        found = self.load.call(self.launch, self.load.tensors)
        return [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]

    def wrong(self, found):
        """How many numbers are, counted on the device."""
        pairs = zip(found, self.alone, self.near, strict=True)
        return sum(((one.float() - alone.float()).abs() > near).sum() + one.isnan().sum() for one, alone, near in pairs)


def chosen():
    """Of each case every kernel that is not torch's, in its first config and in one more."""
    drawn = random.Random(5)
    for op, text in CASES:
        load = workload(Case.parse(op, text), "cuda")
        problem = load.problem()
        for name, variant in op_named(op).variants.items():
            if not name.startswith("torch") and not variant.reasons(problem):
                legal = list(variant.legal_configs(problem))
                for config in legal[:1] + drawn.sample(legal[1:], min(1, len(legal) - 1)):
                    yield load, problem, name, config


def compiled(op, name, problem, config):
    """Into Triton's cache."""
    for build in op_named(op).variants[name].builds(problem, config) or ():
        compile_build(build, problem.target.arch)


def items():
    wanted = list(chosen())
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(compiled, load.op.name, name, problem, config) for load, problem, name, config in wanted]
        for task in tasks:
            task.exception()  # the launch has it as well
    found = []
    for load, _, name, config in wanted:
        with load.settings():
            found.append(Item(load, name, config))
    torch.cuda.synchronize()
    return found


class Worker:
    """What one thread launches, on a stream of its own. Graphs are captured before threads begin: a capture forbids
    others to wait for the device."""

    def __init__(self, number, pool):
        self.drawn, self.pool, self.launched = random.Random(number), pool, 0
        self.wrong = torch.zeros(len(pool), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        self.graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        for graph in self.graphs:
            with torch.cuda.graph(graph):
                self.close()
        torch.cuda.synchronize()
        self.wrong.zero_()

    def one_by_one(self):
        for i in self._draw():
            self.wrong[i] += self.pool[i].wrong(self.pool[i]())

    def close(self):
        """Right after one another, looked at when all are launched."""
        for i, found in [(i, self.pool[i]()) for i in self._draw()]:
            self.wrong[i] += self.pool[i].wrong(found)

    def _draw(self):
        self.launched += CHAIN
        return [self.drawn.randrange(len(self.pool)) for _ in range(CHAIN)]

    def work(self, until):
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < until:
                replays = [graph.replay for graph in self.graphs]
                for act in self.drawn.sample([*replays, self.one_by_one, self.close, self.close], 4):
                    act()
                torch.cuda.current_stream().synchronize()


def test_kernels_after_and_beside_one_another():
    pool = items()
    assert len(pool) > len(CASES)
    workers = [Worker(number, pool) for number in range(THREADS)]
    until = time.monotonic() + SECONDS
    in_threads(lambda number: workers[number].work(until), THREADS)
    torch.cuda.synchronize()
    found = sum(worker.wrong for worker in workers)
    bad = {pool[i].name: int(count) for i, count in enumerate(found.tolist()) if count}
    print(f"{sum(worker.launched for worker in workers)} launches of {len(pool)} kinds, those of graphs aside")
    assert not bad, bad
