"""The pictures of README.md and docs/learn.md, by the commands that they show: `make pictures`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from registry.cli import main as kreg

ROOT = Path(__file__).parents[1]
IMAGES, RECORDED = ROOT / "docs" / "images", ROOT / "tests" / "profiling" / "recorded"
TIMELINES = {
    "gluon_fa3": ("gluon_fa3", "b=4,hq=32,s=4096,d=64", "consumers=3", 9000),
    "gluon_fa3_backward": ("gluon_fa3_backward", "b=1,hq=4,s=4096,d=128", "BLOCK_M=64,order=any", 4500),
    "gluon_matmul_ws": ("gluon_matmul_ws", "m=4096,n=4096,k=4096", "MODE=coop,BLOCK_M=128,BLOCK_N=128", 5000),
    "gluon_matmul_ws_pingpong": ("gluon_matmul_ws", "m=4096,n=4096,k=4096", "MODE=pingpong", 78000),
}
"""By the name of the trace: variant, shape, config, and how many cycles to show."""


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder) / "page.html")
        for name, (variant, shape, config, cycles) in TIMELINES.items():
            trace, image = RECORDED / f"{name}.trace.json.gz", IMAGES / f"timeline_{name}.svg"
            shown = f"{variant} --shape {shape} --config {config} --cycles {cycles}".split()
            failed += kreg(["profile", *shown, "--from", str(trace), "--svg", str(image), "-o", page])
        failed += kreg(["report", str(ROOT / "benchmarks" / "results"), "-o", page, "--pictures", folder])
        shutil.copy(Path(folder) / "attention.roofline.png", IMAGES / "attention_roofline.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
