"""Models of transformers by our attention and by torch's: training, prefill, padded prefill, decoding.

    python benchmarks/transformers_door.py --out transformers.jsonl         # bf16, 8 layers, hidden 2048, length 4096
    python benchmarks/transformers_door.py --tiny --out tiny.jsonl          # to see that it runs, on a CPU too

Both implementations take turns in shuffled rounds; a line holds the median of each, in milliseconds, and what ran.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

import registry
from registry.integrations import transformers as door

IMPLEMENTATIONS = ("sdpa", door.NAME)
PHASES = ("train", "prefill", "padded", "decode")
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
    )
    window = {"sliding_window": 64 if tiny else 1024} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **window)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def step(model: torch.nn.Module, phase: str, ids: torch.Tensor, padding: torch.Tensor, cache: object) -> None:
    if phase == "train":
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
    elif phase == "decode":
        for _ in range(TOKENS):
            model(ids[:, :1], past_key_values=cache)
    else:
        model(ids, attention_mask=padding if phase == "padded" else None, use_cache=False)


def timed(model: torch.nn.Module, phase: str, ids: torch.Tensor, padding: torch.Tensor, filled: object) -> float:
    """Milliseconds of one step, the device waited for; decoding goes on from a copy of the cache."""
    cache = copy.deepcopy(filled) if phase == "decode" else None
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    with torch.set_grad_enabled(phase == "train"):
        step(model, phase, ids, padding, cache)
    wait()
    return (time.perf_counter() - start) * 1000


def compare(family: str, tiny: bool, rounds: int, device: str) -> list[dict[str, object]]:
    """One line a phase and implementation."""
    batch, length = (2, 128) if tiny else (2, 4096)
    model = model_of(family, tiny, device)
    ids = torch.randint(512, (batch, length), device=device)
    padding = torch.ones_like(ids)
    padding[0, : length // 4] = 0
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
    lines: list[dict[str, object]] = []
    for phase in PHASES:
        times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
        ran = {}
        for turn in range(rounds + 2):
            for name in random.sample(IMPLEMENTATIONS, len(IMPLEMENTATIONS)):
                model.set_attn_implementation(name)
                with registry.record() as recorder:
                    took = timed(model, phase, ids, padding, filled)
                ran[name] = recorder.counts
                if turn >= 2:  # what compiles and what warms up is not counted
                    times[name].append(took)
        for name in IMPLEMENTATIONS:
            ms = statistics.median(times[name])
            lines.append({"model": family, "phase": phase, "attention": name, "ms": round(ms, 3), "ran": ran[name]})
        one, other = (statistics.median(times[name]) for name in IMPLEMENTATIONS)
        print(f"{family:8} {phase:8} {one:9.2f} ms by sdpa, {one / other:.3f} times as fast by the registry")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    door.enable()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    with asked.out.open("w") as out:
        for family in ("Llama", "Mistral"):
            for line in compare(family, asked.tiny, asked.rounds, device):
                line |= {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
