"""What optional residency does for the tiny model when the load rises and falls again.

`python -m loadtest bench residency`: the same requests with optional residency off and on, in this process, through
the real scheduler and engine. Answers must not differ by a token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from loadtest.console import results_console
from loadtest.residency.load import Phase, Run, Shape, run_load
from loadtest.residency.plot import plot_runs
from trt_backend.config import Residency

SOURCES = ("direct", "hot", "host")
MOVES = ("reclaimed", "refilled", "backed_up")
LOW_PHASES = (Phase.LOW, Phase.LOW_AGAIN)
LEAST_OFF = 0.05
"""So much of the selected rows must be fetched at low load with optional residency off, or there is nothing to gain."""
MOST_ON = 0.1
"""At most so much of that may be left of it when it is on."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """A phase of a run: shares of the selected rows, pages at its end, and what was moved in it."""

    phase: Phase
    seconds: float
    rows: int
    shares: dict[str, float]
    most_sessions: int
    most_waiting: int
    least_optional: int
    most_optional: int
    optional_at_end: int
    moved: dict[str, int]
    tokens_per_second: float


def summarise(run: Run, phase: Phase) -> PhaseResult:
    """What the samples of a phase say."""
    samples = run.during(phase)
    first, last = samples[0], samples[-1]
    rows = {source: last.rows[source] - first.rows[source] for source in SOURCES}
    seconds = last.seconds - first.seconds
    found = sum(rows.values())
    return PhaseResult(
        phase=phase,
        seconds=seconds,
        rows=found,
        shares={source: count / found for source, count in rows.items()},
        most_sessions=max(sample.importing + sample.decoding for sample in samples),
        most_waiting=max(sample.waiting for sample in samples),
        least_optional=min(sample.pages["optional"] for sample in samples),
        most_optional=max(sample.pages["optional"] for sample in samples),
        optional_at_end=last.pages["optional"],
        moved={kind: last.moved[kind] - first.moved[kind] for kind in last.moved},
        tokens_per_second=(last.generated_tokens - first.generated_tokens) / seconds,
    )


def host_share(results: list[PhaseResult]) -> float:
    """The host-fetched share of what was selected at low load."""
    low = [result for result in results if result.phase in LOW_PHASES]
    return sum(result.shares["host"] * result.rows for result in low) / sum(result.rows for result in low)


def compare(off: list[PhaseResult], on: list[PhaseResult]) -> dict[str, float | bool]:
    """What the experiment is to show: the host-fetched shares at low load, and how optional memory went and came."""
    shares = host_share(off), host_share(on)
    low, high, draining, again = on
    return {
        "low_load_host_share_off": shares[0],
        "low_load_host_share_on": shares[1],
        "on_over_off": shares[1] / shares[0],
        "optional_before": low.optional_at_end,
        "optional_least_at_high_load": min(high.least_optional, draining.least_optional),
        "optional_after": again.most_optional,
        "reclaimed": high.moved["reclaimed"] + draining.moved["reclaimed"],
        "refilled_while_draining": draining.moved["refilled"],
        "met": shares[0] >= LEAST_OFF and shares[1] <= MOST_ON * shares[0],
    }


def print_results(results: dict[Residency, list[PhaseResult]], summary: dict[str, float | bool]) -> None:
    """Two tables and what follows from them."""
    console = results_console()
    rows = Table("residency", "phase", title="where selected rows were found")
    memory = Table("residency", "phase", title="sessions, and pages")
    for table, columns in (
        (rows, ("direct", "hot", "host", "rows", "tokens/s")),
        (memory, ("sessions", "waiting", "optional, least", "at the end", "reclaimed", "refilled", "backed up")),
    ):
        for column in columns:
            table.add_column(column, justify="right")
    for residency, phases in results.items():
        for i, one in enumerate(phases):
            head = residency.value if i == 0 else "", one.phase.value
            shares = (f"{one.shares[source]:.2%}" for source in SOURCES)
            rows.add_row(*head, *shares, str(one.rows), f"{one.tokens_per_second:.0f}")
            pages = (one.least_optional, one.optional_at_end, *(one.moved[kind] for kind in MOVES))
            memory.add_row(*head, *map(str, (one.most_sessions, one.most_waiting, *pages)))
        for table in (rows, memory):
            table.add_section()
    console.print(rows)
    console.print(memory)
    off, on = summary["low_load_host_share_off"], summary["low_load_host_share_on"]
    console.print(
        f"fetched from the host at low load: {off:.2%} with optional residency off (at least {LEAST_OFF:.0%} wanted), "
        f"{on:.2%} on ({summary['on_over_off']:.4f} of that; at most {MOST_ON:g} wanted): "
        f"{'met' if summary['met'] else 'NOT met'}"
    )
    before, least, after = (summary[f"optional_{when}"] for when in ("before", "least_at_high_load", "after"))
    console.print(
        f"optional pages: {before} before, {least} at the least at high load ({summary['reclaimed']} reclaimed), "
        f"{after} again at low load ({summary['refilled_while_draining']} refilled while the crowd left)"
    )
    console.print("no token of any answer differed between the two runs")


def main(
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the picture, into this PNG file.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything, all samples, here.")] = None,
) -> None:
    """Raise the load and lower it again, with optional residency off and on: where rows are found, and the memory."""
    shape = Shape(seed=seed)
    runs = []
    with Progress(console=Console(stderr=True)) as progress:
        for residency in (Residency.HISPARSE, Residency.ADAPTIVE):
            task = progress.add_task(residency.value, total=1.0)
            runs.append(run_load(shape, residency, partial(_show, progress, task)))
            _show(progress, task, 1.0)
    require_same_tokens(*runs)
    results = {run.residency: [summarise(run, phase) for phase in Phase] for run in runs}
    summary = compare(results[Residency.HISPARSE], results[Residency.ADAPTIVE])
    print_results(results, summary)
    if plot is not None:
        plot_runs(runs, plot)
    if json_path is not None:
        report = {
            "shape": asdict(shape),
            "summary": summary,
            "phases": {residency.value: [asdict(one) for one in phases] for residency, phases in results.items()},
            "runs": {
                run.residency.value: {
                    "starts": run.starts,
                    "end": run.end,
                    "samples": [asdict(sample) for sample in run.samples],
                    "tokens": run.tokens,
                }
                for run in runs
            },
        }
        json_path.write_text(json.dumps(report) + "\n")


def _show(progress: Progress, task: TaskID, done: float) -> None:
    progress.update(task, completed=done)


def require_same_tokens(off: Run, on: Run) -> None:
    """Where rows lie must change no answer.

    Raises:
        RuntimeError: it did.
    """
    differing = [name for name, tokens in off.tokens.items() if on.tokens[name] != tokens]
    if differing:
        raise RuntimeError(f"the answers of {', '.join(differing)} differ between residencies")


if __name__ == "__main__":
    typer.run(main)
