"""Triton's door to one deployment. Everything behind it is in `trt_backend.triton`."""

from __future__ import annotations

from typing import Any

from trt_backend.triton.wire import Door, open_service

DRAIN_SECONDS = 5.0
"""Triton calls `finalize` after all streams have ended; what could still run then was left behind by a client."""


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the deployment and start serving."""
        self._service = open_service(args["model_name"], args["model_version"])
        self._door = Door(self._service, args["model_config"])

    def execute(self, requests: list[Any]) -> None:
        """Hand each request over; responses come from the service's streaming thread."""
        for request in requests:
            self._door.submit(request)

    def finalize(self) -> None:
        """Stop serving."""
        self._service.stop(DRAIN_SECONDS)
