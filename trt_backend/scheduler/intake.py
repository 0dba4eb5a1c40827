"""The scheduler's door: requests and cancellations come in from any thread, bounded and in order."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trt_backend.request import (
    PRIORITIES,
    Deliver,
    ErrorCode,
    FinishReason,
    Request,
    RequestError,
    RequestTimes,
)

DEPARTURES = 32
"""The rate at which the queue moves is taken from so many of the latest departures,"""
DEPARTURE_SECONDS = 30.0
"""that are not older than this."""
LONGEST_RETRY_MS = 5000
"""`retry_after_ms` where nothing is known, and at most."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`queue_limit` requests may wait; a step takes up to `prefill_chunk_tokens` tokens of prompts; a request may
    become `max_model_len` tokens long; one whose rows have not been copied in `transfer_timeout_seconds` fails."""

    queue_limit: int
    prefill_chunk_tokens: int
    max_model_len: int
    transfer_timeout_seconds: float = 30.0


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that has been accepted and has no session yet. `overtaken`: by so many that came later."""

    request: Request
    deliver: Deliver
    times: RequestTimes
    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The wish to end a request, wherever it is: given up (CANCELLED), or its reader has all it wants (STOP)."""

    request_id: str
    reason: FinishReason


Message = Waiting | End


class Intake:
    """A queue of messages, and what has to be known about it before the scheduler thread looks.

    `refusal(prompt_tokens, max_length)` says why a request could never be admitted, or None; it must be safe to call
    from any thread.
    """

    def __init__(self, limits: SchedulerLimits, vocab_size: int, refusal: Callable[[int, int], str | None]) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._refusal = refusal
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: set[str] = set()
        self._queued = 0
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._closed: RequestError | None = None

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Accept a request, or raise RequestError; see `Scheduler.submit`."""
        fault = self._fault(request)
        if fault is not None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, request.id, fault)
        message = Waiting(request, deliver, RequestTimes(request.arrival_ns or time.monotonic_ns()))
        with self._lock:
            self._reserve(request.id)
            self._messages.put(message)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """Pass on that a request shall end."""
        self._messages.put(End(request_id, reason))

    def close(self, code: ErrorCode, reason: str) -> None:
        """Accept nothing more, with this answer; the first one given stays. Wakes the scheduler."""
        with self._lock:
            self._closed = self._closed or RequestError(code, "", reason)
        self._messages.put(None)

    @property
    def empty(self) -> bool:
        """Whether no message waits."""
        return self._messages.empty()

    def receive(self, timeout: float | None) -> list[Message]:
        """All messages that are here, in order; if none is, wait for one up to `timeout` seconds (None: for ever)."""
        messages: list[Message | None] = []
        try:
            messages.append(self._messages.get(timeout=timeout) if timeout != 0 else self._messages.get_nowait())
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            pass
        return [message for message in messages if message is not None]

    def dequeued(self) -> None:
        """A request has left the queue."""
        with self._lock:
            self._queued -= 1
            self._departures.append(time.monotonic())

    def forget(self, request_id: str) -> None:
        """A request is over; its id may be used again."""
        with self._lock:
            self._live.discard(request_id)

    def _reserve(self, request_id: str) -> None:
        if self._closed is not None:
            raise RequestError(self._closed.code, request_id, self._closed.detail)
        if request_id in self._live:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, request_id, "this request id is already in use")
        if self._queued >= self._limits.queue_limit:
            raise RequestError(
                ErrorCode.OVERLOADED,
                request_id,
                f"{self._queued} requests wait already; this deployment queues {self._limits.queue_limit} "
                f"(queue_limit){self.predicted_wait(self._queued)}",
                retry_after_ms=self._retry_after_ms(),
            )
        self._live.add(request_id)
        self._queued += 1

    def predicted_wait(self, ahead: int) -> str:
        """How long the queue takes for `ahead` requests at its pace of late, in words; nothing if it has none."""
        pace = self._pace_ms()
        return "" if pace is None else f"; at its pace of late that takes {pace * ahead:.0f} ms"

    def _retry_after_ms(self) -> int:
        """When the queue will have a place, if requests go on leaving it as they did lately."""
        pace = self._pace_ms()
        return LONGEST_RETRY_MS if pace is None else min(LONGEST_RETRY_MS, max(1, round(pace)))

    def _pace_ms(self) -> float | None:
        """Milliseconds between departures from the queue, lately; None when there were too few."""
        gone = [now for now in list(self._departures) if now > time.monotonic() - DEPARTURE_SECONDS]
        return 1000 * (gone[-1] - gone[0]) / (len(gone) - 1) if len(gone) > 1 else None

    def _fault(self, request: Request) -> str | None:
        tokens = len(request.prompt)
        if tokens == 0:
            return "the prompt is empty; it must have at least 1 token"
        least = 0 if request.score_prompt else 1
        if request.max_tokens < least:
            return f"max_tokens={request.max_tokens} must be at least {least}"
        if request.priority not in PRIORITIES:
            return f"priority={request.priority} is not legal; legal range: {PRIORITIES[0]} to {PRIORITIES[-1]}"
        if request.prompt.min() < 0 or request.prompt.max() >= self._vocab_size:
            return f"the prompt has token ids outside the vocabulary, 0 to {self._vocab_size - 1}"
        if request.max_length > self._limits.max_model_len:
            return (
                f"max_tokens={request.max_tokens} with a {tokens}-token prompt needs {request.max_length} positions; "
                f"this deployment holds {self._limits.max_model_len} (max_model_len)"
            )
        return self._refusal(tokens, request.max_length)
