"""Real servers and clients for the tests of this folder. Every child process dies with the test process."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from trt_backend.triton.launcher import LOOPBACK, free_ports
from trt_backend.triton.process import die_with_parent

ANSWER_SECONDS = 60.0
DTYPES = {"max_tokens": "INT32", "temperature": "FP32", "seed": "UINT64", "stream": "BOOL"}
NUMPY_TYPES = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


class ServeCommand:
    """`trt-backend serve` as a process of its own."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.state_dir = state_dir
        self.lines: list[str] = []
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trt_backend.cli", "serve", *options, f"--state-dir={state_dir}"]
            + [f"--{name}-port={port}" for name, port in ports.items()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ, COLUMNS="200"),
            preexec_fn=die_with_parent(),
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready:"):
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        """All that it has printed."""
        return "\n".join(self.lines)

    @property
    def region_prefix(self) -> str:
        """How names of its shared-memory files begin."""
        return f"dhs_{os.getuid()}_{self.http_port}_"

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Until it says that it is ready; fails with its output if it ends instead."""
        assert self._ready.wait(seconds), self.output
        assert self.process.poll() is None, self.output
        assert any(line.startswith("ready:") for line in self.lines), self.output

    def wait_exit(self, seconds: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(seconds)
        self._reader.join(5.0)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_exit()

    def metrics(self) -> dict[str, float]:
        """Our numbers on Triton's metrics port: name with labels (without model and version) → value."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=5.0) as response:
            text = response.read().decode()
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("dhs_")
        }


@dataclass
class Answer:
    """What came back on one stream: texts in order, which of them had the final mark, and the error if there was one."""

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
        """All responses, then close."""
        answer = Answer()
        while self.next(answer):
            pass
        self.close()
        return answer

    def close(self, cancel: bool = True) -> None:
        """Leave; a request that still runs is cancelled."""
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


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    """Poll a condition; fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
