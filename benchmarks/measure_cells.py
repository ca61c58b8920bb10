"""Attention beside the peers' own kernels, cell by cell: writes OUT/peer_cells_NAME.jsonl, which peer_cells.py reads.

    FA3_LIBRARY=.../fa3.so FA3_CUDART=.../libcudart.so.12 FA4_SITE=... \\
        python benchmarks/measure_cells.py OUT --what backward forward training --seconds 150

The cells: FlashAttention-3's 18 of 16k tokens and hidden size 2048, and 32 query heads over 8 at head dim 128, causal.
The peers: torch's cuDNN, and those of peers.py whose libraries are named. What is timed:

    backward, forward   launches back to back in CUDA graphs, which hold the card at its power limit, as training does
    single              forwards one at a time, with the L2 cache flushed between, which let the card rest
    training            registry.attention and its gradients by autograd, beside torch's best, calls in a row

One process, rounds in an order shuffled anew, every contestant's results held against float64 on a sample of heads, in
memory full of NaN, before it is timed. Who fails is named in the file ("kind": "failed"), as is a cell not reached.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peer_cells
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import registry
from registry.ops.attention.tuning import AttentionBackwardWorkload, AttentionWorkload
from registry.ops.parts.cases import Case, spread
from registry.ops.parts.judging import Verdict
from registry.tuning.extra import load_plugins
from registry.tuning.grids import grid
from registry.tuning.machine import Monitor, describe
from registry.tuning.timing import CudaTimer, GraphTimer, Timing, turn_order

ROUNDS, SETTLE_MS, WINDOW_MS, HEAT_MS = 9, 8.0, 60.0, 100.0
GROUPED = [(b, s) for b in (1, 4) for s in (2048, 8192, 32768)]
OURS = {"attention": ["gluon_fa3"], "attention_backward": ["gluon_fa3_backward", "gluon_stored_backward"]}
PEERS = {"cudnn": "torch_cudnn", "fa3": "peer.fa3", "fa4": "peer.fa4"}
TIMED = {"backward": "backward", "forward": "forward back to back", "single": "forward single", "training": "training"}
PASSES = {"backward": 2.5, "forward": 1.0, "single": 1.0, "training": 3.5}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Launch = Callable[[], Any]


def cells(op: str) -> list[Case]:
    """Of one op, in an order of which every beginning is a fair sample."""
    grouped = [Case.of(op, b=b, hq=32, hkv=8, s=s, d=128, causal=True) for b, s in GROUPED]
    return spread([*grid(op, "paper18"), *grouped])


def tflop(case: Case, what: str) -> float:
    """Of the forward's two products, half of them under a causal mask, times what the passes ask of them."""
    get = case.sizes.get
    whole = 4.0 * get("b", 1) * get("hq") * get("s") ** 2 * get("d") * PASSES[what]
    return whole / (2 if get("causal") else 1) / 1e12


def described(case: Case) -> dict[str, Any]:
    get = case.sizes.get
    heads = {"hq": get("hq"), "hkv": get("hkv", get("hq"))}
    return dict(dtype="bfloat16", d=get("d"), causal=get("causal", False), b=get("b", 1), **heads, s=get("s"))


# --- contestants: each is checked, then timed ---------------------------------------------------------------------


class Forward(AttentionWorkload):
    """Checked on a few heads: what a kernel gets wrong shows in any."""

    def heads(self) -> list[tuple[int, int, slice]]:
        found = super().heads()
        return [found[0], found[-1]] if len(found) > 1 else found


class Gradients(AttentionBackwardWorkload, Forward):
    """With what our own forward saves: the oracle's takes longer than all that is timed."""

    def save_forward(self, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            found = registry.attention(tensors["q"], tensors["k"], tensors["v"], **self.mask(), return_lse=True)
        for name, value in zip(("out", "lse"), found, strict=True):
            tensors[name].copy_(value)


def kernels(load: Any) -> dict[str, Callable[[], list[Launch]]]:
    """What binds ours and each peer that is there, over as many sets of inputs as the L2 cache does not hold."""
    op, problem, suffix = load.op, load.problem(), "_backward" if load.case.op == "attention_backward" else ""
    sets = load.copies(GraphTimer.MEMORY_BYTES)

    def bind(name: str) -> list[Launch]:
        decision = op.explain(problem, variant=name)  # raises where it may not run
        return load.launches(op.bind(op.variants[name], problem, dict(decision.config)), sets)

    dispatched = op.explain(problem).variant
    ours = dispatched if dispatched in OURS[load.case.op] else OURS[load.case.op][0]
    names = {"ours": ours, **{who: f"{name}{suffix}" for who, name in PEERS.items()}}
    return {who: functools.partial(bind, name) for who, name in names.items() if name in op.variants}


def trainings(load: Any) -> dict[str, Callable[[], list[Launch]]]:
    """The same of a forward with its gradients, as a user calls them. Launches give dq, dk, dv."""
    q, k, v = (load.tensors[name].detach().requires_grad_() for name in "qkv")
    causal, grouped = load.mask()["causal"], q.shape[1] != k.shape[1]

    def by_torch(backend: SDPBackend, *qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=grouped)

    def launches(attend: Callable[..., torch.Tensor]) -> list[Launch]:
        return [lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), load.tensors["grad_out"])]

    found = {"ours": functools.partial(registry.attention, causal=causal)}
    found |= {who: functools.partial(by_torch, backend) for who, backend in BACKENDS.items()}
    return {who: functools.partial(launches, attend) for who, attend in found.items()}


def checked(load: Any, launch: Launch, expected: Sequence[Any]) -> str:
    """What is wrong with a contestant's results; "" if nothing."""
    held = [torch.full_like(t, torch.nan) for t in load.tensors.values() if isinstance(t, torch.Tensor)]
    del held
    before = [t.clone() for t in load.tensors.values() if isinstance(t, torch.Tensor)]
    verdict: Verdict = load.judge(launch(), expected)
    after = (t for t in load.tensors.values() if isinstance(t, torch.Tensor))
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        return "changed its inputs"
    return "; ".join(verdict.complaints)


class InARow:
    """A clock of plain calls, one after the other: what autograd does on the host is part of them."""

    def __init__(self, telemetry: Callable[[], dict[str, Any]]) -> None:
        self._telemetry = telemetry

    def sample(self, launches: Sequence[Launch], settle_ms: float, measure_ms: float) -> Timing:
        (launch,) = launches
        each, _ = self._run(launch, 2)
        self._run(launch, max(1, int(settle_ms / each)))
        count = max(3, int(measure_ms / each))
        ms, state = self._run(launch, count)
        return Timing(ms, ms, ms, count, state)

    def _run(self, launch: Launch, count: int) -> tuple[float, dict[str, Any]]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            launch()
        end.record()
        state = self._telemetry()
        end.synchronize()
        return start.elapsed_time(end) / count, state

    def forget(self) -> None:
        pass


def clock(what: str) -> Any:
    """A timer of what is timed."""
    if what == "single":
        return CudaTimer(Monitor())
    if what == "training":
        return InARow(Monitor())
    timer = GraphTimer(Monitor(), most=1000)
    timer.SPAN_MS = 2.0  # so long that the gap between two replays is nothing
    return timer


# --- one cell, and all --------------------------------------------------------------------------------------------


def measure(case: Case, what: str, timer: Any, say: Callable[..., None], device: str = "cuda") -> str:
    """Check and time one cell. Why there is none; "" where there is."""
    shape = {"timed": TIMED[what], **described(case)}
    load: Any = (Forward if case.op == "attention" else Gradients)(case, device)
    expected = load.expected()
    alive: dict[str, list[Launch]] = {}
    times: dict[str, list[Timing]] = {}

    def attempt(who: str, step: Callable[[], str]) -> None:
        """Do something with a contestant, who is out, and named, where that fails."""
        try:
            complaint = step()
        except Exception as error:  # a peer may fail in any way
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            say("failed", **shape, who=who, why=complaint[:400])
            alive.pop(who, None)

    def admit(who: str, bind: Callable[[], list[Launch]]) -> str:
        alive[who] = bind()
        return checked(load, alive[who][0], expected)

    def turn(who: str, settle_ms: float, measure_ms: float) -> str:
        times.setdefault(who, []).append(timer.sample(alive[who], settle_ms, measure_ms))
        return ""

    for who, bind in (trainings if what == "training" else kernels)(load).items():
        attempt(who, functools.partial(admit, who, bind))
    if alive and what != "single":
        hot = next(iter(alive))
        attempt(hot, functools.partial(turn, hot, HEAT_MS, 0.0))
        times.clear()
    for number in range(ROUNDS):
        for who in turn_order(list(alive), case.text, what, number):
            attempt(who, functools.partial(turn, who, SETTLE_MS, WINDOW_MS))
    timer.forget()
    speeds = {who: round(tflop(case, what) / statistics.median(t.ms for t in times[who]) * 1e3, 1) for who in alive}
    if "ours" not in speeds or len(speeds) == 1:
        return f"nothing to compare: {', '.join(speeds) or 'nobody'} ran"
    say("cell", **shape, tflops=speeds, state={who: _state(times[who]) for who in alive})
    return ""


def _state(times: Sequence[Timing]) -> dict[str, Any]:
    """Clocks and power while somebody was timed, the median of the rounds; empty where nobody tells."""
    found = {}
    for name in ("sm_mhz", "watts"):
        values = [t.state[name] for t in times if name in t.state]
        found.update({name: statistics.median(values)} if values else {})
    return found


def table(path: Path) -> str:
    """What peer_cells.py makes of it, and who failed."""
    run, found = peer_cells.read_cells(path)
    failed = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [*peer_cells.table(run, found)] if found else ["no cell"]
    lines += [f"failed: {line}" for line in failed if line["kind"] == "failed"]
    return "\n".join(lines)


def versions(machine: dict[str, Any]) -> dict[str, str]:
    known = {name: str(machine[name]) for name in ("torch", "triton", "cudnn", "driver") if machine.get(name)}
    if os.environ.get("FA3_LIBRARY"):
        known["FlashAttention-3"] = os.environ.get("FA3_VERSION", Path(os.environ["FA3_LIBRARY"]).name)
    if os.environ.get("FA4_SITE"):
        found = importlib.metadata.distributions(name="flash-attn-4", path=[os.environ["FA4_SITE"]])
        known["FlashAttention-4"] = next((one.version for one in found), "?")
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--what", nargs="+", choices=list(TIMED), default=list(TIMED))
    parser.add_argument("--seconds", type=float, default=600, help="begin no cell after that")
    parser.add_argument("--name", default="new", help="of the file: peer_cells_NAME.jsonl")
    parser.add_argument("--of", default="today's sources", help="what the results' table says about them")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    faulthandler.enable()  # a peer's library may take the process with it
    deadline = time.monotonic() + given.seconds
    os.environ.setdefault("PEER_FLEX", "0")
    load_plugins([str(Path(__file__).with_name("peers.py"))])
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"peer_cells_{given.name}.jsonl"
    with path.open("w", encoding="utf-8") as stream:

        def say(kind: str, **record: Any) -> None:
            stream.write(json.dumps({"kind": kind, **record}) + "\n")
            stream.flush()

        machine = describe(registry.Target.of(torch.device("cuda")))
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        how = f"CUDA events, median of {ROUNDS} shuffled rounds of {WINDOW_MS:g} ms; bfloat16; operations of the "
        how += "forward times 2.5 for gradients and 3.5 for training, half of them under a causal mask"
        say("run", machine=machine["device"], versions=versions(machine), date=date, of=given.of, how=how)
        ahead = [case for op in OURS for case in cells(op)]
        ahead += [Case.of(case.op, **case.sizes, lse=True) for case in cells("attention")]
        registry.warm(ahead, launch=False, jobs=os.cpu_count())
        for what in given.what:
            timer = clock(what)
            for case in cells("attention" if what in ("forward", "single") else "attention_backward"):
                why = "not reached in the time"
                if time.monotonic() < deadline:
                    try:
                        why = measure(case, what, timer, say)
                    except Exception as error:  # of the inputs or the oracle: the other cells go on
                        why = f"{type(error).__name__}: {error}"[:400]
                    torch.cuda.empty_cache()
                if why:
                    say("failed", timed=TIMED[what], **described(case), who="cell", why=why)
    print(table(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
