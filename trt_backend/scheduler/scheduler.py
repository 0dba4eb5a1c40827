"""The scheduler's loop: admissions, steps, tokens and endings, all on one thread."""

from __future__ import annotations

import gc
import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trt_backend.engines.base import Engine, StepResult
from trt_backend.kv.books import Moved
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.transfers import PassedFence
from trt_backend.request import (
    Deliver,
    ErrorCode,
    FinishReason,
    Output,
    Request,
    RequestError,
    RowCounts,
    TokenLogprob,
)
from trt_backend.scheduler.intake import End, Intake, SchedulerLimits, Waiting
from trt_backend.scheduler.planning import Part, Running, Step, plan_step
from trt_backend.scheduler.queue import WaitingQueue
from trt_backend.scheduler.sampling import Choice, Sampler, prompt_logprobs

log = logging.getLogger(__name__)
FENCE_WAIT_SECONDS = 0.0005
"""How long the thread sleeps when all it can do is to ask fences again."""
TRANSFER_PATIENCE_SECONDS = 5.0
"""How long past the end of its drain time a stopping scheduler waits for copies under way."""
OBSERVE_SECONDS = 0.02
"""A busy scheduler renews its snapshot this often; one that has nothing to do, each time."""


@dataclass(slots=True)
class Totals:
    """What has been done since the start."""

    rows: RowCounts = field(default_factory=RowCounts)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    admitted: int = 0
    overtakes: int = 0
    steps: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after a tick, for metrics: sessions and pages as they are now, and what has been done and moved.

    `reserve` is kept for admissions, of the free pages; `copying` are the pages of copies under way.
    """

    waiting: int = 0
    importing: int = 0
    decoding: int = 0
    slots: int = 0
    pages: dict[str, int] = field(default_factory=dict)
    page_tokens: int = 0
    host_pages_used: int = 0
    host_pages: int = 0
    reserve: int = 0
    copying: int = 0
    totals: Totals = field(default_factory=Totals)
    moved: Moved = field(default_factory=Moved)


class Scheduler:
    """Takes requests from any thread; everything else happens on its own thread.

    Every request that `submit` accepts gets exactly one Output with `finish` set, whatever happens.
    """

    def __init__(self, hierarchy: Hierarchy, engine: Engine, limits: SchedulerLimits) -> None:
        self.failure: str | None = None
        self._after_step: Callable[[int], None] = lambda _: None
        self._limits = limits
        self._hierarchy = hierarchy
        self._engine = engine
        self._intake = Intake(limits, engine.vocab_size, hierarchy.refusal)
        self._stop_at: float | None = None
        self._waiting = WaitingQueue()
        self._running: list[Running] = []
        self._deadlines: list[tuple[int, str]] = []
        self._totals = Totals()
        self._snapshot = Snapshot()
        self._observed_at = 0.0
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # --- any thread ---

    @property
    def alive(self) -> bool:
        """Whether the scheduler thread runs and can serve."""
        return self._thread.is_alive() and self.failure is None

    def start(self, after_step: Callable[[int], None] = lambda _: None) -> None:
        """Start the thread. It calls `after_step` after each step, with the number of running requests.

        What is loaded by now stays until `stop`, so the garbage collector is kept from walking it again and again:
        that was 8% of a small model's decoding.
        """
        self._after_step = after_step
        gc.collect()
        gc.freeze()
        self._snapshot = self._observe()
        self._thread.start()

    def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, go on with the others for up to `drain_seconds`, cancel the rest, end the thread."""
        self._stop_at = time.monotonic() + drain_seconds
        self._intake.close(ErrorCode.OVERLOADED, "the server is stopping")
        self._thread.join()
        gc.unfreeze()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. `deliver` must not raise and not block.

        Raises:
            RequestError: INVALID_ARGUMENT when the request can never be served here or its id is in use, OVERLOADED
                when the queue is full or the server stops, INTERNAL when the scheduler has failed.
        """
        self._intake.submit(request, deliver)

    def cancel(self, request_id: str) -> None:
        """End a request, wherever it is, with finish reason "cancelled". Unknown ids are ignored."""
        self._intake.end(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: str) -> None:
        """End a request whose reader has all it wants, with finish reason "stop". Unknown ids are ignored."""
        self._intake.end(request_id, FinishReason.STOP)

    @property
    def steps(self) -> int:
        """Steps since the start."""
        return self._totals.steps

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run and wait."""
        return len(self._running), len(self._waiting)

    def describe(self) -> str:
        """What everybody waits for, in words: for whoever finds that nothing moves. An instant's view of another
        thread's state, which may be in motion."""
        waits = [(one.request.id, self._hierarchy.waits(one.session)) for one in list(self._running)]
        lines = [f"{request_id} waits {reason}" for request_id, reason in waits if reason]
        head = self._waiting.head()
        if head is not None:
            request = head.request
            shortage = self._hierarchy.shortage(len(request.prompt), request.max_length)
            lines.append(f"{request.id} is next in the queue and waits {shortage}")
        return "; ".join(lines) or "nobody waits for memory"

    def snapshot(self) -> Snapshot:
        """The state after the latest tick."""
        return self._snapshot

    # --- the scheduler thread ---

    def _run(self) -> None:
        try:
            while self._tick():
                pass
        except Exception as error:
            log.exception("the scheduler failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._intake.close(ErrorCode.INTERNAL, f"the scheduler has failed: {self.failure}")
            self._receive(timeout=0)
            self._abandon(f"the scheduler has failed: {self.failure}")

    def _tick(self) -> bool:
        """One round: fences, deadlines, admissions, spare memory, a step, messages. False when it is to end."""
        self._hierarchy.contend(len(self._waiting) > 0)
        self._hierarchy.poll()
        self._give_up_failed()
        self._give_up_late()
        self._admit()
        self._hierarchy.tend()
        step = plan_step(self._running, self._hierarchy, self._limits.prefill_chunk_tokens)
        if step is not None:
            self._take_step(step)
            self._after_step(len(self._running))
        if step is None or time.monotonic() - self._observed_at > OBSERVE_SECONDS:
            self._snapshot = self._observe()
        self._receive(self._patience(idle=step is None))
        return not self._stopped()

    def _stopped(self) -> bool:
        """Whether the thread may end: told to, nobody is left, and every page is back (or its copy hangs)."""
        if self._stop_at is None:
            return False
        late = time.monotonic() - self._stop_at
        if late >= 0:
            self._cancel_all("the server is stopping")
        if self._running or self._waiting or not self._intake.empty:
            return False
        return not self._hierarchy.busy or late >= TRANSFER_PATIENCE_SECONDS

    def _patience(self, idle: bool) -> float | None:
        """How long to wait for a message: not at all while there is work, for ever when nothing is under way."""
        if not idle:
            return 0
        quiet = not (self._running or self._waiting or self._hierarchy.busy)
        return None if quiet and self._stop_at is None else FENCE_WAIT_SECONDS

    def _receive(self, timeout: float | None) -> None:
        for message in self._intake.receive(timeout):
            if isinstance(message, Waiting):
                self._waiting.push(message)
                deadline = _deadline_of(message)
                if deadline is not None:
                    heapq.heappush(self._deadlines, (deadline, message.request.id))
            else:
                self._end(message)

    def _admit(self) -> None:
        """Admit in the queue's order: nobody overtakes a request that is next and waits for memory."""
        while (head := self._waiting.head()) is not None:
            request = head.request
            session = self._hierarchy.admit(len(request.prompt), request.max_length)
            if session is None:
                return
            self._waiting.pop(head)
            self._intake.dequeued()
            head.times.admitted_ns = time.monotonic_ns()
            self._totals.admitted += 1
            self._engine.open_slot(session.slot)
            sampler = Sampler(request, self._engine.vocab_size)
            self._running.append(Running(request, head.deliver, session, head.times, sampler))

    def _take_step(self, step: Step) -> None:
        started = time.perf_counter()
        try:
            result = self._engine.step(step.batch)
        except Exception as error:
            log.exception("a step of %d tokens failed", len(step.batch.tokens))
            for part in step.parts:
                self._fail(part.running, f"the step failed: {type(error).__name__}: {error}")
            return
        self._apply(step, result)
        self._totals.steps += 1
        self._totals.step_seconds += time.perf_counter() - started

    def _apply(self, step: Step, result: StepResult) -> None:
        """Advance the sessions, count their rows, choose and deliver their tokens."""
        self._hierarchy.wrote(step.slots, step.counts, PassedFence())
        decodes = step.batch.decodes
        self._hierarchy.note_hits(step.slots[:decodes], result.counts[:, 0])
        for part, counts in zip(step.parts[:decodes], result.counts.tolist(), strict=True):
            found = RowCounts(*counts)
            part.running.rows.add(found)
            self._totals.rows.add(found)
        self._totals.prompt_tokens += sum(part.count for part in step.parts[decodes:])
        ends = np.cumsum([part.logits for part in step.parts])
        for part, end in zip(step.parts, ends, strict=True):
            if part.scored:
                self._score(part, result.logits[end - part.logits : end][: part.scored])
        yielding = [
            (part.running, int(end) - 1) for part, end in zip(step.parts, ends, strict=True) if part.yields_token
        ]
        rows = [row for _, row in yielding]
        logits = result.logits if len(rows) == len(result.logits) else result.logits[rows]
        self._choose(logits, [running for running, _ in yielding])
        for part in step.parts[decodes:]:
            if part.running.request.max_tokens == 0 and not part.running.session.importing:
                self._finish(part.running, FinishReason.LENGTH)

    @staticmethod
    def _score(part: Part, logits: npt.NDArray[np.float32]) -> None:
        """Keep the log-probabilities of the prompt tokens after the part's scored ones, whose rows are written."""
        running = part.running
        first = running.session.length - part.count + 1
        running.scores.append(prompt_logprobs(logits, running.request.prompt[first : first + part.scored]))

    def _choose(self, logits: npt.NDArray[np.float32], yielding: list[Running]) -> None:
        """Choose each request's next token. What it is made from must be sound, or the request fails, alone."""
        best = logits.argmax(axis=1).tolist()
        finite = np.isfinite(logits).all(axis=1).tolist()
        for row, running in enumerate(yielding):
            position = running.session.length
            if running.rows.masked:
                detail = f"{running.rows.masked} selected rows were neither on the device nor on the host"
                self._fail(running, detail)
            elif not finite[row]:
                self._fail(running, f"the model gave logits that are not finite at position {position}")
            elif running.sampler.plain:
                self._emit(running, Choice(best[row], None))
            else:
                try:
                    choice = running.sampler.choose(logits[row], position)
                except ValueError as error:  # nothing is left that it may choose
                    self._fail(running, str(error))
                else:
                    self._emit(running, choice)

    def _emit(self, running: Running, choice: Choice) -> None:
        """Make a token part of the answer and deliver it."""
        now = time.monotonic_ns()
        running.times.first_token_ns = running.times.first_token_ns or now
        running.times.last_token_ns = now
        running.pending = choice.token
        running.sampler.accept(choice.token)
        self._totals.generated_tokens += 1
        logprobs = (choice.logprob,) if choice.logprob is not None else ()
        if running.sampler.stopped():
            self._finish(running, FinishReason.STOP, tokens=(choice.token,), logprobs=logprobs)
        elif running.sampler.generated == running.request.max_tokens:
            self._finish(running, FinishReason.LENGTH, tokens=(choice.token,), logprobs=logprobs)
        else:
            scores = self._take_scores(running)
            running.deliver(Output(running.request.id, (choice.token,), logprobs=logprobs, prompt_logprobs=scores))

    @staticmethod
    def _take_scores(running: Running) -> npt.NDArray[np.float32] | None:
        """The prompt's log-probabilities, once."""
        if not running.request.score_prompt or running.session.importing or running.scores_told:
            return None
        running.scores_told = True
        scores: npt.NDArray[np.float32] = np.concatenate([np.empty(0, np.float32), *running.scores])
        return scores

    # --- endings ---

    def _finish(
        self,
        running: Running,
        reason: FinishReason,
        error: RequestError | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        self._running.remove(running)
        self._observed_at = 0.0  # who is told of the end may look at the numbers next
        self._hierarchy.end(running.session)
        self._intake.forget(running.request.id)
        running.deliver(
            Output(
                running.request.id,
                tokens,
                reason,
                error,
                rows=running.rows,
                times=running.times,
                device_pages=running.session.need.device,
                logprobs=logprobs,
                prompt_logprobs=self._take_scores(running),
            )
        )

    def _fail(self, running: Running, detail: str) -> None:
        self._finish(running, FinishReason.ERROR, RequestError(ErrorCode.INTERNAL, running.request.id, detail))

    def _drop(self, waiting: Waiting, error: RequestError | None, reason: FinishReason) -> None:
        self._waiting.remove(waiting)
        self._intake.dequeued()
        self._intake.forget(waiting.request.id)
        waiting.deliver(Output(waiting.request.id, (), reason, error, times=waiting.times))

    def _end(self, end: End) -> None:
        """End a request for its reader; "stop" is a good end, anything else an error."""
        one = self._find(end.request_id)
        if isinstance(one, Running):
            detail = f"cancelled after {one.sampler.generated} tokens"
        else:
            detail = "cancelled while it waited"
        if one is not None:
            good = end.reason is FinishReason.STOP
            self._close(one, None if good else RequestError(ErrorCode.CANCELLED, end.request_id, detail), end.reason)

    def _find(self, request_id: str) -> Running | Waiting | None:
        for running in self._running:
            if running.request.id == request_id:
                return running
        return next((waiting for waiting in self._waiting if waiting.request.id == request_id), None)

    def _close(self, one: Running | Waiting, error: RequestError | None, reason: FinishReason) -> None:
        if isinstance(one, Running):
            self._finish(one, reason, error)
        else:
            self._drop(one, error, reason)

    def _give_up_failed(self) -> None:
        """End the requests whose rows could not be moved, or are not moved in time."""
        self._hierarchy.give_up_copies(self._limits.transfer_timeout_seconds)
        for session, reason in self._hierarchy.take_failed():
            self._fail(next(running for running in self._running if running.session is session), reason)

    def _give_up_late(self) -> None:
        """End the requests whose deadline has passed, wherever they are."""
        now = time.monotonic_ns()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_ns, request_id = heapq.heappop(self._deadlines)
            one = self._find(request_id)
            if one is None or _deadline_of(one) != deadline_ns:
                continue  # it ended in time; its id may be another's by now
            if isinstance(one, Running):
                done = f"{one.sampler.generated} tokens made"
            else:
                done = f"still waiting, one of {len(self._waiting)}{self._intake.predicted_wait(len(self._waiting))}"
            detail = f"deadline_ms={one.request.deadline_ms} has passed: {done}"
            self._close(one, RequestError(ErrorCode.DEADLINE_EXCEEDED, request_id, detail), FinishReason.CANCELLED)

    def _cancel_all(self, detail: str) -> None:
        for one in [*self._running, *self._waiting]:
            self._close(one, RequestError(ErrorCode.CANCELLED, one.request.id, detail), FinishReason.CANCELLED)

    def _abandon(self, detail: str) -> None:
        """Tell everyone that it is over, without touching a state that can't be trusted any more."""
        everyone: list[Running | Waiting] = [*self._running, *self._waiting]
        for one in everyone:
            error = RequestError(ErrorCode.INTERNAL, one.request.id, detail)
            one.deliver(Output(one.request.id, (), FinishReason.ERROR, error, times=one.times))

    def _observe(self) -> Snapshot:
        self._observed_at = time.monotonic()
        hierarchy = self._hierarchy
        importing = sum(running.session.importing for running in self._running)
        self._totals.overtakes = self._waiting.overtakes
        return Snapshot(
            waiting=len(self._waiting),
            importing=importing,
            decoding=len(self._running) - importing,
            slots=hierarchy.sizes.slots,
            pages={use.name.lower(): hierarchy.pages.budget.counts[use] for use in Use},
            page_tokens=hierarchy.layout.page_tokens,
            host_pages_used=hierarchy.host.used,
            host_pages=hierarchy.host.capacity,
            copying=hierarchy.copying,
            reserve=hierarchy.tuning.reserve_pages,
            totals=replace(self._totals, rows=replace(self._totals.rows)),
            moved=replace(hierarchy.moved),
        )


def _deadline_of(one: Running | Waiting) -> int | None:
    """When it is given up, in `time.monotonic_ns()`; None: never."""
    allowed_ms = one.request.deadline_ms
    return None if allowed_ms is None else one.times.arrival_ns + allowed_ms * 1_000_000
