"""From the scheduler's Outputs to a client's responses: one thread detokenises and sends, the scheduler never waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trt_backend.request import ErrorCode, FinishReason, Output, RequestError
from trt_backend.triton.answer import Answer
from trt_backend.triton.outputs import Array, Ended, Piece, render
from trt_backend.triton.parse import Shape
from trt_backend.triton.text import Tokenizer

log = logging.getLogger(__name__)
BEHIND = 4
"""So many Outputs of one request may wait, each for a response of its own."""


class Sink(Protocol):
    """Where one request's answer goes. `send` with `final`, or `fail`, is called last and once."""

    def send(self, tensors: Mapping[str, Array], final: bool) -> None:
        """Send a response: output tensors by name, as `outputs.render` makes them."""

    def fail(self, error: RequestError) -> None:
        """End with an error."""

    def is_cancelled(self) -> bool:
        """Whether the client has given up. Any thread; False after the end."""


class _Stream:
    """One open request: where its answer goes, the answer so far, and the last Output, once it is there."""

    def __init__(self, request_id: str, sink: Sink, shape: Shape, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.sink = sink
        self.outputs = shape.outputs
        self.answer = Answer(shape, tokenizer)
        self.waiting: deque[Output] = deque()
        self.broken = False
        self.end: Output | None = None


class Requests(Protocol):
    """What a streamer may ask of the scheduler."""

    def cancel(self, request_id: str) -> None:
        """Nobody takes its responses any more."""

    def finish(self, request_id: str) -> None:
        """Its answer is complete."""


class Streamer:
    """Owns every sink from `open` to the end of its request.

    Each Output goes out on its own, unless more than `BEHIND` of one request wait: then all of them as one piece, so
    that a slow moment costs no backlog.
    `on_last` is told a request's id before its last response goes, `on_end` how it ended, after that; both on the
    streaming thread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_last: Callable[[str], None],
        on_end: Callable[[Ended], None],
        requests: Requests,
    ) -> None:
        self._tokenizer = tokenizer
        self._on_last = on_last
        self._on_end = on_end
        self._requests = requests
        self._messages: queue.SimpleQueue[_Stream | Output | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._taken = 0
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="streamer", daemon=True)

    # --- any thread ---

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send everything that has been delivered, end what is still open with an error, end the thread."""
        self._messages.put(None)
        self._thread.join()

    def open(self, request_id: str, sink: Sink, shape: Shape) -> None:
        """Take a request over, before its first Output."""
        self._messages.put(_Stream(request_id, sink, shape, self._tokenizer))

    def deliver(self, output: Output) -> None:
        """Take an Output of an open request; never blocks."""
        self._messages.put(output)

    @property
    def backlog(self) -> int:
        """How many Outputs wait to be sent, those included that are being sent now."""
        return self._messages.qsize() + self._taken

    # --- the streaming thread ---

    def _run(self) -> None:
        running = True
        ready: dict[str, _Stream] = {}
        while running or ready:
            messages = self._take(wait=not ready)
            running = running and None not in messages
            self._sort_in(messages, ready)
            for stream in list(ready.values()):
                self._feed(stream)
                if not stream.waiting:
                    del ready[stream.request_id]
        for stream in list(self._streams.values()):
            error = RequestError(ErrorCode.INTERNAL, stream.request_id, "the server stopped before the request's end")
            stream.end = Output(stream.request_id, finish=FinishReason.ERROR, error=error)
            self._advance(stream)

    def _take(self, wait: bool) -> list[_Stream | Output | None]:
        messages = [self._messages.get()] if wait else []
        try:
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages

    def _sort_in(self, messages: Sequence[_Stream | Output | None], ready: dict[str, _Stream]) -> None:
        """Put messages where they belong, and the streams that have got something into `ready`."""
        for message in messages:
            if isinstance(message, _Stream):
                self._streams[message.request_id] = message
            elif message is not None:
                stream = self._streams.get(message.request_id)
                if stream is None:
                    log.error("an Output for %s came when it was not open", message.request_id)
                    continue
                stream.waiting.append(message)
                self._taken += 1
                ready[message.request_id] = stream

    def _feed(self, stream: _Stream) -> None:
        """Take up a step's Output, or all that wait where there are too many, and send what can be sent."""
        number = 1 if len(stream.waiting) <= BEHIND else len(stream.waiting)
        for _ in range(number):
            output = stream.waiting.popleft()
            if stream.answer.add(output):
                self._requests.finish(output.request_id)
            if output.finish is not None:
                stream.end = output
        self._advance(stream)
        self._taken -= number

    def _advance(self, stream: _Stream) -> None:
        """Send what can be sent; whatever goes wrong stays with this one request."""
        if stream.end is not None:
            self._on_last(stream.request_id)
        try:
            self._send(stream)
        except Exception:
            log.exception("request %s: its client can't be reached", stream.request_id)
            if stream.end is not None:
                self._fail_at_least(stream)
            else:
                stream.broken = True
                self._requests.cancel(stream.request_id)
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
        end, answer = stream.end, stream.answer
        if stream.broken:
            if end is not None:
                stream.sink.fail(RequestError(ErrorCode.INTERNAL, stream.request_id, "a response could not be sent"))
            return
        if end is None:
            piece = answer.take()
            if piece is not None:
                self._respond(stream, piece, final=False)
        elif end.error is None or answer.complete:
            # Perhaps an empty text: a client that looks for the final mark needs a response that carries it.
            self._respond(stream, answer.take_last(self._ended(stream, end)), final=True)
        else:
            piece = answer.take()
            if piece is not None:
                self._respond(stream, piece, final=False)
            stream.sink.fail(end.error)

    def _respond(self, stream: _Stream, piece: Piece, final: bool) -> None:
        stream.sink.send(render(piece, stream.outputs, self._clock_offset_ns, self._tokenizer.show), final)

    @staticmethod
    def _ended(stream: _Stream, end: Output) -> Ended:
        """How it ended for its reader: an answer that was complete stays a good one, whatever came after it."""
        assert end.finish is not None
        complete = stream.answer.complete
        return Ended(
            request_id=stream.request_id,
            finish=FinishReason.STOP if complete else end.finish,
            error=None if complete else end.error,
            generated=stream.answer.generated,
            rows=end.rows,
            times=end.times,
            prompt_tokens=stream.answer.prompt_tokens,
            device_pages=end.device_pages,
        )

    def _close(self, stream: _Stream, end: Output) -> None:
        del self._streams[stream.request_id]
        try:
            self._on_end(self._ended(stream, end))
        except Exception:
            log.exception("request %s ended, and taking note of it failed", stream.request_id)
