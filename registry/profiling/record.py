"""One launch on a GPU with its scopes recorded, by Proton's instrumented build of the kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from registry.errors import InvalidArgument, RegistryError
from registry.notices import notice, what_failed
from registry.profiling.anatomy import Anatomy, CodeStep, anatomy_of, steps_of
from registry.toolbox.builds import compile_build

BYTES_A_SPAN = 16
"""Proton writes 8 bytes on entering and 8 on leaving."""


class CannotRecord(RegistryError):
    """There is nothing to record, or nothing to record it with."""


def anatomy(variant: Any, problem: Any, config: Mapping[str, Any]) -> Anatomy:
    """The plan of the kernel that a launch spends itself in: the one with the most roles of those it would compile."""
    if variant.builds is None:
        raise CannotRecord(f"{variant.name} declares no builds, so nothing is known of its kernels")
    all_found = [
        anatomy_of(compile_build(build, problem.target), problem.target.sm) for build in variant.builds(problem, config)
    ]
    return max(all_found, key=lambda one: len(one.roles))


def steps(variant: Any, problem: Any, config: Mapping[str, Any], kernel: str) -> tuple[CodeStep, ...]:
    """What the code of that kernel does between its marks; nothing where this triton has no marks."""
    for build in variant.builds(problem, config):
        try:
            found = steps_of(build, problem.target) if build.name == kernel else ()
        except (ImportError, AttributeError, TypeError) as error:  # how Triton compiles changes
            notice(f"{kernel}: when its buffers are in use cannot be told with this triton: {what_failed(error)}")
            continue
        if any(step.what == "enter" for step in found):
            return found
    return ()


def record(variant: Any, case: Any, config: Mapping[str, Any], found: Anatomy, spans: int, out: Path) -> Path:
    """Record one launch and return Proton's trace: of every block the last `spans` of one warp of each role."""
    import torch

    from registry.ops.known import op_named
    from registry.ops.parts.workload import workload

    proton = _proton()
    load = workload(case, "cuda")
    plain = dataclasses.replace(variant, prepare=None)  # the fast launch passes Proton's hooks by
    launch = op_named(case.op).bind(plain, load.problem(), config)
    load.call(launch, load.tensors)  # compiled as it is, and the inputs seen once
    torch.cuda.synchronize()
    warps = sampled_warps(found)
    mode = ":".join(
        (
            "default:buffer_type=global",
            f"buffer_size={spans * BYTES_A_SPAN * len(warps)}",
            f"sampling_strategy=selective:sampling_options={','.join(map(str, warps))}",
        )
    )
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        name = Path(folder) / "launch"
        session = proton.start(str(name), backend="instrumentation", data="trace", mode=mode)
        try:
            with only_marked_kernels():
                load.call(launch, load.tensors)
                torch.cuda.synchronize()
                proton.deactivate(session)
        finally:
            proton.finalize()
        (written,) = Path(folder).glob("launch*trace*")
        written.replace(out)
    return out


@contextlib.contextmanager
def only_marked_kernels() -> Iterator[None]:
    """Proton hears only of launches of kernels that record something: of others (the ends of a chain) it counts the
    blocks as the room of all records over that of one block's, which is none, and the process dies of the division."""
    from triton.profiler.hooks.instrumentation import InstrumentationHook as Hook

    def of_marked(hear: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def hook(self: Any, metadata: Any) -> None:
            path = getattr(self, "metadata_path", {}).get(metadata.data.get("function"))
            if path is None or json.loads(Path(path).read_text(encoding="utf-8")).get("profile_scratch_size"):
                hear(self, metadata)

        return hook

    enter, leave = Hook.enter, Hook.exit
    Hook.enter, Hook.exit = of_marked(enter), of_marked(leave)
    try:
        yield
    finally:
        Hook.enter, Hook.exit = enter, leave


def sampled_warps(found: Anatomy) -> list[int]:
    """The first warp of each role, and others until their number is a power of two, as Proton wants it."""
    warps = [role.first_warp for role in found.roles]
    others = [warp for warp in range(found.warps) if warp not in warps]
    while len(warps) & (len(warps) - 1):
        warps.append(others.pop())
    return sorted(warps)


def _proton() -> Any:
    import torch

    if not torch.cuda.is_available():
        allowed = "FILE, a trace that was recorded on another machine; or --plan-only"
        raise InvalidArgument("--from", "none, and torch finds no GPU on this machine", allowed)
    try:
        import triton.profiler as proton
    except ImportError as error:
        raise CannotRecord(f"this triton comes without Proton, its profiler: {error}") from error
    return proton
