"""The process that kernels run in, so that one that hangs or faults takes down nothing but itself.

It answers the commands `hello`, `declared`, `case`, `check`, `time`, `limits` and `compile` of a
registry.toolbox.compile_pool.Child, which kills it when it stops answering.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.notices import both_ends, text_of
from registry.toolbox.compile_pool import Child

OK: dict[str, Any] = {"ok": True}
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""What errors say, in CUDA's words and in those of torch's allocator for the CPU."""


def refusal(why: str, detail: str = "", **more: Any) -> dict[str, Any]:
    """An answer that says no. `fatal=True`: this process can not go on."""
    return {"ok": False, "why": why, "detail": both_ends(detail, 2000), **more}


class Worker:
    """Holds one case at a time, with its inputs, the oracle's answer and the bound launches."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.target: Any = None
        self.load: Any = None
        self.wanted: list[Any] = []
        self.bound: dict[str, list[Callable[[], Any]]] = {}
        self.sets: list[dict[str, Any]] = []
        self.timer: Any = None
        self.mode = "events"

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return getattr(self, f"do_{command['do']}")(**{k: v for k, v in command.items() if k != "do"})  # type: ignore[no-any-return]

    def do_hello(self, device: str, mode: str = "events", plugins: tuple[str, ...] = ()) -> dict[str, Any]:
        """Load everything; answer with the target and the machine."""
        import torch

        from registry.contract.target import Target
        from registry.dispatch.catalog import catalog
        from registry.tuning.extra import load_plugins
        from registry.tuning.machine import Monitor, describe, target_data
        from registry.tuning.memory import leave_some
        from registry.tuning.timing import timer_for

        self.device, self.mode = device, mode
        self.target = target = Target.of(torch.device(device))
        load_plugins(plugins)
        catalog.get()
        if device == "cuda":
            self.timer = timer_for("cuda", mode, Monitor())
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
            leave_some()
            self.timer = timer_for("cpu", mode)
        return {**OK, "target": target_data(target), "machine": describe(target)}

    def do_limits(self) -> dict[str, Any]:
        from registry.tuning import limits

        return {"ok": True, "limits": limits.measure()}

    def do_declared(self, case: Mapping[str, Any], variant: str) -> dict[str, Any]:
        """Ask a declaration all that a sweep and its fit will ask it. That it comes back is the answer."""
        from registry.dispatch.catalog import catalog
        from registry.ops.parts.cases import Case
        from registry.tuning.contestants import Selection, line_up

        planned = line_up(Case.from_data(case), self.target, Selection((variant,)), self.mode)
        declared = catalog.get().variants[variant]
        costs = declared.costs(planned.problem) if planned.contestants else None
        if costs is not None:
            for config in declared.configs_for(planned.problem):
                costs(config)
        return OK

    def do_case(self, case: Mapping[str, Any], reference: bool = True) -> dict[str, Any]:
        """Make the inputs and, where a gate is ahead, the oracle's answer."""
        from registry.ops.parts.cases import Case
        from registry.ops.parts.workload import workload

        self.forget()
        self.load = workload(Case.from_data(case), self.device)
        with self.load.settings():
            self.wanted = self.load.expected() if reference else []
        self.sets = (
            self.load.copies(self.timer.MEMORY_BYTES) if hasattr(self.timer, "MEMORY_BYTES") else [self.load.tensors]
        )
        self.synchronize()
        return OK

    def do_check(self, variant: str, config: Mapping[str, Any], key: str) -> dict[str, Any]:
        """First launch and the accuracy gate."""
        begun = time.perf_counter()
        before = {name: _bits(tensor) for name, tensor in self.load.tensors.items()}
        self.poison()
        with self.load.settings():
            results = self.bind(variant, config, key)[0]()
            self.synchronize()
            seconds = time.perf_counter() - begun
            verdict = self.load.judge(results, self.wanted)
        changed = [name for name, tensor in self.load.tensors.items() if not _same(before[name], tensor)]
        if changed:
            for name in changed:
                self.load.tensors[name].copy_(before[name])
            return refusal("wrong", f"changed its input {', '.join(changed)}")
        errors = {name: float(f"{value:.3g}") for name, value in verdict.errors.items()}
        if not verdict.ok:
            return refusal("wrong", "; ".join(verdict.complaints), errors=errors)
        return {**OK, "errors": errors, "first_s": round(seconds, 3)}

    def do_time(
        self, variant: str, config: Mapping[str, Any], key: str, settle_ms: float, measure_ms: float
    ) -> dict[str, Any]:
        """One turn at the clock."""
        with self.load.settings():
            launches = self.bound.get(key) or self.bind(variant, config, key)
            sample = self.timer.sample(launches, settle_ms, measure_ms)
        ms, low, high = (float(f"{value:.6g}") for value in (sample.ms, sample.low, sample.high))
        return {**OK, "ms": ms, "low": low, "high": high, "n": sample.launches, **sample.state}

    def do_compile(
        self,
        case: Mapping[str, Any],
        variant: str,
        config: Mapping[str, Any],
        target: dict[str, Any],
        figures: bool = False,
    ) -> dict[str, Any]:
        """Compile a contestant's kernels into Triton's cache; touches no GPU. With `figures`, say what they spilled."""
        from registry.dispatch.catalog import catalog
        from registry.ops.parts.cases import Case
        from registry.ops.parts.workload import workload
        from registry.toolbox.builds import compile_build
        from registry.tuning.machine import target_from

        goal = target_from(target)
        load = workload(Case.from_data(case), "meta")
        problem = load.problem(goal)
        declared = catalog.get().variants[variant].builds
        begun = time.perf_counter()
        with load.settings():
            made = [compile_build(build, goal) for build in (declared(problem, config) if declared else ())]
        shared = [one.metadata.shared for one in made]
        if shared and goal.shared_memory and max(shared) > goal.shared_memory:
            return refusal("does not fit", f"shared memory {max(shared)} of {goal.shared_memory} bytes")
        stack = {"stack": _stack(made)} if figures else {}
        return {**OK, "seconds": round(time.perf_counter() - begun, 3), **stack}

    def bind(self, variant: str, config: Mapping[str, Any], key: str) -> list[Callable[[], Any]]:
        """The launches of a contestant, over every set of inputs."""
        from registry.dispatch.catalog import catalog

        problem = self.load.problem()
        launch = self.load.op.bind(catalog.get().variants[variant], problem, dict(config))
        self.bound[key] = self.load.launches(launch, self.sets)
        return self.bound[key]

    def poison(self) -> None:
        """Leave NaNs in the memory that the next outputs are likely to be given."""
        import torch

        if self.device == "cuda":
            held = [
                torch.full_like(part.want, float("nan"), dtype=torch.float32)
                for part in self.wanted
                if part.want.is_floating_point()
            ]
            like = [t for t in self.load.tensors.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
            held += [torch.full(t.shape, float("nan"), device=t.device).to(t.dtype) for t in like]
            del held

    def synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Drop everything of the last case."""
        self.load, self.wanted, self.sets = None, [], []
        self.bound.clear()
        if hasattr(self.timer, "forget"):
            self.timer.forget()
        gc.collect()
        if self.device == "cuda":
            import torch

            from registry.toolbox.counters import graphs_are_gone

            torch.cuda.empty_cache()
            graphs_are_gone()


def _stack(made: Sequence[Any]) -> int:
    """Bytes of stack of the worst of these kernels; 0 where a tool or what a cache kept of them does not tell."""
    from registry.toolbox.builds import inspect

    try:
        return max((inspect(one, warnings=False).stack for one in made), default=0)
    except (KeyError, OSError, ValueError, RuntimeError, subprocess.SubprocessError):
        return 0


def _bits(value: Any) -> Any:
    import torch

    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _same(before: Any, now: Any) -> bool:
    import torch

    return before is None or bool(
        torch.equal(before.float(), now.float()) if before.dtype.itemsize == 1 else torch.equal(before, now)
    )


def explain_failure(worker: Worker, error: BaseException, variant: str = "") -> dict[str, Any]:
    """What an exception means for the sweep: a config that does not fit, memory, a plain error, or a broken device."""
    from registry.dispatch.quarantine import compile_failures

    text = f"{type(error).__name__}: {text_of(error)}".strip()
    if isinstance(error, compile_failures()):
        return refusal("does not compile", text)
    if isinstance(error, MemoryError) or any(words in text.lower() for words in NO_MEMORY):
        with contextlib.suppress(Exception):
            gc.collect()
        return refusal("out of memory", text)
    if "graph capture" in text:
        return refusal("no graph", text)  # it waits for the GPU, say: right, though no sweep of graphs can time it
    try:
        worker.synchronize()
    except Exception:
        return refusal("device error", text, fatal=True)
    return refusal("error", text + _where(error, variant))


def _where(error: BaseException, variant: str) -> str:
    """Where it was raised, and then the line of the variant's own code that led there, which its author looks for."""
    from registry.dispatch.catalog import catalog
    from registry.dispatch.fingerprint import files_of

    known = catalog.get().variants.get(variant)
    own = set(map(str, files_of(known))) if known is not None else set()
    frames = traceback.extract_tb(error.__traceback__)
    led = [frame for frame in frames if frame.filename in own][-1:]
    shown = [*(frame for frame in frames[-1:] if frame.filename not in own), *led]
    return "".join(f"\n  {'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} in {f.name}: {f.line}" for f in shown)


def answerer() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What answers a parent's commands."""
    worker = Worker()

    def answer(command: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return worker.answer(command)
        except Exception as error:
            return explain_failure(worker, error, command.get("variant", ""))

    return answer


def child(
    device: str, mode: str = "events", plugins: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Child:
    """The parent's end of a worker."""
    hello = {"do": "hello", "device": device, "mode": mode, "plugins": list(plugins)}
    return Child("registry.tuning.worker", hello, environment)
