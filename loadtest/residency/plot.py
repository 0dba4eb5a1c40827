"""The picture of a load step: memory, where rows were found, and sessions, one column a residency."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from loadtest.residency.load import Phase, Run, Sample

INK, GRID = "#222222", "#e6e8ea"
USES = {"required": "#1f5fa8", "optional": "#6fb08e", "in_transit": "#d9722e", "free": "#e9ecef"}
SOURCES = {"direct": "#6fb08e", "hot": "#e8c15a", "host": "#b5382f"}
STATES = {"decoding": "#1f5fa8", "importing": "#6fa3d8", "waiting": "#d9722e"}
TITLES = {
    "hisparse": "optional residency off (hisparse)",
    "adaptive": "optional residency on (adaptive)",
}
SHARE_SECONDS = 0.5
"""Shares are those of all rows found in so many seconds: a step has few."""
Floats = npt.NDArray[np.float64]


def plot_runs(runs: list[Run], target: Path) -> None:
    """Draw runs of the same load side by side."""
    figure, grid = plt.subplots(
        3, len(runs), figsize=(6.5 * len(runs), 8.6), sharex=True, sharey="row", height_ratios=(3, 2, 1.4),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for run, (memory, shares, sessions) in zip(runs, grid.T, strict=True):
        _draw_memory(memory, run)
        _draw_shares(shares, run)
        _draw_sessions(sessions, run)
        _mark_phases(run, memory, (shares, sessions))
    for axes, label in zip(grid[:, 0], ("device pages", "selected rows", "sessions"), strict=True):
        axes.set_ylabel(label)
    grid[0, 0].set_xlim(0, max(run.end for run in runs))
    for axes in grid[:, -1]:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _draw_memory(axes: Axes, run: Run) -> None:
    at = _seconds(run.samples)
    pages = [np.array([sample.pages[use] for sample in run.samples]) for use in USES]
    capacity = sum(run.samples[0].pages.values())
    labels = [use.replace("_", " ") for use in USES]
    axes.stackplot(at, pages, colors=USES.values(), labels=labels, linewidth=0, step="post")
    reserve = run.samples[0].reserve
    if reserve:
        axes.axhline(capacity - reserve, color=INK, linewidth=1.2, linestyle="--", label=f"reserve ({reserve} pages)")
    axes.set_ylim(0, capacity)


def _draw_shares(axes: Axes, run: Run) -> None:
    at, rows = _rates(run)
    axes.stackplot(at, 100 * rows / rows.sum(axis=0), colors=SOURCES.values(), labels=SOURCES.keys(), linewidth=0)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:.0f}%")


def _rates(run: Run) -> tuple[Floats, Floats]:
    """Seconds, float64 [n], and rows found around them, float64 [3, n]; times when nobody decoded are left out."""
    at = _seconds(run.samples)
    ticks = np.arange(0.0, run.end, SHARE_SECONDS)
    totals = np.array([[sample.rows[source] for sample in run.samples] for source in SOURCES], dtype=np.float64)
    seen = totals[:, np.searchsorted(at, ticks).clip(max=len(at) - 1)]
    rows = np.diff(seen, axis=1)
    some = rows.sum(axis=0) > 0
    return ticks[1:][some] - SHARE_SECONDS / 2, rows[:, some]


def _draw_sessions(axes: Axes, run: Run) -> None:
    counts = [np.array([getattr(sample, state) for sample in run.samples]) for state in STATES]
    axes.stackplot(
        _seconds(run.samples), counts, colors=STATES.values(), labels=STATES.keys(), linewidth=0, step="post"
    )
    axes.set_xlabel("seconds")


def _mark_phases(run: Run, top: Axes, others: tuple[Axes, ...]) -> None:
    top.set_title(TITLES[run.residency.value], loc="left", fontsize=11, color=INK, pad=22)
    for phase in Phase:
        start = run.starts[phase]
        for axes in (top, *others):
            axes.axvline(start, color=INK, linewidth=0.8, linestyle=":")
        name = phase.value.replace("low load again", "low again").replace(" load", "")
        top.annotate(
            name,
            (start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 4),
            textcoords="offset points",
            fontsize=8,
        )
    for axes in (top, *others):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=GRID, linewidth=0.8)


def _seconds(samples: list[Sample]) -> Floats:
    return np.array([sample.seconds for sample in samples])
