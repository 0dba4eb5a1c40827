"""Clients of a real tritonserver, for the tests of this folder."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from loadtest.server import LOOPBACK
from trt_backend.triton.repository import default_template

ANSWER_SECONDS = 60.0
DECLARED = re.compile(r'name: "(\w+)", data_type: TYPE_(\w+)')
DTYPES = {
    name: dtype.replace("STRING", "BYTES")
    for name, dtype in DECLARED.findall((default_template() / "config.pbtxt").read_text())
}
NUMPY_TYPES = {
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


@dataclass
class Answer:
    """What came back on one stream: texts in order, which of them had the final mark, and the error, if any."""

    texts: list[str] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.texts)

    def tensors(self, name: str) -> list[Any]:
        """An output tensor of every response that has it, without the batch dimension."""
        found = [result.as_numpy(name) for result in self.results]
        return [tensor[0] for tensor in found if tensor is not None]


class Stream:
    """One gRPC stream with one request."""

    def __init__(
        self,
        grpc_port: int,
        model: str,
        inputs: list[Any],
        request_id: str = "",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._client = grpcclient.InferenceServerClient(f"{LOOPBACK}:{grpc_port}")
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)), headers=headers)
        self._client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True, **options
        )

    def next(self, answer: Answer, seconds: float = ANSWER_SECONDS) -> bool:
        """Put the next response to `answer`; False when that was the last."""
        result, error = self._responses.get(timeout=seconds)
        if error is not None:
            answer.error = str(error)
            return False
        final = result.get_response().parameters["triton_final_response"].bool_param
        answer.results.append(result)
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


def make_input(name: str, value: Any, dtype: str | None = None, shape: list[int] | None = None) -> Any:
    """One input tensor. A list is a row of values, [1, n]; with `shape` the value is repeated."""
    dtype = dtype or DTYPES[name]
    values = np.array([value] if isinstance(value, list) else [[value]], dtype=NUMPY_TYPES[dtype])
    if shape is not None:
        values = np.full(shape, values.reshape(-1)[0], dtype=values.dtype)
    tensor = grpcclient.InferInput(name, list(values.shape), dtype)
    tensor.set_data_from_numpy(values)
    return tensor


def make_inputs(text: bytes | None, **fields: Any) -> list[Any]:
    """Input tensors; a field's value may be a pair (value, Triton type) where the type matters."""
    inputs = [make_input("text_input", text)] if text is not None else []
    for name, value in fields.items():
        pair = value if isinstance(value, tuple) else (value, None)
        inputs.append(make_input(name, *pair))
    return inputs


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll a condition; fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
