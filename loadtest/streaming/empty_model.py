"""An empty decoupled model: as many one-element responses as max_tokens says, and nothing else.

One thread a request sends, because a sender that waits for the server lets the others go on: with one thread for all
requests this model was slower at 16 and at 64 streams.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

TEXT = np.array([[b"a"]], dtype=np.object_)


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request."""
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().item())
            threading.Thread(target=self._send, args=(request.get_response_sender(), count)).start()

    @staticmethod
    def _send(sender: Any, count: int) -> None:
        for left in reversed(range(count)):
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", TEXT)])
            sender.send(response, flags=0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
