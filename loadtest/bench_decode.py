"""Decode steps of this backend and of transformers' `generate()`, on the same weights, side by side in one run."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest.console import results_console
from trt_backend.build import build_runtime, find_model
from trt_backend.config import DeploymentConfig, Residency
from trt_backend.request import Output, Request

Int32 = npt.NDArray[np.int32]
console = Console(stderr=True)
PAGE_TOKENS = 64
CHUNK = 512
"""Prompt tokens per step, so that it is known how long imports take."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over repeats, at one batch size. Times are milliseconds between a session's tokens."""

    sessions: int
    prompt_tokens: int
    resident_ms: float
    hisparse_ms: float
    transformers_ms: float
    resident_times_faster: float
    hisparse_times_faster: float


def decode_ms(model: str, residency: Residency, prompts: list[Int32], new_tokens: int, **settings: Any) -> float:
    """Median time of a step in which every session decodes, from one session's token to its next, in ms.

    Further `settings` are the deployment's.
    """
    pages = sum(-(-(len(prompt) + new_tokens) // PAGE_TOKENS) + 8 for prompt in prompts)
    config = DeploymentConfig(
        model=model,
        residency=residency,
        max_sessions=len(prompts),
        device_pages=pages,
        prefill_chunk_tokens=CHUNK,
        **settings,
    )
    runtime = build_runtime(config)
    arrivals: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    over = threading.Semaphore(0)

    def deliver(output: Output) -> None:
        arrivals[output.request_id].append(time.perf_counter())
        if output.finish is not None:
            if output.error is not None:
                raise output.error
            over.release()

    runtime.scheduler.start()
    for i, prompt in enumerate(prompts):
        runtime.scheduler.submit(Request(str(i), prompt, new_tokens), deliver)
    for _ in prompts:
        over.acquire()
    runtime.scheduler.stop(drain_seconds=1)
    runtime.close()
    # Prompts are imported one after another: all sessions decode between the last first token and the first last one.
    start = max(times[0] for times in arrivals.values())
    end = min(times[-1] for times in arrivals.values())
    steady = [t for t in arrivals[str(len(prompts) - 1)] if start <= t <= end]
    return float(statistics.median(np.diff(steady).tolist())) * 1e3


def transformers_ms(reference: Any, prompts: list[Int32], new_tokens: int) -> float:
    """Median time between tokens of `generate()`, greedy, over the whole batch, in ms."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    ticks: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ARG002
            ticks.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch = torch.from_numpy(np.stack(prompts).astype(np.int64))
    with torch.inference_mode():
        reference.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Clock()]),
        )
    return float(statistics.median(np.diff(ticks).tolist())) * 1e3


def compare(model: str, reference: Any, prompts: list[Int32], tokens: int, reference_tokens: int) -> tuple[float, ...]:
    """One round: ms of this backend resident, in hisparse, and of transformers, on the same prompts."""
    importing = sum(-(-len(prompt) // CHUNK) for prompt in prompts)  # steps in which the first session decodes already
    return (
        decode_ms(model, Residency.RESIDENT, prompts, tokens + importing),
        decode_ms(model, Residency.HISPARSE, prompts, tokens + importing),
        transformers_ms(reference, prompts, reference_tokens),
    )


def summarise(sessions: int, prompt_tokens: int, rounds: list[tuple[float, ...]]) -> Result:
    """Medians; ratios are taken within a round, so that a drifting machine cancels out."""
    resident, hisparse, theirs = (list(column) for column in zip(*rounds, strict=True))
    return Result(
        sessions,
        prompt_tokens,
        statistics.median(resident),
        statistics.median(hisparse),
        statistics.median(theirs),
        statistics.median(t / r for t, r in zip(theirs, resident, strict=True)),
        statistics.median(t / h for t, h in zip(theirs, hisparse, strict=True)),
    )


def main(
    model: Annotated[str, typer.Option(help="Model name or checkpoint folder.")] = "glm53-tiny",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens this backend decodes per round.")] = 48,
    reference_tokens: Annotated[int, typer.Option(min=4, help="Tokens transformers decodes per round.")] = 12,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure decode steps at batch 1 and 8, this backend and transformers in turn."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(find_model(model), dtype=torch.float32)
    reference.eval()
    rng = np.random.default_rng(0)
    results = []
    with Progress(console=console) as progress:
        for sessions in (1, 8):
            rounds = []
            for _ in progress.track(range(repeats), description=f"batch {sessions}"):
                shape = (sessions, prompt_tokens)
                prompts = list(rng.integers(10, reference.config.vocab_size, shape).astype(np.int32))
                rounds.append(compare(model, reference, prompts, new_tokens, reference_tokens))
            results.append(summarise(sessions, prompt_tokens, rounds))
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    table = Table(title=f"ms from a session's token to its next, prompts of {prompt_tokens} tokens")
    for column in ("sessions", "resident", "hisparse", "transformers", "resident ×", "hisparse ×"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r.sessions),
            *(f"{ms:.1f}" for ms in (r.resident_ms, r.hisparse_ms, r.transformers_ms)),
            *(f"{ratio:.1f}" for ratio in (r.resident_times_faster, r.hisparse_times_faster)),
        )
    results_console().print(table)


if __name__ == "__main__":
    typer.run(main)
