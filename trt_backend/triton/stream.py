"""From the scheduler's Outputs to a client's responses: one thread detokenises and sends, the scheduler never waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trt_backend.request import ErrorCode, FinishReason, Output, RequestError, RequestTimes, RowCounts
from trt_backend.triton.text import Detokenizer, Tokenizer

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where one request's answer goes. `send` with `final`, or `fail`, is called last and once."""

    def send(self, text: str, final: bool) -> None:
        """Send a piece of text."""

    def fail(self, error: RequestError) -> None:
        """End with an error."""

    def is_cancelled(self) -> bool:
        """Whether the client has given up. Any thread; False after the end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. `generated` counts tokens, an end token included."""

    request_id: str
    finish: FinishReason
    error: RequestError | None
    generated: int
    rows: RowCounts
    times: RequestTimes


@dataclass(slots=True, eq=False)
class _Stream:
    """One open request. `pending` are tokens that have no text yet, `held` is text that waits for the end."""

    request_id: str
    sink: Sink
    in_pieces: bool
    end_ids: frozenset[int]
    detokenizer: Detokenizer
    pending: list[int] = field(default_factory=list)
    held: str = ""
    generated: int = 0
    broken: bool = False
    end: Output | None = None


class Streamer:
    """Owns every sink from `open` to the end of its request.

    What has come in for a request while others were served goes out as one piece, so a slow moment costs no backlog.
    `on_end` is told of each ended request, after its last response has gone; `cancel` is called with the id of a
    request whose sink does not take responses any more. Both are called on the streaming thread.
    """

    def __init__(self, tokenizer: Tokenizer, on_end: Callable[[Ended], None], cancel: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._cancel = cancel
        self._messages: queue.SimpleQueue[_Stream | Output | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="streamer", daemon=True)

    # --- any thread ---

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send everything that has been delivered, end what is still open with an error, end the thread."""
        self._messages.put(None)
        self._thread.join()

    def open(self, request_id: str, sink: Sink, in_pieces: bool, end_ids: frozenset[int]) -> None:
        """Take a request over, before its first Output. `in_pieces`: text as it comes, else all of it at the end."""
        self._messages.put(_Stream(request_id, sink, in_pieces, end_ids, Detokenizer(self._tokenizer)))

    def deliver(self, output: Output) -> None:
        """Take an Output of an open request; never blocks."""
        self._messages.put(output)

    # --- the streaming thread ---

    def _run(self) -> None:
        running = True
        while running:
            messages = self._take()
            running = None not in messages
            for stream in self._sort_in(messages):
                self._advance(stream)
        for stream in list(self._streams.values()):
            error = RequestError(ErrorCode.INTERNAL, stream.request_id, "the server stopped before the request's end")
            stream.end = Output(stream.request_id, finish=FinishReason.ERROR, error=error)
            self._advance(stream)

    def _take(self) -> list[_Stream | Output | None]:
        messages = [self._messages.get()]
        try:
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages

    def _sort_in(self, messages: list[_Stream | Output | None]) -> list[_Stream]:
        """Put tokens to their streams; returns the streams that have news, the longest waiting first."""
        touched: dict[str, _Stream] = {}
        for message in messages:
            if isinstance(message, _Stream):
                self._streams[message.request_id] = message
            elif message is not None:
                stream = self._streams.get(message.request_id)
                if stream is None:
                    log.error("an Output for %s came when it was not open", message.request_id)
                    continue
                stream.pending.extend(message.tokens)
                stream.generated += len(message.tokens)
                if message.finish is not None:
                    stream.end = message
                touched[message.request_id] = stream
        return list(touched.values())

    def _advance(self, stream: _Stream) -> None:
        """Send what can be sent; whatever goes wrong stays with this one request."""
        try:
            self._send(stream)
        except Exception:
            log.exception("request %s: its client can't be reached", stream.request_id)
            if stream.end is not None:
                self._fail_at_least(stream)
            else:
                stream.broken = True
                self._cancel(stream.request_id)
        if stream.end is not None:
            self._close(stream, stream.end)

    @staticmethod
    def _fail_at_least(stream: _Stream) -> None:
        """The last response could not be sent: Triton must still learn that there is none to come."""
        try:
            stream.sink.fail(RequestError(ErrorCode.INTERNAL, stream.request_id, "the last response could not be sent"))
        except Exception:
            log.exception("request %s: its stream can't be ended", stream.request_id)

    def _send(self, stream: _Stream) -> None:
        end, tokens = stream.end, stream.pending
        stream.pending = []
        if stream.broken:
            if end is not None:
                stream.sink.fail(RequestError(ErrorCode.INTERNAL, stream.request_id, "a response could not be sent"))
            return
        if end is not None and end.finish is FinishReason.STOP and tokens and tokens[-1] in stream.end_ids:
            tokens = tokens[:-1]
        text = stream.held + stream.detokenizer.push(tokens)
        stream.held = ""
        if end is None:
            if stream.in_pieces and text:
                stream.sink.send(text, final=False)
            elif text:
                stream.held = text
        elif end.error is None:
            # Perhaps an empty text: a client that looks for the final mark needs a response that carries it.
            stream.sink.send(text + stream.detokenizer.flush(), final=True)
        else:
            if stream.in_pieces and text:
                stream.sink.send(text, final=False)
            stream.sink.fail(end.error)

    def _close(self, stream: _Stream, end: Output) -> None:
        del self._streams[stream.request_id]
        assert end.finish is not None
        ended = Ended(stream.request_id, end.finish, end.error, stream.generated, end.rows, end.times)
        try:
            self._on_end(ended)
        except Exception:
            log.exception("request %s ended, and taking note of it failed", stream.request_id)
