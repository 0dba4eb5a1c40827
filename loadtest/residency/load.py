"""A step in the load: a few long requests from beginning to end, and in their middle a crowd that comes and goes.

Time is counted in tokens of the first long request, so that every run sends the same requests at the same point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from build_engines.tiny.corpus import read_text, scan, stdlib_root
from trt_backend.build import Runtime, build_runtime, find_model
from trt_backend.config import DeploymentConfig, Residency
from trt_backend.request import Output, Request, SamplingParams
from trt_backend.scheduler import Snapshot

Int32 = npt.NDArray[np.int32]

MODEL = "glm53-tiny"
HOT_TOKENS = 256
"""Four times the model's top-k."""
PAGE_TOKENS = 64
SAMPLE_SECONDS = 0.05
STALE_SECONDS = 0.1
"""A snapshot may be older than the mark that it is seen after."""
TEMPERATURE = 0.7
"""Small models repeat themselves when they are greedy, and then look at the same rows all the time."""


class Phase(StrEnum):
    """Low load, a crowd arriving, the crowd leaving, low load again."""

    LOW = "low load"
    HIGH = "high load"
    DRAINING = "draining"
    LOW_AGAIN = "low load again"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent. The crowd's first request comes when the first long one has made `first_arrival` tokens, the next
    ones every `arrival_every` tokens. Prompts are drawn between two lengths, in tokens."""

    seed: int = 0
    device_pages: int = 208
    long_requests: int = 3
    long_prompts: tuple[int, int] = (2200, 3000)
    long_tokens: int = 1000
    first_arrival: int = 200
    crowd: int = 24
    arrival_every: int = 10
    crowd_prompts: tuple[int, int] = (1000, 2600)
    crowd_tokens: tuple[int, int] = (160, 320)

    def requests(self) -> tuple[list[Request], list[Request]]:
        """The long requests and the crowd: pieces of held-out source files."""
        rng = np.random.default_rng(self.seed)
        text = held_out_tokens()

        def request(name: str, prompts: tuple[int, int], new: tuple[int, int], number: int) -> Request:
            length, max_tokens = (int(rng.integers(low, high + 1)) for low, high in (prompts, new))
            first = int(rng.integers(0, len(text) - length))
            sampling = SamplingParams(temperature=TEMPERATURE, seed=self.seed + number)
            return Request(f"{name}-{number}", text[first : first + length], max_tokens, sampling)

        lasting = (self.long_tokens, self.long_tokens)
        return (
            [request("long", self.long_prompts, lasting, i) for i in range(self.long_requests)],
            [request("crowd", self.crowd_prompts, self.crowd_tokens, i) for i in range(self.crowd)],
        )

    def config(self, residency: Residency) -> DeploymentConfig:
        """The deployment, in which the whole load would not be resident."""
        return DeploymentConfig(
            model=MODEL,
            residency=residency,
            page_tokens=PAGE_TOKENS,
            hot_tokens=HOT_TOKENS,
            device_pages=self.device_pages,
            max_sessions=self.long_requests + self.crowd,
            max_model_len=4096,
        )


def held_out_tokens() -> Int32:
    """The source files that the tiny model was not trained on, one after another: int32 [tokens]."""
    tokenizer = Tokenizer.from_file(str(find_model(MODEL) / "tokenizer.json"))
    root = stdlib_root()
    texts = [read_text(root, file)[0] for file in scan(root) if file.role == "held_out"]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])


@dataclass(frozen=True, slots=True)
class Sample:
    """What a snapshot said, `seconds` after the first request was sent. Pages and sessions are those of then; rows,
    tokens and moved pages are counted from the start."""

    seconds: float
    pages: dict[str, int]
    reserve: int
    waiting: int
    importing: int
    decoding: int
    rows: dict[str, int]
    generated_tokens: int
    moved: dict[str, int]

    @classmethod
    def of(cls, seconds: float, snapshot: Snapshot) -> Sample:
        """A snapshot that was seen at a time."""
        rows, moved = snapshot.totals.rows, snapshot.moved
        return cls(
            seconds=seconds,
            pages=snapshot.pages,
            reserve=snapshot.reserve,
            waiting=snapshot.waiting,
            importing=snapshot.importing,
            decoding=snapshot.decoding,
            rows={source: getattr(rows, source) for source in ("direct", "hot", "host", "masked")},
            generated_tokens=snapshot.totals.generated_tokens,
            moved={kind: getattr(moved, kind) for kind in ("backed_up", "refilled", "reclaimed", "reclaims")},
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What one residency made of the load: samples in order, when each phase began, when the last one ended, and the
    tokens of every request."""

    residency: Residency
    samples: list[Sample]
    starts: dict[Phase, float]
    end: float
    tokens: dict[str, list[int]] = field(repr=False)

    def during(self, phase: Phase) -> list[Sample]:
        """The samples of a phase, none of which has anything of the phase before."""
        begins = sorted([*self.starts.values(), self.end])
        start = self.starts[phase]
        end = begins[begins.index(start) + 1]
        return [sample for sample in self.samples if start + STALE_SECONDS <= sample.seconds <= end]


class LoadStep:
    """Sends the requests of a shape to a runtime, from the scheduler's own thread: at the same step in every run."""

    def __init__(self, shape: Shape, runtime: Runtime) -> None:
        self._shape = shape
        self._scheduler = runtime.scheduler
        self._residency = runtime.deployment.config.residency
        self._long, crowd = shape.requests()
        self._to_come = crowd[::-1]
        self._left = len(crowd)
        self._tokens: dict[str, list[int]] = {request.id: [] for request in [*self._long, *crowd]}
        self._marks: dict[Phase, float] = {}
        self._unfinished = len(self._tokens)
        self._errors: list[Exception] = []
        self._over = threading.Event()

    def run(self, progress: Callable[[float], None]) -> Run:
        """Send everything, wait for the last token. `progress` is told the share of all tokens that are made.

        Raises:
            RequestError: a request failed.
            RuntimeError: the scheduler did.
        """
        total = sum(request.max_tokens for request in [*self._long, *self._to_come])
        samples: list[Sample] = []
        self._started = time.perf_counter()
        self._scheduler.start()
        for request in self._long:
            self._scheduler.submit(request, self._deliver)
        while not self._over.wait(SAMPLE_SECONDS):
            samples.append(Sample.of(self._seconds(), self._scheduler.snapshot()))
            progress(samples[-1].generated_tokens / total)
            if not self._scheduler.alive:
                raise RuntimeError(f"the scheduler has failed: {self._scheduler.failure}")
        end = self._seconds()
        self._scheduler.stop(drain_seconds=1)
        if self._errors:
            raise self._errors[0]
        return Run(self._residency, samples, self._marks, end, self._tokens)

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _deliver(self, output: Output) -> None:
        tokens = self._tokens[output.request_id]
        tokens += output.tokens
        if output.error is not None:
            self._errors.append(output.error)
            self._over.set()
        if output.request_id == self._long[0].id:
            self._send_what_is_due(len(tokens))
        if output.finish is not None:
            self._unfinished -= 1
            self._left -= output.request_id.startswith("crowd")
        self._mark()
        if not self._unfinished:
            self._over.set()

    def _send_what_is_due(self, now: int) -> None:
        due = (now - self._shape.first_arrival) // self._shape.arrival_every + 1
        while self._to_come and self._shape.crowd - len(self._to_come) < due:
            self._scheduler.submit(self._to_come.pop(), self._deliver)

    def _mark(self) -> None:
        """Note when a phase begins: the last that has begun is the one we are in."""
        begun = {
            Phase.LOW: all(self._tokens[request.id] for request in self._long),
            Phase.HIGH: len(self._to_come) < self._shape.crowd,
            Phase.DRAINING: not self._to_come and all(self._tokens.values()),
            Phase.LOW_AGAIN: self._left == 0,
        }
        for phase, has_begun in begun.items():
            if has_begun and phase not in self._marks:
                self._marks[phase] = self._seconds()


def run_load(shape: Shape, residency: Residency, progress: Callable[[float], None]) -> Run:
    """The load in a runtime of its own.

    Raises:
        RequestError: a request failed.
        RuntimeError: the scheduler did.
    """
    runtime = build_runtime(shape.config(residency))
    try:
        return LoadStep(shape, runtime).run(progress)
    finally:
        runtime.close()
