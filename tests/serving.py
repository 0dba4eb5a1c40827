"""Running real requests through a real runtime in this process, and keeping every logit it made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trt_backend.build import Runtime, build_runtime, find_model
from trt_backend.config import DeploymentConfig
from trt_backend.engines.base import Engine, StepBatch, StepResult
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.memory.arena import RowStore
from trt_backend.memory.cpu import CpuTransfers
from trt_backend.request import Output, Request

Int32 = npt.NDArray[np.int32]


def python_tokens(module: ModuleType) -> Int32:
    """A module's source in the tiny model's tokens: int32 [tokens]."""
    tokenizer = Tokenizer.from_file(str(find_model("glm53-tiny") / "tokenizer.json"))
    assert module.__file__ is not None
    ids = tokenizer.encode(Path(module.__file__).read_text(), add_special_tokens=False).ids
    return np.array(ids, dtype=np.int32)


@dataclass(slots=True)
class Answer:
    """What one request got: tokens, its last output, and the float32 [tokens, vocabulary] logits they came from."""

    tokens: list[int] = field(default_factory=list)
    last: Output | None = None
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)


class Recorder:
    """An engine that notes the logits of every session before it hands them on.

    Sessions are told apart by their prompts' lengths, which must differ.
    """

    def __init__(self, engine: Engine, hierarchy: Hierarchy, answers: dict[int, Answer]) -> None:
        self.layout = engine.layout
        self.tables = engine.tables
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._hierarchy = hierarchy
        self._answers = answers

    def open_slot(self, slot: int) -> None:
        self._engine.open_slot(slot)

    def step(self, batch: StepBatch) -> StepResult:
        result = self._engine.step(batch)
        for slot, logits in zip(batch.slots[batch.logits_of].tolist(), result.logits, strict=True):
            self._answers[self._hierarchy.sessions[slot].prompt_tokens].logits.append(logits.copy())
        return result


POISON = 0x3F
"""Fills freed pages: finite numbers near 1 in every row format, so that a row read by mistake changes tokens."""


def poison_freed_pages(runtime: Runtime) -> None:
    """Overwrite device and host pages the moment they are freed."""
    hierarchy, transfers = runtime.hierarchy, runtime.hierarchy._movement._transfers
    assert isinstance(transfers, CpuTransfers)

    def poisoning(give: Callable[[Int32], None], store: RowStore) -> Callable[[Int32], None]:
        def poison_and_give(pages: Int32) -> None:
            for source in store.sources if len(pages) else ():
                source.reshape(store.pages, -1)[pages] = POISON
            give(pages)

        return poison_and_give

    hierarchy.pages.free = poisoning(hierarchy.pages.free, transfers.device)  # type: ignore[method-assign]
    hierarchy.host.give = poisoning(hierarchy.host.give, transfers.pool)  # type: ignore[method-assign]


def serve(
    config: DeploymentConfig,
    prompts: list[Int32],
    max_tokens: int,
    recorder: type[Recorder] = Recorder,
    waves: int = 1,
) -> tuple[dict[int, Answer], Runtime]:
    """Send all prompts, greedy; wait for the last token. Answers are keyed by the prompts' lengths.

    They come all at once, or in `waves`: the next one when all but two requests of those before are over.
    """
    answers = {len(prompt): Answer() for prompt in prompts}
    assert len(answers) == len(prompts), "prompts must differ in length"
    runtime = build_runtime(config)
    poison_freed_pages(runtime)
    scheduler = runtime.scheduler
    scheduler._engine = recorder(scheduler._engine, runtime.hierarchy, answers)
    over = threading.Semaphore(0)

    def deliver(output: Output) -> None:
        answer = answers[int(output.request_id)]
        answer.tokens += output.tokens
        if output.finish is not None:
            answer.last = output
            over.release()

    ended = 0

    def wait_for(count: int) -> None:
        nonlocal ended
        while ended < count:
            assert over.acquire(timeout=600), f"no answer in 600 s; {scheduler.snapshot()}"
            ended += 1

    for wave in range(waves):
        wait_for(len(prompts) * wave // waves - 2)
        for prompt in prompts[len(prompts) * wave // waves : len(prompts) * (wave + 1) // waves]:
            scheduler.submit(Request(str(len(prompt)), prompt, max_tokens), deliver)
        if wave == 0:
            scheduler.start()
    wait_for(len(prompts))
    scheduler.stop(drain_seconds=10)
    runtime.hierarchy.poll()
    runtime.hierarchy.check()
    runtime.close()
    return answers, runtime
