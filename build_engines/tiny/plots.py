"""Two pictures: the loss while training, and the held-out bits per byte by position."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .evaluate import Bucket, Evaluation

INK, BLUE, ORANGE, GREY = "#222222", "#1f5fa8", "#d9722e", "#9aa3ab"
_SMOOTHING = 40  # steps of the running mean


def _frame(figure: Figure, axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e6e8ea", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()


def plot_training(log: Path, target: Path) -> None:
    """Bits per byte of the training batches against tokens seen, with the phases marked."""
    with log.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["bits_per_byte"]]
    seen = np.array([int(row["seen"]) for row in rows]) / 1e6
    bits = np.array([float(row["bits_per_byte"]) for row in rows])
    width = min(_SMOOTHING, len(bits))
    smooth = np.convolve(bits, np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.plot(seen, bits, color=GREY, linewidth=0.4, alpha=0.5)
    axes.plot(seen[width - 1 :], smooth, color=BLUE, linewidth=1.8)
    ceiling = float(np.quantile(bits, 0.995))
    axes.set_ylim(float(np.quantile(bits, 0.001)) * 0.95, ceiling)
    stage, drop, last = "", 0.0, -1.0
    for at, row in zip(seen, rows, strict=True):
        name = f"{row['phase']} {row['length']}"
        if name != stage:
            stage = name
            color = ORANGE if row["phase"] == "sparse" else GREY
            axes.axvline(at, color=color, linewidth=0.8, linestyle=":")
            # A label closer than its own width to the one before hangs lower.
            drop = drop + 0.2 if at - last < 0.02 * seen[-1] else 0.0
            last = float(at)
            axes.text(at, ceiling * (1 - drop), f" {name}", rotation=90, va="top", ha="left", fontsize=7, color=color)
    _frame(figure, axes, "glm53-tiny: training loss", "million tokens seen", "bits per byte")
    figure.savefig(target, dpi=130)
    plt.close(figure)


def plot_positions(result: Evaluation, target: Path) -> None:
    """Held-out bits per byte by position in the context, sparse and dense."""
    figure, axes = plt.subplots(figsize=(8, 4))
    _steps(axes, result.dense.by_position, GREY, f"every position ({result.dense.bits_per_byte:.3f} in all)")
    _steps(axes, result.sparse.by_position, BLUE, f"top-64 selection ({result.sparse.bits_per_byte:.3f} in all)")
    axes.set_xscale("log", base=2)
    ticks = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    axes.set_xticks(ticks, [str(tick) if tick > 32 else "1" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    title = f"glm53-tiny: {result.bytes / 1e6:.2f} MB of held-out Python"
    _frame(figure, axes, title, "position in the context (tokens)", "bits per byte")
    figure.savefig(target, dpi=130)
    plt.close(figure)


def _steps(axes: Axes, buckets: tuple[Bucket, ...], color: str, label: str) -> None:
    edges = [max(bucket.start, 32) for bucket in buckets] + [buckets[-1].stop]
    axes.stairs(
        [bucket.bits_per_byte for bucket in buckets], edges, baseline=None, color=color, label=label, linewidth=2
    )
