"""The figure of docs/learn.md: who computes which tile, and what a pipeline of three stages hides.

python docs/figures/attention_tiles.py        # writes attention_tiles.svg beside this file
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

HIDDEN, EDGE, WHOLE, OURS, LOAD, DOT, SOFT = "#eeeeee", "#f2a65a", "#8fbcd4", "#c0392b", "#b8d8b8", "#8fbcd4", "#f2a65a"
BLOCKS_M, BLOCKS_N, OUR_TILE = 6, 8, 3


def tiles(axes: plt.Axes) -> None:
    """The score matrix under a causal mask, with more keys than queries; one program owns one row of tiles."""
    shift = BLOCKS_N - BLOCKS_M
    for m in range(BLOCKS_M):
        for n in range(BLOCKS_N):
            color = HIDDEN if n > m + shift else EDGE if n == m + shift else WHOLE
            axes.add_patch(Rectangle((n, m), 1, 1, facecolor=color, edgecolor="white", linewidth=2))
    axes.plot([shift, BLOCKS_N], [0, BLOCKS_M], color="#555555", linewidth=1.2, linestyle="--")
    axes.add_patch(Rectangle((0, OUR_TILE), BLOCKS_N, 1, fill=False, edgecolor=OURS, linewidth=2.5))
    y = OUR_TILE + 0.5
    end = (OUR_TILE + shift + 0.8, y)
    axes.add_patch(FancyArrowPatch((0.2, y), end, arrowstyle="-|>", mutation_scale=16, color=OURS))
    axes.text(BLOCKS_N + 0.15, y, "one program", color=OURS, va="center", fontsize=10)
    axes.set(
        xlim=(-0.1, BLOCKS_N + 2.2),
        ylim=(BLOCKS_M + 0.1, -0.6),
        xlabel="keys, in blocks of BLOCK_N",
        ylabel="queries, in tiles of BLOCK_M",
        title="the score matrix: computed tile by tile, never stored",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.legend(
        handles=[
            Patch(color=WHOLE, label="loop without a mask"),
            Patch(color=EDGE, label="loop with a mask"),
            Patch(color=HIDDEN, label="never visited"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.42, -0.07),
        ncol=3,
        frameon=False,
        fontsize=9,
    )
    for side in axes.spines.values():
        side.set_visible(False)


def timeline(axes: plt.Axes) -> None:
    """Copies run two blocks ahead of the products that need them."""

    def box(start: float, length: float, row: float, color: str, label: str) -> None:
        axes.add_patch(Rectangle((start, row), length, 0.8, facecolor=color, edgecolor="white", linewidth=1.5))
        axes.text(start + length / 2, row + 0.4, label, ha="center", va="center", fontsize=8)

    for i in range(5):
        box(1.0 * i if i < 2 else 2 + 3.0 * (i - 2), 1.8 if i > 1 else 0.95, 0, LOAD, f"K{i} V{i}")
    for i in range(4):
        start = 2 + 3.0 * i
        box(start, 0.95, 1, DOT, f"Q K{i}")
        box(start + 1, 0.95, 1, SOFT, "softmax")
        box(start + 2, 0.95, 1, DOT, f"P V{i}")
    axes.set(xlim=(-0.2, 14.2), ylim=(2.1, -0.4), title="num_stages = 3: block i+2 is copied while block i is computed")
    axes.set_yticks([0.4, 1.4], ["asynchronous\ncopies", "warps"], fontsize=9)
    axes.set_xticks([])
    axes.set_xlabel("time")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "attention_tiles"  # the same bytes on every run
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7.2), height_ratios=[3.2, 1])
    tiles(top)
    timeline(bottom)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
