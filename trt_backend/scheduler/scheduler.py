"""The scheduler's loop: admissions, steps, tokens and endings, all on one thread."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from trt_backend.engines.base import Engine, StepResult
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.transfers import PassedFence
from trt_backend.request import Deliver, ErrorCode, FinishReason, Output, Request, RequestError, RowCounts
from trt_backend.scheduler.intake import Cancel, Intake, SchedulerLimits, Waiting
from trt_backend.scheduler.planning import Running, Step, plan_step
from trt_backend.scheduler.sampling import choose

log = logging.getLogger(__name__)
FENCE_WAIT_SECONDS = 0.0005
"""How long the thread sleeps when all it can do is to ask fences again."""
TRANSFER_PATIENCE_SECONDS = 5.0
"""How long past the end of its drain time a stopping scheduler waits for copies under way."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after a tick, for metrics. Sessions and pages are counted now; rows, tokens and steps are totals."""

    waiting: int = 0
    importing: int = 0
    decoding: int = 0
    pages: dict[str, int] = field(default_factory=dict)
    host_pages_used: int = 0
    host_pages: int = 0
    backed_up_pages: int = 0
    rows: RowCounts = field(default_factory=RowCounts)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class Scheduler:
    """Takes requests from any thread; everything else happens on its own thread.

    Every request that `submit` accepts gets exactly one Output with `finish` set, whatever happens.
    """

    def __init__(self, hierarchy: Hierarchy, engine: Engine, limits: SchedulerLimits) -> None:
        self.failure: str | None = None
        self._limits = limits
        self._hierarchy = hierarchy
        self._engine = engine
        self._intake = Intake(limits, engine.vocab_size, hierarchy.refusal)
        self._stop_at: float | None = None
        self._waiting: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._totals = Snapshot()
        self._snapshot = Snapshot()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # --- any thread ---

    @property
    def alive(self) -> bool:
        """Whether the scheduler thread runs and can serve."""
        return self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        """Start the thread.

        What is loaded by now stays until `stop`, so the garbage collector is kept from walking it again and again:
        that was 8% of a small model's decoding.
        """
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
        self._intake.cancel(request_id)

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
        """One round: fences, admissions, a step, messages. False when stopped and nobody is left."""
        self._hierarchy.poll()
        self._admit()
        step = plan_step(self._running, self._hierarchy, self._limits.prefill_chunk_tokens)
        if step is not None:
            self._take_step(step)
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
                self._waiting.append(message)
            else:
                self._cancel(message)

    def _admit(self) -> None:
        """First come, first served: nobody overtakes a request that waits for memory."""
        while self._waiting:
            request = self._waiting[0].request
            session = self._hierarchy.admit(len(request.prompt), request.max_length)
            if session is None:
                return
            head = self._waiting.popleft()
            self._intake.dequeued()
            head.times.admitted_ns = time.monotonic_ns()
            self._engine.open_slot(session.slot)
            self._running.append(Running(head.request, head.deliver, session, head.times))

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
        self._totals = replace(
            self._totals,
            steps=self._totals.steps + 1,
            step_seconds=self._totals.step_seconds + time.perf_counter() - started,
        )

    def _apply(self, step: Step, result: StepResult) -> None:
        """Advance the sessions, count their rows, choose and deliver their tokens."""
        for part in step.parts:
            self._hierarchy.wrote(part.running.session, part.count, PassedFence())
        decodes = step.batch.decodes
        for part, counts in zip(step.parts[:decodes], result.counts.tolist(), strict=True):
            rows = RowCounts(*counts)
            part.running.rows.add(rows)
            self._totals.rows.add(rows)
        yielding = [part.running for part in step.parts if part.yields_token]
        tokens = choose(result.logits, [r.request.sampling for r in yielding], [r.session.length for r in yielding])
        sound = np.isfinite(result.logits).all(axis=1)
        for running, token, finite in zip(yielding, tokens, sound, strict=True):
            self._emit(running, token, bool(finite))
        self._totals = replace(
            self._totals,
            generated_tokens=self._totals.generated_tokens + len(tokens),
            prompt_tokens=self._totals.prompt_tokens + sum(part.count for part in step.parts[decodes:]),
        )

    def _emit(self, running: Running, token: int, finite: bool) -> None:
        """Deliver a request's next token, unless what it was made from is not to be trusted."""
        if running.rows.masked:
            self._fail(running, f"{running.rows.masked} selected rows were neither on the device nor on the host")
            return
        if not finite:
            self._fail(running, f"the model gave logits that are not finite at position {running.session.length}")
            return
        now = time.monotonic_ns()
        running.times.first_token_ns = running.times.first_token_ns or now
        running.times.last_token_ns = now
        running.generated += 1
        running.pending = token
        if token in running.request.end_ids:
            self._finish(running, FinishReason.STOP, tokens=(token,))
        elif running.generated == running.request.max_tokens:
            self._finish(running, FinishReason.LENGTH, tokens=(token,))
        else:
            running.deliver(Output(running.request.id, (token,)))

    # --- endings ---

    def _finish(
        self, running: Running, reason: FinishReason, error: RequestError | None = None, tokens: tuple[int, ...] = ()
    ) -> None:
        self._running.remove(running)
        self._hierarchy.end(running.session)
        self._intake.forget(running.request.id)
        running.deliver(Output(running.request.id, tokens, reason, error, running.rows, running.times))

    def _fail(self, running: Running, detail: str) -> None:
        self._finish(running, FinishReason.ERROR, RequestError(ErrorCode.INTERNAL, running.request.id, detail))

    def _drop(self, waiting: Waiting, error: RequestError) -> None:
        self._waiting.remove(waiting)
        self._intake.dequeued()
        self._intake.forget(waiting.request.id)
        waiting.deliver(Output(waiting.request.id, (), FinishReason.CANCELLED, error, times=waiting.times))

    def _cancel(self, cancel: Cancel) -> None:
        for running in self._running:
            if running.request.id == cancel.request_id:
                detail = f"cancelled after {running.generated} tokens"
                self._finish(
                    running,
                    FinishReason.CANCELLED,
                    RequestError(ErrorCode.CANCELLED, cancel.request_id, detail),
                )
                return
        for waiting in self._waiting:
            if waiting.request.id == cancel.request_id:
                error = RequestError(ErrorCode.CANCELLED, cancel.request_id, "cancelled while it waited")
                self._drop(waiting, error)
                return

    def _cancel_all(self, detail: str) -> None:
        for running in list(self._running):
            error = RequestError(ErrorCode.CANCELLED, running.request.id, detail)
            self._finish(running, FinishReason.CANCELLED, error)
        for waiting in list(self._waiting):
            self._drop(waiting, RequestError(ErrorCode.CANCELLED, waiting.request.id, detail))

    def _abandon(self, detail: str) -> None:
        """Tell everyone that it is over, without touching a state that can't be trusted any more."""
        everyone: list[Running | Waiting] = [*self._running, *self._waiting]
        for one in everyone:
            error = RequestError(ErrorCode.INTERNAL, one.request.id, detail)
            one.deliver(Output(one.request.id, (), FinishReason.ERROR, error, times=one.times))

    def _observe(self) -> Snapshot:
        pages = self._hierarchy.pages.budget
        importing = sum(running.session.importing for running in self._running)
        return replace(
            self._totals,
            waiting=len(self._waiting),
            importing=importing,
            decoding=len(self._running) - importing,
            pages={use.name.lower(): pages.counts[use] for use in Use},
            host_pages_used=self._hierarchy.host.used,
            host_pages=self._hierarchy.host.capacity,
            backed_up_pages=self._hierarchy.backed_up_pages,
            rows=replace(self._totals.rows),
        )
