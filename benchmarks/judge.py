"""A draw of random shapes of several ops in one sweep, so that processes start once and kernels are compiled ahead:

    python benchmarks/judge.py OUT SEED SECONDS matmul=random:160 attention=random:160 attention_backward=random:160

Writes OUT/judged_SEED_OP.jsonl for `make plots` (with --train: OUT/random_SEED_OP.jsonl, for a fit; then of grids
too: `matmul=llm+squares+random:500`, or a file of shapes: `matmul=SHAPES.txt`). The op that is named first is
measured first. Draws of another kind (`matmul=batched:100`) have it in their file's name. Times are of replayed graphs
over rotated inputs: single launches under 30 us differ by 1.6% from round to round (6% one time in twenty), replays by
0.2%, and that is what a regret of 1% asks for. Variants that were never the fastest by more than 1.7% on 681 products
or 394 attentions are left out, as is torch's own arithmetic with stored scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from registry.ops.parts.cases import Case, from_file
from registry.tuning.contestants import Selection
from registry.tuning.grids import grid
from registry.tuning.measure import Effort, Sweep

SKIP = ("torch_*math*", "torch_efficient*", "triton_autows", "triton_padded*", "triton_matmul_tma")
SKIP_OF_RARER = ("torch_*math*", "triton_autows", "triton_padded*")
"""Of other kinds than random: what is seldom fast may be so there."""
CONFIGS = 4


def main(out: Path, seed: int, seconds: float, wanted: list[tuple[str, str]], role: str) -> None:
    """Measure, then cut the journal into one for each draw."""
    draws = {(op, name): _shapes(op, name, seed) for op, name in wanted}
    effort = Effort(rounds=4, settle_ms=3.0, measure_ms=4.0, budget_s=seconds, turn_timeout=15, check_timeout=30)
    skip = SKIP if all(_kind(name) == "random" for _, name in wanted) else SKIP_OF_RARER
    whole, cases = out / f"draw_{seed}.jsonl", [case for found in draws.values() for case in found]
    report = Sweep(cases, whole, mode="graph", effort=effort, selection=Selection((), skip, CONFIGS)).run()
    print(f"measured {report.measured}, not reached {len(report.unreached)}, failed {len(report.failed)}")
    for text in report.failed[:20]:
        print(f"  failed: {text[:250]}")
    lines = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    done = {line["case"] for line in lines if line["kind"] == "done"}
    for (op, name), found in draws.items():
        texts = {case.text for case in found}
        own = {line["case"] for line in lines if line["kind"] == "case" and line["op"] == op and line["text"] in texts}
        kept = [line for line in lines if "case" not in line or line["case"] in done & own]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
        kind = "" if _kind(name) == "random" else f".{_kind(name)}"
        (out / f"{role}_{seed}_{op}{kind}.jsonl").write_text(text, encoding="utf-8")
        print(f"{op}{kind}: {sum(line['kind'] == 'done' for line in kept)} shapes")


def _shapes(op: str, name: str, seed: int) -> list[Case]:
    return from_file(op, Path(name)) if Path(name).is_file() else grid(op, name.replace(":", f":{seed}:"))


def _kind(name: str) -> str:
    """Of a draw; shapes of a file or of several grids count as random ones."""
    return name.partition(":")[0] if ":" in name and "+" not in name else "random"


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--train"]
    pairs = [(op, name) for op, _, name in (word.partition("=") for word in given[3:])]
    main(Path(given[0]), int(given[1]), float(given[2]), pairs, "random" if "--train" in sys.argv else "judged")
