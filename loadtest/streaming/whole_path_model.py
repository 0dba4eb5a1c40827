"""The model of `model_repo/dhs` with an engine that costs nothing: everything but the model's own work is real."""

from __future__ import annotations

from typing import Any

from loadtest.streaming.constant_engine import build_constant_runtime
from trt_backend.triton.wire import Door, open_service


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start serving."""
        self._service = open_service(args["model_name"], args["model_version"], build_constant_runtime)
        self._door = Door(self._service, args["model_config"])

    def execute(self, requests: list[Any]) -> None:
        """Hand each request over."""
        for request in requests:
            self._door.submit(request)

    def finalize(self) -> None:
        """Stop serving."""
        self._service.stop(1.0)
