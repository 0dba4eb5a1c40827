"""Triton's requests and responses as our own words. Importable only inside tritonserver's Python backend."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from trt_backend.build import build_runtime
from trt_backend.config import ConfigError, load_deployment
from trt_backend.logs import set_up_model_logging
from trt_backend.request import ErrorCode, RequestError
from trt_backend.triton.inputs import Fields, read_fields
from trt_backend.triton.metrics_triton import TritonMetrics
from trt_backend.triton.repository import DEPLOYMENT_VARIABLE, RECORD_VARIABLE, StartupEvent, write_event
from trt_backend.triton.service import Build, Service

# The Python backend puts its classes into pb_utils after it has imported the model: none can be named up here.
TRITON_CODES = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    # There is no RESOURCE_EXHAUSTED; the message's first word tells overload from a server that is down.
    ErrorCode.OVERLOADED: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    # Nor is there a DEADLINE_EXCEEDED.
    ErrorCode.DEADLINE_EXCEEDED: "CANCELLED",
    ErrorCode.INTERNAL: "INTERNAL",
}


class TritonSink:
    """Implements `stream.Sink` over the response sender of one request.

    Asking a sender about cancellation while, or after, it is closed crashes servers before 24.12, so the two exclude
    each other. The sender is dropped with the last response: Triton does not unload a model that holds one.
    """

    def __init__(self, sender: Any, batched: bool) -> None:
        self._sender: Any | None = sender
        self._batched = batched
        self._lock = threading.Lock()

    def send(self, tensors: Mapping[str, npt.NDArray[Any]], final: bool) -> None:
        """Send a response with these output tensors."""
        shaped = [pb_utils.Tensor(name, tensor[None] if self._batched else tensor) for name, tensor in tensors.items()]
        self._respond(pb_utils.InferenceResponse(shaped), final)

    def fail(self, error: RequestError) -> None:
        """Send an error as the last response; where that is not possible, at least the end."""
        code = getattr(pb_utils.TritonError, TRITON_CODES[error.code])
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        try:
            self._respond(response, final=True)
        except pb_utils.TritonModelException:
            with self._lock:
                if self._sender is not None:
                    self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    self._sender = None
            raise

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled, gone away or passed its deadline."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())

    def _respond(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._sender is None:
                raise RuntimeError("a response after the last one")
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            if final:
                self._sender = None


class Door:
    """Takes Triton's requests to a service. Made from the model's configuration, which Triton gives as JSON."""

    def __init__(self, service: Service, model_config: str) -> None:
        config = json.loads(model_config)
        self._service = service
        self._batched = config["max_batch_size"] > 0
        self._outputs = frozenset(output["name"] for output in config["output"])

    def submit(self, request: Any) -> None:
        """Hand a request over; its responses come from the service's streaming thread."""
        sink = TritonSink(request.get_response_sender(), self._batched)
        self._service.submit(request.request_id(), lambda request_id: self._read(request_id, request), sink)

    def _read(self, request_id: str, request: Any) -> Fields:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        named = frozenset(request.requested_output_names())
        # Triton says the same of a client that names no output and of one that names all.
        fields = read_fields(request_id, tensors, None if named == self._outputs else named)
        allowed_us = request.timeout()
        if allowed_us and fields.deadline_ms is None:
            fields = replace(fields, deadline_ms=max(1, allowed_us // 1000))
        return fields


def open_service(model_name: str, model_version: str, build: Build = build_runtime) -> Service:
    """Load and start the deployment that the environment names; how that goes is written to the start-up record.

    `build` makes the runtime: another one than the deployment's own is for measuring what is around it.

    Raises:
        TritonModelException: it can't be served; the message says why.
    """
    set_up_model_logging()
    named = os.environ.get(RECORD_VARIABLE)
    record = Path(named) if named else None

    def fail(reason: str) -> None:
        write_event(record, StartupEvent(reason, failed=True))

    try:
        path = os.environ.get(DEPLOYMENT_VARIABLE)
        if not path:
            raise ConfigError(
                f"{DEPLOYMENT_VARIABLE} is not set: it names the JSON file with the deployment's settings"
            )
        service = Service(
            load_deployment(Path(path)),
            progress=lambda message: write_event(record, StartupEvent(message)),
            metrics=TritonMetrics(model_name, model_version),
            on_failure=fail,
            build=build,
        )
    except ConfigError as error:
        fail(str(error))
        raise pb_utils.TritonModelException(str(error)) from None
    except Exception as error:
        traceback.print_exc()
        reason = f"INTERNAL: loading the model failed: {type(error).__name__}: {error}"
        fail(reason)
        raise pb_utils.TritonModelException(reason) from None
    service.start()
    return service
