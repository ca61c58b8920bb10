"""Our GPU kernels under NVIDIA's compute-sanitizer, on small problems drawn from what each variant declares.

    python tests/gpu/sanitize.py                       # memcheck, then racecheck
    python tests/gpu/sanitize.py --tool memcheck --variant 'triton_fa2*'
    python tests/gpu/sanitize.py --dry-run             # only show what would be launched; needs no GPU

Each variant has a process of its own, so that one that hangs or dies takes nobody with it. All of them first run
without the tool, which compiles the kernels and shows whether they run at all. Operands are exactly as large as their
elements need and every tensor is an allocation of its own, so that memcheck sees the first byte out of bounds; but for
the variants of WHOLE_UNITS, whose operands' allocations end with a unit of 16 bytes.
racecheck looks at shared memory and does not follow mbarriers, at which the warps of a warp-specialised kernel meet,
nor the hand-over that Triton itself makes to its partitions. So what it says of those variants is shown as hints and
fails nothing; that the messages of gluon_fa3 are safe is asserted from machine code, in test_gluon_fa3_compile.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from registry import Target, Variant, variants
from registry.ops.known import op_named
from registry.ops.parts import memory
from registry.ops.parts.kit import Sample
from registry.ops.parts.sizes import Size
from registry.ops.parts.trials import Trial, draw, spec_conditions

OURS = ("triton", "gluon")
SMALL = Size(
    lengths=(1, 77, 129, 190),
    widest=256,
    large=False,
    long=520,
    slow=False,
    samples=6,
    values=6,
    full_config_problems=1,
    repeats=1,
)
TOOLS = {
    "memcheck": ["--padding 64", "--report-api-errors no", "--destroy-on-device-error kernel"],
    "racecheck": ["--racecheck-report analysis"],
}
"""Options by tool, each passed if that version of compute-sanitizer knows it."""
COMMON = ["--print-limit 1000", "--launch-timeout 300", "--show-backtrace no"]
STARTED, DONE, FAILED = "started: ", "done: ", "failed: "


# --- what is launched ---------------------------------------------------------------------------------------------


def chosen(pattern: str) -> list[Variant]:
    """Our own variants of that name."""
    built_in = [v for v in variants().values() if v.origin.startswith("registry.plugins.")]
    return [v for v in built_in if v.design.dsl in OURS and fnmatch.fnmatch(v.name, pattern)]


def trials(variant: Variant, target: Target, limit: int) -> list[Trial]:
    """At most so many of a variant's problems, each adding as many values of axes and configs as it can."""
    drawn = draw(variant, op_named(variant.op), op_named(variant.op).conformance, target, SMALL)
    left, seen, found = list(drawn.trials), set(), []
    while left and len(found) < limit:
        best = max(left, key=lambda trial: len(_traits(trial) - seen))
        left.remove(best)
        seen |= _traits(best)
        found.append(best)
    return found


def _traits(trial: Trial) -> set[tuple[str, str]]:
    return {*((axis, str(value)) for axis, value in trial.spec.items()), ("config", str(sorted(trial.config.items())))}


def kernels(variant: Variant, trial: Trial) -> list[str]:
    """The names of the GPU kernels that a trial launches, as far as the variant says."""
    return [build.name for build in variant.builds(trial.problem, trial.config)] if variant.builds else []


def target_here() -> Target:
    return Target.of(torch.device("cuda")) if torch.cuda.is_available() else Target.named("H200")


# --- launching ----------------------------------------------------------------------------------------------------


WHOLE_UNITS = ("triton_gemv",)
"""Variants that read the 16 bytes around an operand's last ones, and use those that are the operand's. No allocator
and no page of memory ends between them."""


class Moved:
    """Tensors made on the CPU, on the GPU: no kernel but ours runs there. What shared a storage shares it there too."""

    def __init__(self, unit: int = 1) -> None:
        self._unit = unit
        self._storages: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = torch.nn.functional.pad(whole, (0, -len(whole) % self._unit)).cuda()
        flat = self._storages[storage.data_ptr()].view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    def sample(self, sample: Sample) -> Sample:
        return replace(
            sample,
            tensors=tuple(map(self, sample.tensors)),
            arguments={name: self(value) for name, value in sample.arguments.items()},
            launch_arguments={name: self(value) for name, value in sample.launch_arguments.items()},
        )


def launch(variant: Variant, limit: int, seconds: float) -> int:
    """Run a variant's trials on this machine's GPU, saying what is under way. The number that failed."""
    memory.GUARD_BYTES = 0  # a guard band around operands would hide what runs over their ends
    op = op_named(variant.op)
    kit, failed = op.conformance, 0
    began = time.monotonic()
    for number, trial in enumerate(trials(variant, target_here(), limit)):
        if time.monotonic() - began > seconds:
            print(f"{number} trials took {seconds:g} s; the others were left out", flush=True)
            break
        print(f"{STARTED}{trial.name}", flush=True)
        try:
            sample = Moved(16 if variant.name in WHOLE_UNITS else 1).sample(
                kit.make(trial.spec, torch.device("cpu"), number)
            )
            with spec_conditions(trial.spec), torch.no_grad():
                problem = op.problem_of(*sample.tensors, **sample.arguments)[0]
                kit.launch(op.bind(variant, problem, trial.config), sample)
            torch.cuda.synchronize()
            print(f"{DONE}{trial.name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{FAILED}{trial.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    return failed


# --- the tool -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One variant under one tool."""

    name: str
    launched: int = 0
    problems: list[str] = field(default_factory=list)
    """What went wrong with the run itself."""
    reports: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kernel, what) by number of reports."""
    refused: bool = False
    """The tool cannot work on this device."""
    seconds: float = 0.0


def find_tool() -> str | None:
    """compute-sanitizer, from PATH or CUDA's usual folder."""
    usual = sorted(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")))
    return os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or (usual[-1] if usual else None)


def known_options(program: str, wanted: Sequence[str]) -> list[str]:
    """Those of the options that this version's help speaks of."""
    help_text = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    return [word for option in wanted if option.split()[0] in help_text for word in option.split()]


def run(name: str, names: Sequence[str], prefix: Sequence[str], log: Path, given: argparse.Namespace) -> Outcome:
    """Launch the trials of a variant of that name in a process, behind `prefix`; all that it prints goes into the log.

    `names` are its kernels, to tell in reports which one they are about.
    """
    began = time.monotonic()
    own = ["--launch", "--variant", name, "--cases", str(given.cases), "--seconds", str(given.timeout * 0.7)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = Outcome(name)
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*prefix, sys.executable, __file__, *own],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(given.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    found.seconds = time.monotonic() - began
    lines = log.read_text(errors="replace").splitlines()
    found.launched = sum(line.startswith(DONE) for line in lines)
    found.problems = [line for line in lines if line.startswith(FAILED)]
    found.refused = any(re.match(r"====.*(device|driver)\b.* not supported", line, re.I) for line in lines)
    if code != 0 and not found.problems:
        last = [line for line in lines if line.startswith(STARTED)][-1:]
        how = f"no end after {given.timeout:g} s" if code is None else f"exit code {code}"
        found.problems.append(f"{how}, {last[0] if last else 'before the first trial'}")
    if not found.launched and not found.problems:
        found.problems.append("nothing was launched")
    found.reports.update(reports_in(lines, names))
    return found


_REPORT = re.compile(r"={9,} ?(?P<indent> *)(?P<text>\S.*)")
_CHATTER = re.compile(r"COMPUTE-SANITIZER|.*SUMMARY|Target app|Process (didn't|terminated)|The application", re.I)


def reports_in(lines: Iterable[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(kernel, what) of each report in a log: a line at the margin, and the indented lines that belong to it."""
    blocks: list[list[str]] = []
    for line in lines:
        found = _REPORT.fullmatch(line.rstrip())
        if not found or _CHATTER.match(found["text"]):
            continue
        if not found["indent"]:
            blocks.append([])
        if blocks:
            blocks[-1].append(found["text"])
    for block in blocks:
        text = "\n".join(block)
        # The longest first: a kernel's name may begin another's.
        kernel = next((name for name in sorted(names, key=len, reverse=True) if re.search(rf"\b{name}", text)), "?")
        yield kernel, _kind(block[0])


def _kind(head: str) -> str:
    """What a report is about, without addresses, places and numbers that differ from one to the next."""
    head = re.sub(r" at \S+(\+0x[0-9a-f]+)?( in \S+)?| in \S+\+0x[0-9a-f]+|0x[0-9a-f]+|\[\d+ hazards?\]", "", head)
    return " ".join(head.split())[:110]


def summary(tool: str, found: Sequence[Outcome], hints: Container[str], logs: Path) -> str:
    """A short table: each variant, then its reports by kernel."""
    counts = [sum(o.reports.total() for o in found if (o.name in hints) is hinted) for hinted in (False, True)]
    lines = [f"{tool}: {counts[0]} reports{f' and {counts[1]} hints' if counts[1] else ''}; raw logs in {logs}"]
    for outcome in found:
        state = "; ".join(outcome.problems) or ("ok" if not outcome.reports else "")
        state = state or ("hints" if outcome.name in hints else "")
        line = f"  {outcome.name:24} {outcome.launched:3} trials {outcome.seconds:6.1f} s  {state}"
        lines.append(line[:240].rstrip())
        lines += [f"      {count:5} x {kernel}: {what}" for (kernel, what), count in outcome.reports.most_common(6)]
    return "\n".join(lines)


def sanitize(tool: str, given: argparse.Namespace, asked: Mapping[str, Sequence[str]], hints: Container[str]) -> bool:
    """One tool over all variants, given with their kernels; whether nothing was found. Hints are no findings."""
    program = find_tool()
    prefix = [program, "--tool", tool, *known_options(program, [*TOOLS[tool], *COMMON])] if tool and program else []
    label = tool or "without the tool"
    given.logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        running = [
            pool.submit(run, name, names, prefix, given.logs / f"{tool or 'plain'}.{name}.log", given)
            for name, names in asked.items()
        ]
        found = [outcome.result() for outcome in running]
    if tool and all(outcome.refused for outcome in found):
        print(f"{tool}: skipped: compute-sanitizer does not support this device; logs in {given.logs}")
        return True
    print(summary(label, found, hints, given.logs), flush=True)
    return not any(outcome.problems or (outcome.reports and outcome.name not in hints) for outcome in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=[*TOOLS, "both"], default="both")
    parser.add_argument("--variant", default="*", metavar="GLOB")
    parser.add_argument("--cases", type=int, default=10, help="most problems of a variant")
    parser.add_argument("--timeout", type=float, default=110, help="seconds for each variant under each tool")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="variants at a time")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir(), "kernel-registry-sanitize"), help="folder of raw logs"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be launched")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1e9, help=argparse.SUPPRESS)
    given = parser.parse_args()
    asked = chosen(given.variant)
    if not asked:
        parser.error(f"no variant of ours is called {given.variant}")
    if given.dry_run:
        for variant in asked:
            for trial in trials(variant, target_here(), given.cases):
                print(f"{variant.name}: {trial.name} ({', '.join(kernels(variant, trial)) or 'kernels unknown'})")
        return 0
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    if given.launch:
        return min(sum(launch(variant, given.cases, given.seconds) for variant in asked), 100)
    if find_tool() is None:
        print("skipped: compute-sanitizer is not installed; looked in PATH, /usr/local/cuda* and $COMPUTE_SANITIZER")
        return 0
    here = target_here()
    names = {v.name: sorted({k for t in trials(v, here, given.cases) for k in kernels(v, t)}) for v in asked}
    tools = list(TOOLS) if given.tool == "both" else [given.tool]
    clean = True
    for tool in ("", *tools):
        hints = {v.name for v in asked if tool == "racecheck" and v.design.warp_specialized}
        clean &= sanitize(tool, given, names, hints)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
