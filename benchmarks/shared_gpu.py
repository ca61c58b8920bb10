"""What a variant does while other processes use the same GPU, which then takes turns between them:

    python benchmarks/shared_gpu.py VARIANT SHAPES.txt                      a process a shape (a line each), all at once
    python benchmarks/shared_gpu.py VARIANT SHAPES.txt --without before attention
        ... where these kernels (by how their names begin) do not start before the previous one ends

Each process launches its shape for some seconds and says how it ended: well, with an error of the GPU, by standing
still, or with results that are not those of its first launch. Launches of 2 ms and more are interrupted in the middle.
That is where `gluon_fa3_varlen_backward` failed until it was mended: docs/measured/ragged.md.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case, from_file, parse_words
from registry.ops.parts.workload import workload
from registry.toolbox.call import Call, Host

SECONDS = 10.0
STANDS_STILL = 60
"""Seconds, in which kernels are compiled, too."""
NEAR = 0.02
"""Of the largest result: sums in any order differ by less."""
PROGRAMMATIC = "launch_pdl"


def strip(kernels: Sequence[str]) -> None:
    """From here on these kernels begin when the previous one has ended."""
    made = Host._calls

    def calls(host: Host, *about: Any, **more: Any) -> list[Call]:
        return [
            replace(call, options={k: v for k, v in call.options.items() if k != PROGRAMMATIC})
            if call.kernel.__name__.startswith(tuple(kernels))
            else call
            for call in made(host, *about, **more)
        ]

    Host._calls = calls  # type: ignore[method-assign]


def launch(name: str, text: str, wanted: Mapping[str, Any], seconds: float) -> str:
    """One process: how often the first config with what is `wanted` was launched, or what was wrong."""
    variant = catalog.get().variants[name]
    load = workload(Case.parse(variant.op, text), "cuda")
    problem = load.problem()
    config = next(c for c in map(dict, variant.configs_for(problem)) if wanted.items() <= c.items())
    run = load.launches(load.op.bind(variant, problem, config), [load.tensors])[0]
    first = [one.clone() for one in _tensors(run())]
    torch.cuda.synchronize()
    begin, count = time.monotonic(), 1
    while time.monotonic() - begin < seconds:
        for one, other in zip(first, _tensors(run()), strict=True):
            if not (one - other).abs().max() <= NEAR * one.abs().max():
                return f"other results after {count} launches"
        count += 1
    return f"well, {count} launches"


def _tensors(results: object) -> list[torch.Tensor]:
    found = results if isinstance(results, tuple) else (results,)
    return [one.float() for one in found if isinstance(one, torch.Tensor)]


def beside(name: str, texts: Sequence[str], more: Sequence[str]) -> dict[str, str]:
    """How each shape's process ended, of all at once."""
    command = [sys.executable, "-W", "ignore", __file__, name, "--alone"]
    pipe = subprocess.PIPE
    running = {text: subprocess.Popen([*command, text, *more], stdout=pipe, stderr=pipe, text=True) for text in texts}
    ended = {}
    for text, process in running.items():
        said, wrong = process.communicate()
        lines = [line for line in wrong.splitlines() if "rror:" in line or line.startswith("Timeout")]
        ended[text] = said.strip() or (lines or wrong.splitlines() or ["nothing"])[0]
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variant")
    parser.add_argument("shapes", nargs="?", type=Path)
    parser.add_argument("--alone", help="one shape, in this process")
    parser.add_argument("--without", nargs="*", default=[], help="kernels, by how their names begin")
    parser.add_argument("--config", default="", help='what the config must have, as "MODE=coop,SPLIT_K=2"')
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA GPU")
        return 0
    if given.alone:
        faulthandler.dump_traceback_later(STANDS_STILL, exit=True)
        if given.without:
            strip(given.without)
        print(launch(given.variant, given.alone, parse_words(given.config), SECONDS))
        return 0
    if given.shapes is None:
        parser.error("name a file of shapes")
    texts = [case.text for case in from_file(catalog.get().variants[given.variant].op, given.shapes)]
    more = [*(["--without", *given.without] if given.without else []), "--config", given.config]
    for text, how in beside(given.variant, texts, more).items():
        print(f"{text}: {how}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
