"""FlashAttention's own test grid over our attention, forward and gradients, by FlashAttention's own criterion.

    python tests/gpu/flash_grid.py --seconds 100 --json grid.json
    python tests/gpu/flash_grid.py --shard 1/4                     # the second of four parts, which share no kernel
    python tests/gpu/flash_grid.py --dry-run                       # how many cases and kernels; needs no GPU

Its dtypes, heads, masks, caps, head dims and pairs of lengths: 3,600 cases, each a forward, its gradients, and its
gradients in a fixed order. A result may be off twice as far as torch is in the same dtype (three times under a cap),
and by the rounding of 0.3 beside it; "off" is from the same in float32, by the largest element.

Kernels are compiled beside the run in processes of their own, and cases are taken in the order in which compiling a
few more kernels opens most of them. What the time did not suffice for is counted as not reached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from registry import IllegalVariant, Target
from registry.ops.attention.oracle import reference
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, digest
from registry.toolbox.builds import compile_build
from registry.toolbox.compile_pool import HIDE_GPU

DTYPES = ("bfloat16", "float16")
HEADS, KEY_HEADS = 6, (6, 2, 1)
MASKS = ("full", "causal", "local")
CAPS = (0.0, 50.0)
HEAD_DIMS = (64, 96, 128, 192, 256)
LENGTHS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023)),
    *((4096, 4096), (4224, 4224)),
)
WANTED = {"attention": "gluon_fa3", "attention_backward": "gluon_fa3_backward"}
PASSES = {
    "forward": ("attention", {"lse": True}),
    "gradients": ("attention_backward", {}),
    "gradients in a fixed order": ("attention_backward", {"deterministic": True}),
}
ENOUGH_FAILURES = 40
"""That many are written out."""


def grid() -> list[dict[str, Any]]:
    """The shapes, those of a kind (head dim, dtype, mask, cap) one after the other."""
    chance = random.Random(0)
    found = []
    for d, dtype, mask, cap, (s, sk), hkv in itertools.product(HEAD_DIMS, DTYPES, MASKS, CAPS, LENGTHS, KEY_HEADS):
        window = (chance.randrange(sk), chance.randrange(sk)) if mask == "local" else None
        masks = {"causal": mask == "causal", "window": window, "softcap": cap}
        batch = 9 if sk <= 2048 else 2
        found.append(dict(b=batch, hq=HEADS, hkv=hkv, s=s, sk=sk, d=d, dtype=dtype, layout="bshd", **masks))
    return found


def part_of(shapes: Sequence[dict[str, Any]], part: int, parts: int) -> list[dict[str, Any]]:
    """One of so many parts. Kinds stay whole, so that no two parts compile the same kernel."""
    kinds = dict.fromkeys((s["d"], s["dtype"], bool(s["window"]), s["causal"], s["softcap"]) for s in shapes)
    own = set(list(kinds)[part::parts])
    return [s for s in shapes if (s["d"], s["dtype"], bool(s["window"]), s["causal"], s["softcap"]) in own]


# --- who runs, and what that compiles -----------------------------------------------------------------------------


class Step(NamedTuple):
    """One pass of a shape, who runs it, and a name for each of its kernels."""

    case: Case
    variant: str
    config: dict[str, Any]
    builds: tuple[str, ...]


def steps_of(shape: dict[str, Any], target: Target) -> dict[str, Step]:
    """Ours where it may run, else what is dispatched."""
    found = {}
    for name, (op_name, more) in PASSES.items():
        op, case = op_named(op_name), Case.of(op_name, **shape, **more)
        problem = case.problem(target)
        try:
            decision = op.explain(problem, variant=WANTED[op_name])
        except IllegalVariant:
            decision = op.explain(problem)
        declared = op.variants[decision.variant].builds
        builds = declared(problem, decision.config) if declared else ()
        found[name] = Step(case, decision.variant, dict(decision.config), tuple(map(_spelled, builds)))
    return found


def _spelled(build: Any) -> str:
    records = (build.signature, build.constants, build.alignment, build.options)
    return f"{build.name} {digest([{name: str(value) for name, value in record.items()} for record in records])}"


def compile_one(step: Step, index: int, target: Target) -> float:
    """Compile one kernel of a pass into Triton's cache. The seconds that took."""
    begun = time.monotonic()
    problem = step.case.problem(target)
    build = op_named(step.case.op).variants[step.variant].builds(problem, step.config)[index]
    compile_build(build, target.arch)
    return time.monotonic() - begun


def stand_back() -> None:
    """A process that compiles sees no GPU, and leaves the processor to the one that launches."""
    os.environ.update(HIDE_GPU)
    os.nice(10)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(needs: Sequence[frozenset[str]]) -> list[int]:
    """The cases in an order in which few kernels open many: again and again the group that asks least for each case."""
    groups: dict[frozenset[str], list[int]] = {}
    for place, need in enumerate(needs):
        groups.setdefault(need, []).append(place)
    known: set[str] = set()
    found: list[int] = []
    while groups:
        best = min(groups, key=lambda need: (len(need - known) / len(groups[need]), groups[need][0]))
        known |= best
        found += groups.pop(best)
    return found


# --- one case -----------------------------------------------------------------------------------------------------


def share_of_limit(got: torch.Tensor, exact: torch.Tensor, usual: torch.Tensor, softcap: float) -> float:
    """FlashAttention's criterion: how much of what is allowed a result is off by; more than 1, or NaN, is too much.

    `exact` was computed in float32 and rounded, `usual` in the dtype itself.
    """
    if got.numel() == 0:
        return 0.0
    off, usual_off = ((t.float() - exact.float()).abs().max() for t in (got, usual))
    rounding = 2 * ((exact + 0.3 - 0.3) - exact).float().abs().max() + (3e-4 if softcap else 0.0)
    return float(off / ((3 if softcap else 2) * usual_off + rounding))


def with_gradients(tensors: Sequence[torch.Tensor], grad_out: torch.Tensor, masks: Any, dtype: Any) -> list[Any]:
    """out, dq, dk, dv by the definition, computed in `dtype` (None: as the tensors are) and rounded to theirs."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = reference(*leaves, **masks, dtype=dtype)[0].to(grad_out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def poison(like: Iterable[torch.Tensor]) -> None:
    """Leave NaNs in the memory that the next results are likely to be given."""
    held = [torch.full_like(t, torch.nan) for t in like]
    del held


def run(shape: dict[str, Any], steps: dict[str, Step], target: Target, device: str, seed: int) -> dict[str, float]:
    """The worst share of the limit of each pass."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, cap = getattr(torch, shape["dtype"]), shape["softcap"]
    rows, keys = ((shape["b"], shape[s], shape[h], shape["d"]) for s, h in (("s", "hq"), ("sk", "hkv")))
    sizes = (rows, keys, keys, rows)
    made = [torch.randn(size, generator=generator, device=device, dtype=torch.float32) for size in sizes]
    made[0] = made[0] * cap / 4 if cap else made[0]  # so that scores reach the cap
    q, k, v, grad_out = (t.to(dtype).transpose(1, 2) for t in made)
    scale = shape["d"] ** -0.5
    window = tuple(shape["window"]) if shape["window"] else None
    masks = {"causal": shape["causal"], "window": window, "softcap": cap, "scale": scale}
    exact = with_gradients((q, k, v), grad_out, masks, torch.float32)
    usual = with_gradients((q, k, v), grad_out, masks, None)
    launches = {name: bound(step, target) for name, step in steps.items()}
    poison((q, k, v))
    out, lse = launches["forward"](q, k, v, scale=scale)
    found = {"forward": share_of_limit(out, exact[0], usual[0], cap)}
    for name in list(PASSES)[1:]:
        poison((q, k, v))
        grads = launches[name](grad_out, q, k, v, out, lse, scale=scale, grad_lse=None)
        shares = [share_of_limit(*three, cap) for three in zip(grads, exact[1:], usual[1:], strict=True)]
        found[name] = max(shares, key=lambda share: (share != share, share))  # NaN is the worst
    return found


def bound(step: Step, target: Target) -> Any:
    op = op_named(step.case.op)
    return op.bind(op.variants[step.variant], step.case.problem(target), step.config)


# --- the whole ----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the cases: each pass counts."""

    cases: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    """By pass and variant."""
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Not even launched: no kernel, no compilation."""
    not_reached: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    compiled: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent planning, waiting for kernels and running, and by all compiling processes together."""

    def take(self, shape: dict[str, Any], steps: dict[str, Step], shares: dict[str, float]) -> None:
        for name, share in shares.items():
            if share <= 1:
                self.passed[f"{name} by {steps[name].variant}"] += 1
                self.worst[name] = max(self.worst.get(name, 0.0), round(share, 4))
            else:
                self.failed.append(
                    f"{name} by {steps[name].variant} ({steps[name].case.text}): {share:.3g} of the limit"
                )

    def __str__(self) -> str:
        lines = [
            f"{self.cases} cases of {len(PASSES)} passes: passed {self.passed.total()}, failed {len(self.failed)}, "
        ]
        lines[0] += f"refused {len(self.refused)}; cases not reached: {self.not_reached}"
        lines += [f"  {count:5} {name}" for name, count in sorted(self.passed.items())]
        lines += [f"  worst share of the limit, {name}: {share:.3f}" for name, share in self.worst.items()]
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        lines += [f"  {self.compiled} kernels compiled; seconds: {spent}"]
        lines += [f"  failed: {text}" for text in self.failed[:ENOUGH_FAILURES]]
        lines += [f"  refused: {text}" for text in self.refused[:ENOUGH_FAILURES]]
        return "\n".join(lines)


def measure(shapes: Sequence[dict[str, Any]], seconds: float, jobs: int) -> Tally:
    """All of it, as far as the time goes. Processes are forked before this one touches the GPU."""
    begun = time.monotonic()
    deadline, ahead = begun + seconds, Target.named("H200")
    steps_of(shapes[0], ahead)  # imports once what all processes need
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), stand_back) as pool:
        planned = list(pool.map(steps_of, shapes, itertools.repeat(ahead), chunksize=8))
        needs = [frozenset(itertools.chain.from_iterable(step.builds for step in steps.values())) for steps in planned]
        order = in_order(needs)
        compiling: dict[str, Future[float]] = {}
        for place in order:
            for step in planned[place].values():
                for index, build in enumerate(step.builds):
                    if build not in compiling:
                        compiling[build] = pool.submit(compile_one, step, index, ahead)
        tally = Tally(cases=len(shapes), seconds={"planning": time.monotonic() - begun, "waiting": 0.0, "running": 0.0})
        target = Target.of(torch.device("cuda"))
        for count, place in enumerate(order):
            since = time.monotonic()
            refusal = waited(planned[place], compiling, deadline)
            tally.seconds["waiting"] += time.monotonic() - since
            if refusal is None:
                tally.not_reached = len(order) - count
                break
            text = planned[place]["forward"].case.text
            if refusal:
                tally.refused.append(f"{text}: {refusal}")
                continue
            since = time.monotonic()
            try:
                tally.take(shapes[place], planned[place], run(shapes[place], planned[place], target, "cuda", place))
                torch.cuda.synchronize()
            except torch.AcceleratorError as error:  # nothing can be launched any more
                tally.failed.append(f"{text}: {error}")
                tally.not_reached = len(order) - count - 1
                break
            except Exception as error:
                tally.failed.append(f"{text}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            tally.seconds["running"] += time.monotonic() - since
        done = [one for one in compiling.values() if one.done() and not one.cancelled() and not one.exception()]
        tally.compiled, tally.seconds["compiling"] = len(done), sum(one.result() for one in done)
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # what they still compile nobody waits for
            child.terminate()
    return tally


def waited(steps: dict[str, Step], compiling: dict[str, Future[float]], deadline: float) -> str | None:
    """Wait for the kernels of a case: "" where all are there, why one is not, None where there is no time."""
    for build in dict.fromkeys(itertools.chain.from_iterable(step.builds for step in steps.values())):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            compiling[build].result(left)
        except Late:
            return None
        except Exception as error:
            return f"{build.split()[0]}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="the I-th (from 0) of N parts")
    parser.add_argument("--seconds", type=float, default=3600, help="when to stop, in good order")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes that compile")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    parser.add_argument("--dry-run", action="store_true", help="only count; launch and compile nothing")
    given = parser.parse_args()
    part, parts = map(int, given.shard.split("/"))
    if not 0 <= part < parts:
        parser.error(f"--shard is {given.shard}; allowed: I/N with 0 <= I < N")
    shapes = part_of(grid(), part, parts)
    if given.dry_run:
        some = random.Random(0).sample(shapes, min(40, len(shapes)))
        steps = [step for shape in some for step in steps_of(shape, Target.named("H200")).values()]
        kernels = {build for step in steps for build in step.builds}
        variants = dict(Counter(step.variant for step in steps))
        print(f"{len(shapes)} cases; {len(some)} of them ask for {len(kernels)} kernels, of {variants}")
        return 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # one that lets processes be forked afterwards
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    tally = measure(shapes, given.seconds, given.jobs)
    print(tally)
    if given.json:
        found = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "shard": given.shard}
        given.json.write_text(json.dumps({**found, **vars(tally), "limit": given.seconds}, indent=1) + "\n")
    return 1 if tally.failed or tally.refused else 0


if __name__ == "__main__":
    sys.exit(main())
