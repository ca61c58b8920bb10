"""How long gradients take by how many heads take turns (plugins/gluon_fa3/backward/sections.py):

    python benchmarks/head_sections.py SHAPES.txt OUT.json    on a GPU: a shape a line, such as b=4,hq=16,s=4096,d=128
    python benchmarks/head_sections.py                        without one: measured causal shapes, simulated
    python benchmarks/head_sections.py SHAPES.txt             these shapes, simulated with an L2 cache

On a GPU the first config is launched with each number of heads and each division of the heads that share keys, and by
the rule in force, in rounds in an order that is shuffled anew; launches are timed one by one, for what they differ by
tells of two speeds. The simulation hands out blocks as hardware does, the next one to the first SM that is free: it
says how much longer than the work, had it been shared, the last SM takes. With a cache, which keeps what was used last,
it says in how many steps the queries have to come from memory: where that is half of them, memory decides.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import registry
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case, from_file
from registry.ops.parts.workload import workload
from registry.plugins.gluon_fa3.backward import host, traits
from registry.plugins.gluon_fa3.backward.sections import heads_in_turns
from registry.plugins.gluon_fa3.backward.traits import TILE_STEPS, SumsTraits, divisions, parts_of, traits_of
from registry.plugins.gluon_fa3.traits import padded
from registry.tuning import journal
from registry.tuning.machine import describe

HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 33)
CACHE = 40 << 20
"""Bytes of an L2 cache of 50 MB that hold Q, dO and dQ's sums."""
ROUNDS = 4
RULE = "rule"
BEFORE = 16
RESULTS = Path(__file__).with_name("results")
VARIANT = catalog.get().variants["gluon_fa3_backward"]


def launches(case: Case) -> dict[str, Callable[[], Any]]:
    """A launch by the rule, and one for each division and number of heads."""
    load = workload(case, "cuda")
    problem = load.problem()
    config = dict(VARIANT.configs_for(problem)[0])
    found = {}
    for parts, count in [(None, None), *itertools.product(divisions(problem, ordered=False), HEADS)]:
        host.heads_in_turns = heads_in_turns if count is None else lambda _, heads, *more, most=count: min(most, heads)
        traits.parts_of = parts_of if parts is None else lambda *_, parts=parts: parts
        bound = load.launches(load.op.bind(VARIANT, problem, config), [load.tensors])[0]
        bound()  # asks how many
        found[RULE if count is None else f"{count} of 1/{parts}"] = bound
    host.heads_in_turns, traits.parts_of = heads_in_turns, parts_of
    return found


def measured(case: Case) -> dict[str, list[float]]:
    """[least, median, most] milliseconds of a launch, by how many heads take turns."""
    import torch

    runs = launches(case)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name in random.sample(sorted(runs), len(runs)):
            runs[name]()
            events[0].record()
            for event in events[1:]:
                runs[name]()
                event.record()
            torch.cuda.synchronize()
            took[name] += [one.elapsed_time(other) for one, other in zip(events, events[1:], strict=False)]
    return {name: [min(ms), statistics.median(ms), max(ms)] for name, ms in took.items()}


def is_simulated(problem: Any, config: Any) -> bool:
    """One launch of causal tiles."""
    return config["method"] == "sums" and problem.causal and problem.window is None


def tiles_of(problem: Any, t: SumsTraits, section: int) -> Iterator[tuple[int, int]]:
    """(head, blocks of queries that see the tile's keys), in the order in which tiles start."""
    heads, blocks = problem.batch * problem.heads_kv * t.parts, -(-problem.seqlen_q // t.block_m)
    for first in range(0, heads, section):
        for key in range(0, problem.seqlen_k, t.block_n):
            hidden = max(key - (problem.seqlen_k - problem.seqlen_q), 0) // t.block_m
            for head in range(first, min(first + section, heads)):
                yield head, max(blocks - hidden, 1)


def span(problem: Any, t: SumsTraits, section: int) -> float:
    """When the last SM is done, over when all would be, had the work been shared; in steps of a causal mask."""
    group, ends = problem.heads_q // problem.heads_kv // t.parts, [0.0] * problem.target.sm_count
    for _, seen in tiles_of(problem, t, section):
        heapq.heapreplace(ends, ends[0] + seen * group + TILE_STEPS)
    return max(ends) / statistics.mean(ends)


def from_memory(problem: Any, t: SumsTraits, section: int) -> float:
    """The share of steps whose queries no tile has used for so long that the cache lost them. All steps take as long,
    whether they wait for memory or not."""
    blocks, group = -(-problem.seqlen_q // t.block_m), problem.heads_q // problem.heads_kv // t.parts
    room = CACHE // (t.block_m * 8 * padded(problem.head_dim))

    def steps(head: int, seen: int) -> Iterator[tuple[int, int]]:
        return ((head * group + g, m) for m in range(blocks - 1, blocks - 1 - seen, -1) for g in range(group))

    waiting = (steps(*tile) for tile in tiles_of(problem, t, section))
    running = list(itertools.islice(waiting, problem.target.sm_count))
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    count = missed = 0
    while running:
        ended = []
        for at, tile in enumerate(running):
            queries = next(tile, None)
            if queries is None:
                ended.append(at)
                continue
            count, missed = count + 1, missed + (queries not in cache)
            cache[queries] = None
            cache.move_to_end(queries)
            if len(cache) > room:
                cache.popitem(last=False)
        for at in reversed(ended):
            running[at : at + 1] = itertools.islice(waiting, 1)
    return missed / count


def with_a_cache(target: registry.Target, cases: Sequence[Case]) -> None:
    """What each division and number of heads asks of memory, and by how much the last SM is late."""
    for case in cases:
        problem = case.problem(target)
        config = dict(VARIANT.configs_for(problem)[0])
        if not is_simulated(problem, config):
            print(f"{case.text}: not simulated, which is for causal masks and head dims up to 128")
            continue
        t = traits_of(problem, config)
        rule = by_the_rule(problem, t)
        print(f"{case.text}, by the rule {rule} of 1/{t.parts}:")
        for parts in divisions(problem, t.ordered):
            divided = replace(t, parts=parts)
            figures = {n: (from_memory(problem, divided, n), span(problem, divided, n)) for n in sorted({*HEADS, rule})}
            print(
                f"  1/{parts}  {'   '.join(f'{n}: {memory:.2f}, {late:.2f}' for n, (memory, late) in figures.items())}"
            )


def by_the_rule(problem: Any, t: SumsTraits) -> int:
    """Heads that take turns."""
    heads, blocks = problem.batch * problem.heads_kv * t.parts, -(-problem.seqlen_k // t.block_n)
    queries = problem.heads_q // problem.heads_kv // t.parts * problem.seqlen_q
    return heads_in_turns(problem, heads, blocks, queries, t.ordered)


def simulated(target: registry.Target) -> list[tuple[float, float]]:
    """Of measured causal shapes with more tiles than SMs, and not too many for this: before, and by the rule."""
    found = []
    for case in journal.read(RESULTS / "h100" / "attention_backward.jsonl").of("attention_backward"):
        problem = Case.parse(case.op, case.text).problem(target)
        config = dict(VARIANT.configs_for(problem)[0])
        if not is_simulated(problem, config):
            continue
        t = traits_of(problem, config)
        heads, blocks = problem.batch * problem.heads_kv * t.parts, -(-problem.seqlen_k // t.block_n)
        if blocks > 1 and target.sm_count < heads * blocks <= 20000:
            found.append((span(problem, t, min(BEFORE, heads)), span(problem, t, by_the_rule(problem, t))))
    return found


def main() -> int:
    if len(sys.argv) == 1:
        spans = simulated(registry.Target.named("H100"))
        for name, each in zip(("16 heads", "the rule"), zip(*spans, strict=True), strict=True):
            print(f"{name}: mean {statistics.mean(each):.3f}, worst {max(each):.2f} of {len(each)} shapes")
        return 0
    cases = from_file("attention_backward", Path(sys.argv[1]))
    if len(sys.argv) == 2:
        with_a_cache(registry.Target.named("H100"), cases)
        return 0
    out = Path(sys.argv[2])
    import torch

    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    rows = [{"text": case.text, "ms": measured(case)} for case in cases]
    machine = describe(registry.Target.of(torch.device("cuda")))
    out.write_text(json.dumps({"about": __doc__, "machine": machine, "shapes": rows}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
