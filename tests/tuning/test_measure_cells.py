"""benchmarks/measure_cells.py without a GPU: its cells, what it writes, and that whoever fails is named."""

from __future__ import annotations

import json
import sys

import measure_cells
import pytest
import torch
from ran import printed
from torch.nn.attention import SDPBackend

from registry.ops.parts.cases import Case
from registry.tuning.timing import Timing

pytestmark = pytest.mark.usefixtures("quick_python")
SCRIPT = measure_cells.__file__
SMALL = {"b": 1, "hq": 4, "hkv": 2, "s": 64, "d": 16, "causal": True}


@pytest.fixture
def of_a_cpu(monkeypatch):
    """Contestants that a CPU runs, and the oracle's LSE without our kernels."""
    monkeypatch.setattr(measure_cells, "OURS", {"attention": "torch_cpu", "attention_backward": "torch_cpu_backward"})
    monkeypatch.setattr(measure_cells, "PEERS", {"math": "torch_math", "absent": "peer.nobody", "fa2": "torch_flash"})
    monkeypatch.setattr(measure_cells, "BACKENDS", {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION})
    return measure_cells


class Clock:
    """Runs each launch, and says that it took a tenth of a microsecond for each contestant that it has met."""

    def __init__(self) -> None:
        self.met: list[object] = []

    def sample(self, launches, settle_ms, measure_ms):
        for launch in launches:
            launch()
        if launches not in self.met:
            self.met.append(launches)
        place = 1 + self.met.index(launches)
        return Timing(place * 1e-4, 0.0, 0.0, 1, {"sm_mhz": 1000 * place, "watts": 500})

    def forget(self):
        pass


def test_the_cells_are_the_eighteen_and_six_of_grouped_heads():
    cells = measure_cells.cells("attention")
    grouped = [case for case in cells if case.sizes.get("hkv")]
    assert len(cells) == 24 and len(grouped) == 6
    assert {case.sizes["s"] for case in grouped} == {2048, 8192, 32768}
    assert sorted(case.text for case in cells) == sorted(
        case.text for case in measure_cells.cells("attention_backward")
    )
    whole = Case.of("attention", b=4, hq=16, s=4096, d=128)
    assert measure_cells.tflop(whole, "forward") == pytest.approx(4 * 4 * 16 * 4096**2 * 128 / 1e12)
    assert measure_cells.tflop(Case.of("attention", **whole.sizes, causal=True), "backward") == pytest.approx(
        1.25 * measure_cells.tflop(whole, "forward")
    )


@pytest.mark.parametrize("what", ["backward", "forward", "training"])
def test_a_cell_has_all_who_ran_and_who_did_not(of_a_cpu, what, tmp_path):
    path = tmp_path / "peer_cells_new.jsonl"
    lines = [{"kind": "run", "machine": "a CPU", "versions": {"torch": "2"}, "of": "these"}]
    say = lambda kind, **record: lines.append({"kind": kind, **record})  # noqa: E731
    op = "attention" if what == "forward" else "attention_backward"
    of_a_cpu.measure(Case.of(op, **SMALL), what, Clock(), say, "cpu")
    path.write_text("\n".join(map(json.dumps, lines)))
    (cell,) = [line for line in lines if line["kind"] == "cell"]
    (failed,) = [line for line in lines if line["kind"] == "failed"]
    assert failed["who"] == ("cudnn" if what == "training" else "fa2") and failed["why"]
    flops = of_a_cpu.tflop(Case.of(op, **SMALL), what)
    assert cell["tflops"] == {"ours": round(flops * 1e7, 1), "math": round(flops * 5e6, 1)}
    assert cell["state"]["math"] == {"sm_mhz": 2000, "watts": 500}
    assert (cell["timed"], cell["hkv"], cell["s"]) == (of_a_cpu.TIMED[what], 2, 64)
    assert f"failed: {failed}" in of_a_cpu.table(path).splitlines()


def test_who_is_wrong_or_breaks_in_a_round_is_out(of_a_cpu, monkeypatch):
    lines = []
    say = lambda kind, **record: lines.append({"kind": kind, **record})  # noqa: E731

    class Breaking(Clock):
        def sample(self, launches, settle_ms, measure_ms):
            found = super().sample(launches, settle_ms, measure_ms)
            if found.ms == 2e-4:
                raise RuntimeError("an illegal instruction was encountered")
            return found

    why = of_a_cpu.measure(Case.of("attention", **SMALL), "forward", Breaking(), say, "cpu")
    assert why == "nothing to compare: ours ran"
    assert [(line["kind"], line["who"]) for line in lines] == [("failed", "fa2"), ("failed", "math")]
    lines.clear()
    monkeypatch.setattr(
        of_a_cpu.Forward, "call", lambda self, launch, tensors: torch.full_like(tensors["q"], torch.nan)
    )
    assert "nobody" in of_a_cpu.measure(Case.of("attention", **SMALL), "forward", Clock(), say, "cpu")
    assert [line["who"] for line in lines] == ["ours", "math", "fa2"]
    assert "allowed" in lines[0]["why"] or "finite" in lines[0]["why"]


def test_without_a_gpu_it_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert printed(sys.executable, SCRIPT, tmp_path) == "skipped: there is no CUDA GPU\n"
