"""Triton's door to one deployment. Everything behind it is in `trt_backend.triton`."""

from __future__ import annotations

from typing import Any

from trt_backend.triton.parse import read_fields
from trt_backend.triton.wire import TritonSink, open_service, read_tensors

DRAIN_SECONDS = 5.0
"""Triton calls `finalize` after all streams have ended; what could still run then was left behind by a client."""


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:  # noqa: ARG002
        """Load the deployment and start serving."""
        self._service = open_service()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request over; responses come from the service's streaming thread."""
        for request in requests:
            self._service.submit(
                request.request_id(),
                lambda request_id, request=request: read_fields(request_id, read_tensors(request)),
                TritonSink(request.get_response_sender()),
            )

    def finalize(self) -> None:
        """Stop serving."""
        self._service.stop(DRAIN_SECONDS)
