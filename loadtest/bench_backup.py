"""What background copies of dirty pages cost decoding: `python -m loadtest bench backup`.

Eight sessions of the tiny model decode with their history on the device, with different settings of
`backup_pages_per_tick`, in turn. There is so much history without a host copy that copies go on to the end.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest.bench_decode import CHUNK, PAGE_TOKENS, decode_ms
from loadtest.console import results_console
from trt_backend.build import find_model
from trt_backend.config import Residency
from trt_backend.models.registry import read_config

SESSIONS = 8
SETTINGS = (0, 1, 4)
"""Pages a tick; the first, none, is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over rounds: milliseconds a decode step, and how often that of no background copies, within a round."""

    backup_pages_per_tick: int
    step_ms: float
    ratio: float


def main(
    model: Annotated[str, typer.Option(help="Model name or checkpoint folder.")] = "glm53-tiny",
    prompt_tokens: Annotated[int, typer.Option(min=64)] = 4096,
    new_tokens: Annotated[int, typer.Option(min=8, help="Steps in which all sessions decode.")] = 32,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure decode steps with background copies and without."""
    # The first session decodes while the others are imported: all together make `new_tokens` after that.
    steps = SESSIONS * -(-prompt_tokens // CHUNK) + new_tokens
    if SESSIONS * prompt_tokens // PAGE_TOKENS < max(SETTINGS) * steps:
        raise typer.BadParameter(
            f"{SESSIONS} prompts of {prompt_tokens} tokens are copied before {steps} steps are over; use longer prompts"
        )
    rng = np.random.default_rng(0)
    vocabulary = read_config(find_model(model)).vocab_size
    rounds: list[list[float]] = []
    with Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(repeats), description="rounds"):
            prompts = list(rng.integers(10, vocabulary, (SESSIONS, prompt_tokens)).astype(np.int32))
            rounds.append(
                [
                    decode_ms(model, Residency.ADAPTIVE, prompts, steps, backup_pages_per_tick=pages)
                    for pages in SETTINGS
                ]
            )
    results = [
        Result(pages, statistics.median(times), statistics.median(one[number] / one[0] for one in rounds))
        for number, (pages, times) in enumerate(zip(SETTINGS, zip(*rounds, strict=True), strict=True))
    ]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    table = Table(title=f"{SESSIONS} sessions decoding, all history on the device and dirty")
    for column in ("background pages a tick", "ms a step", "ratio to none"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(str(result.backup_pages_per_tick), f"{result.step_ms:.1f}", f"{result.ratio:.2f}")
    results_console().print(table)


if __name__ == "__main__":
    typer.run(main)
