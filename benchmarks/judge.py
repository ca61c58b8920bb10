"""A draw of random shapes of several ops in one sweep, so that processes start once and kernels are compiled ahead:

    python benchmarks/judge.py OUT SEED SECONDS matmul=random:160 attention=random:160 attention_backward=random:160

Writes OUT/judged_SEED_OP.jsonl for `make plots` (with --train: OUT/random_SEED_OP.jsonl, for a fit; then of grids
too: `matmul=llm+squares+random:500`, or a file of shapes: `matmul=SHAPES.txt`). The op that is named first is
measured first. Times are of replayed graphs over rotated inputs: single launches under 30 us differ by 1.6% from
round to round (6% one time in twenty), replays by 0.2%, and that is what a regret of 1% asks for. Variants that were
never the fastest by more than 1.7% on 681 products or 394 attentions are left out, as is torch's own arithmetic with
stored scores.
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
CONFIGS = 4


def main(out: Path, seed: int, seconds: float, wanted: dict[str, str], kind: str) -> None:
    """Measure, then cut the journal into one for each op."""
    cases = [case for op, name in wanted.items() for case in _shapes(op, name, seed)]
    effort = Effort(rounds=4, settle_ms=3.0, measure_ms=4.0, budget_s=seconds, turn_timeout=15, check_timeout=30)
    whole = out / f"draw_{seed}.jsonl"
    report = Sweep(cases, whole, mode="graph", effort=effort, selection=Selection((), SKIP, CONFIGS)).run()
    print(f"measured {report.measured}, not reached {len(report.unreached)}, failed {len(report.failed)}")
    for text in report.failed[:20]:
        print(f"  failed: {text[:250]}")
    lines = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    done = {line["case"] for line in lines if line["kind"] == "done"}
    op_of = {line["case"]: line["op"] for line in lines if line["kind"] == "case"}
    for op in wanted:
        kept = [line for line in lines if "case" not in line or (line["case"] in done and op_of[line["case"]] == op)]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
        (out / f"{kind}_{seed}_{op}.jsonl").write_text(text, encoding="utf-8")
        print(f"{op}: {sum(line['kind'] == 'done' for line in kept)} shapes")


def _shapes(op: str, name: str, seed: int) -> list[Case]:
    return from_file(op, Path(name)) if Path(name).is_file() else grid(op, name.replace("random:", f"random:{seed}:"))


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--train"]
    wanted = dict(word.split("=") for word in given[3:])
    kind = "random" if "--train" in sys.argv else "judged"
    main(Path(given[0]), int(given[1]), float(given[2]), wanted, kind)
