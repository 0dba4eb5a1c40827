"""A tritonserver with a small model of the tests' own, which is ready in a second."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trt_backend.config import DeploymentConfig, ServerConfig
from trt_backend.triton.launcher import TritonServer
from trt_backend.triton.locate import STUB, find_server
from trt_backend.triton.ports import on_free_ports
from trt_backend.triton.process import SHM_FOLDER, children_of, command_of
from trt_backend.triton.repository import RunFolder, make_run_folder

CONFIG = """
backend: "python"
max_batch_size: 1
model_transaction_policy { decoupled: true }
input [
  { name: "text_input", data_type: TYPE_STRING, dims: [ -1 ] },
  { name: "max_tokens", data_type: TYPE_INT32, dims: [ -1 ], optional: true },
  { name: "stream", data_type: TYPE_BOOL, dims: [ -1 ], optional: true }
]
output [ { name: "text_output", data_type: TYPE_STRING, dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""
ECHO = """
import os
import threading
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        BODY
    def repeat(self, sender, text):
        while True:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text.as_numpy())]))
            time.sleep(0.05)
    def execute(self, requests):
        refusal = os.environ["TRT_BACKEND_DEPLOYMENT"] + ".refusal"
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input")
            if b"die" in text.as_numpy().reshape(-1)[0]:
                os._exit(1)
            if b"for ever" in text.as_numpy().reshape(-1)[0]:
                threading.Thread(target=self.repeat, args=(request.get_response_sender(), text), daemon=True).start()
                continue
            if os.path.exists(refusal):
                error = pb_utils.TritonError(open(refusal).read())
                request.get_response_sender().send(
                    pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                )
                continue
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text.as_numpy())])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    def finalize(self):
        print("finalized", flush=True)
"""


def write_model(folder: Path, body: str = "pass") -> Path:
    """A model that says what it hears: of "die" it dies, what is "for ever" it repeats without end, and while there is
    a file of refusal beside the deployment's it answers with an error of that text. `body` runs when it is loaded."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(ECHO.replace("BODY", textwrap.indent(body, " " * 8).strip()))
    return folder


def make_server(tmp_path: Path, body: str = "pass", **settings: Any) -> tuple[TritonServer, RunFolder]:
    """A server of that model on free ports, not started; `settings` are those of ServerConfig."""
    template = write_model(tmp_path / "template", body)
    folder = make_run_folder(tmp_path / "run", "echo", DeploymentConfig(), template)
    config = on_free_ports(ServerConfig(**{"startup_seconds": 60.0, "drain_seconds": 2.0} | settings))
    return TritonServer(find_server(), folder, "echo", config), folder


@contextmanager
def serving(tmp_path: Path, **settings: Any) -> Iterator[TritonServer]:
    """That server while it is ready."""
    server, _ = make_server(tmp_path, **settings)
    try:
        server.start()
        server.wait_ready(lambda _: None, threading.Event())
        yield server
    finally:
        server.stop(lambda _: None)


def regions(server: TritonServer) -> list[Path]:
    """Its shared-memory files."""
    return list(SHM_FOLDER.glob(f"{server.region_prefix}*"))


def refusal_file(folder: RunFolder) -> Path:
    """While it exists the model refuses everything, in its words."""
    return folder.deployment.with_name(folder.deployment.name + ".refusal")


def stub_of(server_pid: int | None) -> int:
    """Process id of the model's process."""
    assert server_pid is not None
    (stub,) = [child for child in children_of(server_pid) if STUB in command_of(child)]
    return stub
