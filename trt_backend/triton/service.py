"""A running deployment behind one door: requests with a sink in, text out. Used by model.py and by `generate`."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from trt_backend.build import Deployment, build_runtime
from trt_backend.config import DeploymentConfig
from trt_backend.request import ErrorCode, FinishReason, Output, RequestError
from trt_backend.scheduler import Snapshot
from trt_backend.triton.parse import Fields, make_request
from trt_backend.triton.stream import Ended, Sink, Streamer
from trt_backend.triton.text import Tokenizer, read_end_ids
from trt_backend.triton.watch import Watch

log = logging.getLogger(__name__)
CANCEL_POLL_SECONDS = 0.05
METRICS_SECONDS = 0.5


class Gauges(Protocol):
    """Where a service's numbers are shown."""

    def publish(self, snapshot: Snapshot, outcomes: dict[str, int]) -> None:
        """Show the scheduler's state and totals, and how many requests ended in which way."""


class Service:
    """A loaded model that serves. `stop` ends it for good.

    Raises:
        ConfigError: from the constructor, when a setting, the tokenizer or the checkpoint can't be used.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        progress: Callable[[str], None] = lambda _: None,
        gauges: Gauges | None = None,
        on_end: Callable[[Ended], None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        deployment = Deployment.of(config)
        self._tokenizer = Tokenizer.load(deployment.folder, deployment.model.vocab_size)
        self._end_ids = read_end_ids(deployment.folder, deployment.model.end_ids)
        self._max_model_len = deployment.max_model_len
        self._runtime = build_runtime(config, progress)
        self._scheduler = self._runtime.scheduler
        self._gauges = gauges
        self._on_end, self._on_failure = on_end, on_failure
        self._failure_told = False
        self._lock = threading.Lock()
        self._sinks: dict[str, Sink] = {}
        self._numbers = itertools.count(1)
        self._outcomes: Counter[str] = Counter()
        self._news = threading.Event()
        self._streamer = Streamer(self._tokenizer, self._ended, self._scheduler.cancel)
        self._watch = Watch({self._poll_cancelled: CANCEL_POLL_SECONDS, self._publish: METRICS_SECONDS})

    def start(self) -> None:
        """Start serving."""
        self._scheduler.start()
        self._streamer.start()
        self._watch.start()

    def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for `drain_seconds`, cancel the rest, end all threads."""
        log.info("stopping; %d requests are live", len(self._sinks))
        self._scheduler.stop(drain_seconds)
        self._streamer.stop()
        self._watch.stop()
        self._runtime.close()
        log.info("stopped")

    def submit(self, client_id: str, read: Callable[[str], Fields], sink: Sink) -> None:
        """Serve one request; its answer, even a refusal, comes through `sink`. Any thread; does not block.

        `read` gives the client's inputs, or raises RequestError; it gets the id under which the request is known:
        the client's own, unless that is empty or in use.
        """
        request_id = self._register(client_id, sink)
        opened = False
        try:
            fields = read(request_id)
            request = make_request(request_id, fields, self._tokenizer, self._end_ids, self._max_model_len)
            self._streamer.open(request_id, sink, fields.stream, request.end_ids)
            opened = True
            self._scheduler.submit(request, self._streamer.deliver)
        except RequestError as error:
            # Without its traceback, which would keep the client's request alive until the last response is gone.
            self._refuse(request_id, sink, opened, RequestError(error.code, request_id, error.detail))
        except Exception as error:
            log.exception("request %s could not be taken", request_id)
            detail = f"{type(error).__name__}: {error}"
            self._refuse(request_id, sink, opened, RequestError(ErrorCode.INTERNAL, request_id, detail))

    def _refuse(self, request_id: str, sink: Sink, opened: bool, error: RequestError) -> None:
        if not opened:
            self._streamer.open(request_id, sink, in_pieces=False, end_ids=frozenset())
        self._streamer.deliver(Output(request_id, finish=FinishReason.ERROR, error=error))

    def cancel_all(self) -> None:
        """Cancel whatever runs."""
        with self._lock:
            for request_id in self._sinks:
                self._scheduler.cancel(request_id)

    def _register(self, client_id: str, sink: Sink) -> str:
        """Clients choose ids as they like; ours are unique among the requests that live."""
        with self._lock:
            request_id = client_id
            while not request_id or request_id in self._sinks:
                request_id = f"{client_id or 'request'}#{next(self._numbers)}"
            self._sinks[request_id] = sink
            return request_id

    def _ended(self, ended: Ended) -> None:
        with self._lock:
            del self._sinks[ended.request_id]
            self._outcomes[ended.error.code.value.lower() if ended.error else ended.finish.value] += 1
        self._news.set()
        self._on_end(ended)

    def _poll_cancelled(self) -> None:
        """Cancel requests whose clients have given up; then show the numbers if a request has ended."""
        with self._lock:
            live = list(self._sinks.items())
        for request_id, sink in live:
            if sink.is_cancelled():
                with self._lock:
                    # Its id may belong to a newer request by now.
                    if self._sinks.get(request_id) is sink:
                        self._scheduler.cancel(request_id)
        if self._news.is_set():
            self._publish()

    def _publish(self) -> None:
        self._news.clear()
        failure = self._scheduler.failure
        if failure is not None and not self._failure_told:
            self._failure_told = True
            self._on_failure(f"the scheduler has failed: {failure}")
        if self._gauges is not None:
            with self._lock:
                outcomes = dict(self._outcomes)
            self._gauges.publish(self._scheduler.snapshot(), outcomes)
