"""A running deployment behind one door: requests with a sink in, text out. Used by model.py and by `generate`."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trt_backend.build import Deployment, Runtime, build_runtime
from trt_backend.config import DeploymentConfig
from trt_backend.request import ErrorCode, FinishReason, Output, RequestError
from trt_backend.scheduler import Snapshot
from trt_backend.triton.canary import CANARY_ID
from trt_backend.triton.inputs import Fields
from trt_backend.triton.outputs import Ended
from trt_backend.triton.parse import Limits, Shape, make_request
from trt_backend.triton.stall import StallWatch
from trt_backend.triton.stream import Sink, Streamer
from trt_backend.triton.text import Tokenizer, read_end_ids
from trt_backend.triton.watch import Watch

log = logging.getLogger(__name__)
CANCEL_POLL_SECONDS = 0.05
METRICS_SECONDS = 0.5
STALL_POLL_SECONDS = 1.0
SENDING_SECONDS = 0.002
"""So long a step waits at most for what earlier ones have made to be sent,"""
SENDING_POLL_SECONDS = 0.00005
"""and looks so often."""
STREAMERS = 16
"""Threads that send responses, each request on one of them. A send waits for the server process most of its time:
with 64 streams, four threads sent about twice as much as one, and sixteen more than four."""

Build = Callable[[DeploymentConfig, Callable[[str], None]], Runtime]


class Metrics(Protocol):
    """Where a service's numbers are shown. Called from one thread."""

    def publish(self, snapshot: Snapshot, ended: Sequence[Ended]) -> None:
        """Show the scheduler's state and totals, and count the requests that have ended since the last call."""


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not had its last response. Several may come with one client id."""

    client_id: str
    sink: Sink


class Service:
    """A loaded model that serves. `stop` ends it for good.

    Raises:
        ConfigError: from the constructor, when a setting, the tokenizer or the checkpoint can't be used.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        progress: Callable[[str], None] = lambda _: None,
        metrics: Metrics | None = None,
        on_end: Callable[[Ended], None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
        build: Build = build_runtime,
    ) -> None:
        deployment = Deployment.of(config)
        self._tokenizer = Tokenizer.load(deployment.folder, deployment.model.vocab_size)
        self._limits = Limits(
            max_model_len=deployment.max_model_len,
            vocab_size=deployment.model.vocab_size,
            end_ids=read_end_ids(deployment.folder, deployment.model.end_ids),
            default_max_tokens=config.default_max_tokens,
            exclude_input_in_output=config.exclude_input_in_output,
        )
        self._runtime = build(config, progress)
        self._scheduler = self._runtime.scheduler
        self._metrics = metrics
        self._on_end, self._on_failure = on_end, on_failure
        self._failure_told = False
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._numbers = itertools.count(1)
        self._unpublished: list[Ended] = []
        self._news = threading.Event()
        self._streamers = [
            Streamer(self._tokenizer, self._release, self._ended, self._scheduler) for _ in range(STREAMERS)
        ]
        scheduler = self._scheduler
        stall = StallWatch(lambda: scheduler.steps, lambda: scheduler.load, config.stall_seconds, self._stalled)
        self._watch = Watch(
            {self._poll_cancelled: CANCEL_POLL_SECONDS, self._publish: METRICS_SECONDS, stall.look: STALL_POLL_SECONDS}
        )

    def start(self) -> None:
        """Start serving."""
        self._scheduler.start(self._let_send)
        for streamer in self._streamers:
            streamer.start()
        self._watch.start()

    def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for `drain_seconds`, cancel the rest, end all threads."""
        log.info("stopping; %d requests are live", len(self._live))
        self._scheduler.stop(drain_seconds)
        for streamer in self._streamers:
            streamer.stop()
        self._watch.stop()
        self._runtime.close()
        log.info("stopped")

    def submit(self, client_id: str, read: Callable[[str], Fields], sink: Sink) -> None:
        """Serve one request; its answer, even a refusal, comes through `sink`. Any thread; does not block.

        `read` gives the client's inputs, or raises RequestError; it gets the id under which the request is known:
        the client's own, unless that is empty or in use.
        """
        request_id = self._register(client_id, sink)
        streamer = self._streamers[hash(request_id) % STREAMERS]
        shape = None
        try:
            fields = read(request_id)
            if fields.cancel:
                self._stop(client_id, request_id, sink)
                return
            request, shape = make_request(request_id, fields, self._tokenizer, self._limits)
            streamer.open(request_id, sink, shape)
            self._scheduler.submit(request, streamer.deliver)
        except RequestError as error:
            # Without its traceback, which would keep the client's request alive until the last response is gone.
            again = RequestError(error.code, request_id, error.detail, error.retry_after_ms)
            self._refuse(streamer, sink, shape, again)
        except Exception as error:
            log.exception("request %s could not be taken", request_id)
            detail = f"{type(error).__name__}: {error}"
            self._refuse(streamer, sink, shape, RequestError(ErrorCode.INTERNAL, request_id, detail))

    @staticmethod
    def _refuse(streamer: Streamer, sink: Sink, shape: Shape | None, error: RequestError) -> None:
        if shape is None:
            streamer.open(error.request_id, sink, Shape(frozenset()))
        streamer.deliver(Output(error.request_id, finish=FinishReason.ERROR, error=error))

    def cancel_all(self) -> None:
        """Cancel whatever runs."""
        with self._lock:
            for request_id in self._live:
                self._scheduler.cancel(request_id)

    def _stop(self, client_id: str, request_id: str, sink: Sink) -> None:
        """Cancel the requests that came with a client's id; the wish itself is answered at once, with nothing."""
        with self._lock:
            del self._live[request_id]
            named = [other for other, live in self._live.items() if live.client_id == client_id and client_id]
        for other in named:
            self._scheduler.cancel(other)
        if client_id:
            sink.send({"text_output": np.array([b""], dtype=np.object_)}, final=True)
        else:
            detail = "stop needs the id of the request that it is to stop"
            sink.fail(RequestError(ErrorCode.INVALID_ARGUMENT, request_id, detail))

    def _register(self, client_id: str, sink: Sink) -> str:
        """Clients choose ids as they like; ours are unique among the requests that live."""
        with self._lock:
            request_id = client_id
            while not request_id or request_id in self._live:
                request_id = f"{client_id or 'request'}#{next(self._numbers)}"
            self._live[request_id] = _Live(client_id, sink)
            return request_id

    def _let_send(self, running: int) -> None:
        """Wait until what one step has made is all that waits to be sent. Runs on the scheduler's thread after a step.

        A scheduler with a very fast engine would otherwise keep the interpreter from the threads that send, and its
        tokens would wait in their queues.
        """
        until = time.monotonic() + SENDING_SECONDS
        while sum(streamer.backlog for streamer in self._streamers) > running and time.monotonic() < until:
            time.sleep(SENDING_POLL_SECONDS)

    def _stalled(self, message: str) -> None:
        self._on_failure(f"{message}: {self._scheduler.describe()}")

    def _release(self, request_id: str) -> None:
        """A request's last response is about to go: whoever gets it may use the id again at once."""
        with self._lock:
            del self._live[request_id]

    def _ended(self, ended: Ended) -> None:
        if ended.request_id.partition("#")[0] != CANARY_ID:  # canaries are served like others and counted nowhere
            with self._lock:
                self._unpublished.append(ended)
        self._news.set()
        self._on_end(ended)

    def _poll_cancelled(self) -> None:
        """Cancel requests whose clients have given up; then show the numbers if a request has ended."""
        with self._lock:
            polled = list(self._live.items())
        for request_id, live in polled:
            if live.sink.is_cancelled():
                with self._lock:
                    # Its id may belong to a newer request by now.
                    if self._live.get(request_id) is live:
                        self._scheduler.cancel(request_id)
        if self._news.is_set():
            self._publish()

    def _publish(self) -> None:
        self._news.clear()
        failure = self._scheduler.failure
        if failure is not None and not self._failure_told:
            self._failure_told = True
            self._on_failure(f"the scheduler has failed: {failure}")
        with self._lock:
            ended, self._unpublished = self._unpublished, []
        for one in ended:
            log.info("ended: %s", one.error or one.finish.value, extra=measures(one))
        if self._metrics is not None:
            self._metrics.publish(self._scheduler.snapshot(), ended)


def measures(ended: Ended) -> dict[str, object]:
    """A request's line in the log, as fields. Times in milliseconds, from its arrival."""
    times = ended.times
    stations = {"queue_ms": times.admitted_ns, "ttft_ms": times.first_token_ns, "e2e_ms": times.last_token_ns}
    return {
        "request_id": ended.request_id,
        "prompt_tokens": ended.prompt_tokens,
        "generated": ended.generated,
        **{name: round((ns - times.arrival_ns) / 1e6, 1) for name, ns in stations.items() if ns},
    }
