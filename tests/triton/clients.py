"""Clients of a real tritonserver, for the tests of this folder."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from loadtest.server import LOOPBACK

ANSWER_SECONDS = 60.0
DTYPES = {"max_tokens": "INT32", "temperature": "FP32", "seed": "UINT64", "stream": "BOOL"}
NUMPY_TYPES = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


@dataclass
class Answer:
    """What came back on one stream: texts in order, which of them had the final mark, and the error, if any."""

    texts: list[str] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.texts)


class Stream:
    """One gRPC stream with one request."""

    def __init__(self, grpc_port: int, model: str, inputs: list[Any], request_id: str = "") -> None:
        self._client = grpcclient.InferenceServerClient(f"{LOOPBACK}:{grpc_port}")
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))
        self._client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)

    def next(self, answer: Answer, seconds: float = ANSWER_SECONDS) -> bool:
        """Put the next response to `answer`; False when that was the last."""
        result, error = self._responses.get(timeout=seconds)
        if error is not None:
            answer.error = str(error)
            return False
        final = result.get_response().parameters["triton_final_response"].bool_param
        tensor = result.as_numpy("text_output")
        if tensor is not None:
            answer.texts.append(tensor.reshape(-1)[0].decode())
            answer.finals.append(final)
        return not final

    def rest(self) -> Answer:
        """All responses, then close.

        Cancelling a stream that has just ended makes tritonserver 2.51 lose count of its request, and wait for it when
        it is to stop.
        """
        answer = Answer()
        while self.next(answer):
            pass
        self.close(cancel=False)
        return answer

    def close(self, cancel: bool) -> None:
        """Leave; with `cancel`, the request is cancelled if it still runs."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def make_inputs(text: bytes, shape: list[int] | None = None, **fields: Any) -> list[Any]:
    """Input tensors; a field's value may be a pair (value, Triton type) where the type matters."""
    shape = shape or [1, 1]
    tensor = grpcclient.InferInput("text_input", shape, "BYTES")
    tensor.set_data_from_numpy(np.full(shape, text, dtype=np.object_))
    inputs = [tensor]
    for name, value in fields.items():
        value, dtype = value if isinstance(value, tuple) else (value, DTYPES[name])
        tensor = grpcclient.InferInput(name, shape, dtype)
        tensor.set_data_from_numpy(np.full(shape, value, dtype=NUMPY_TYPES[dtype]))
        inputs.append(tensor)
    return inputs


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll a condition; fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
