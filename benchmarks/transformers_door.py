"""Models of transformers by torch's attention, by ours, and with fused MLPs: training, prefill (padded, too), decoding.

    python benchmarks/transformers_door.py --out transformers.jsonl         # bf16, 8 layers, hidden 2048, length 4096
    python benchmarks/transformers_door.py --tiny --out tiny.jsonl          # to see that it runs, on a CPU too
    python benchmarks/transformers_door.py --rounds 0 --out /dev/null       # compiles all that a later run needs

The implementations take turns in shuffled rounds; a line holds the median of each in milliseconds (`ms` until the
device is done, `host_ms` until the last call returned), what ran, and how many times as `faster` than sdpa it was: the
median over rounds, whose turns share what else the host had to do. Decoding goes on from turn to turn in one cache
for all, so every length is new, as it is where text is generated; `static` does it in a cache of fixed size.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

import registry
from registry.integrations import transformers as door

FUSED = f"{door.NAME}+mlp"
IMPLEMENTATIONS = ("sdpa", door.NAME, FUSED)
FAMILIES = ("Llama", "Mistral")
PHASES = ("train", "prefill", "padded", "decode", "static")
TOKENS = 16


def model_of(family: str, tiny: bool, device: str) -> torch.nn.Module:
    hidden, layers = (64, 2) if tiny else (2048, 8)
    sizes = dict(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=512,
        max_position_embeddings=8192,
        dtype="float32" if device == "cpu" else "bfloat16",
    )
    window = {"sliding_window": 64 if tiny else 1024} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **window)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    return model  # type: ignore[no-any-return]


def take(model: torch.nn.Module, name: str) -> None:
    """Let the model run by an implementation."""
    model.set_attn_implementation(name.removesuffix("+mlp"))
    if name == FUSED:
        door.fuse(model)
    else:
        door.unfuse(model)


class Step:
    """One phase of one model: what a turn calls, and the caches that go on from turn to turn."""

    def __init__(self, model: torch.nn.Module, phase: str, length: int, turns: int) -> None:
        self.model, self.phase = model, phase
        self.ids = torch.randint(512, (2, length), device=model.device)
        self.given: dict[str, object] = {"use_cache": False}
        if phase == "padded":
            padding = torch.ones_like(self.ids)
            padding[0, : length // 4] = 0
            self.given["attention_mask"] = padding
        elif phase in ("decode", "static"):
            cache = None
            if phase == "static":
                most = length + turns * len(IMPLEMENTATIONS) * TOKENS
                cache = transformers.StaticCache(config=model.config, max_cache_len=most)
            with torch.no_grad():
                self.given = {"past_key_values": model(self.ids, past_key_values=cache, use_cache=True).past_key_values}

    def __call__(self) -> None:
        if self.phase == "train":
            self.model(self.ids, labels=self.ids, **self.given).loss.backward()
            self.model.zero_grad()
        elif self.phase in ("decode", "static"):
            for _ in range(TOKENS):
                self.model(self.ids[:, :1], **self.given)
        else:
            self.model(self.ids, **self.given)

    def timed(self) -> tuple[float, float]:
        """Milliseconds until the device was done, and until the host was."""
        wait = torch.cuda.synchronize if self.ids.is_cuda else lambda: None
        gc.collect()  # else a turn is timed that collects what the turns before it left
        wait()
        start = time.perf_counter()
        with torch.set_grad_enabled(self.phase == "train"):
            self()
        host = time.perf_counter() - start
        wait()
        return (time.perf_counter() - start) * 1000, host * 1000


def compare(family: str, phases: list[str], tiny: bool, rounds: int, device: str) -> list[dict[str, object]]:
    """One line a phase and implementation."""
    model = model_of(family, tiny, device)
    lines: list[dict[str, object]] = []
    for phase in phases:
        take(model, door.NAME)
        step = Step(model, phase, 128 if tiny else 4096, rounds + 2)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPLEMENTATIONS}
        ran = {}
        for turn in range(rounds + 2):
            for name in random.sample(IMPLEMENTATIONS, len(IMPLEMENTATIONS)):
                take(model, name)
                with registry.record() as recorder:
                    took = step.timed()
                ran[name] = recorder.counts
                if turn >= 2:  # what compiles and what warms up is not counted
                    times[name].append(took)
        if not rounds:
            continue
        for name in IMPLEMENTATIONS:
            whole, host = (statistics.median(each) for each in zip(*times[name], strict=True))
            faster = statistics.median(
                theirs / own for (theirs, _), (own, _) in zip(times["sdpa"], times[name], strict=True)
            )
            print(f"{family:8} {phase:8} {name:20} {whole:9.2f} ms, {faster:.3f} times as fast as sdpa", flush=True)
            line = {
                "model": family,
                "phase": phase,
                "attention": name,
                "ms": round(whole, 3),
                "host_ms": round(host, 3),
                "faster": round(faster, 4),
            }
            lines.append({**line, "turns": [round(took[0], 3) for took in times[name]], "ran": ran[name]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES)
    asked = parser.parse_args()
    door.enable()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    with asked.out.open("w") as out:
        for family in asked.family:
            for line in compare(family, asked.phase, asked.tiny, asked.rounds, device):
                line |= {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
                out.write(json.dumps(line) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
