"""Print an answer as it comes: tritonclient over a gRPC stream. Ctrl-C cancels the request.

python examples/stream_sync.py --max-tokens 40 "def binary_search("
"""

from __future__ import annotations

import argparse
import queue
import sys
import uuid
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number, as shells have it."""


def tensor(name: str, dtype: str, value: Any) -> grpcclient.InferInput:
    """An input with one value; its shape has the batch dimension in front."""
    made = grpcclient.InferInput(name, [1, 1], dtype)
    made.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(dtype)))
    return made


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Print an answer as it comes, over a gRPC stream.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the server's gRPC (default: %(default)s)")
    parser.add_argument("--model", default="glm53-tiny", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    arguments = parser.parse_args()
    inputs = [
        tensor("text_input", "BYTES", arguments.prompt.encode()),
        tensor("max_tokens", "INT32", arguments.max_tokens),
        tensor("temperature", "FP32", arguments.temperature),
        tensor("stream", "BOOL", True),
    ]
    # One request a stream: an error does not say which of several it belongs to.
    responses: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(arguments.url) as client:
        try:
            client.is_server_live()  # raises if nobody is there; a stream that breaks while we send does not say why
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(arguments.model, inputs, request_id=f"sync-{uuid.uuid4().hex[:8]}")
            final = False
            while not final:
                result, error = responses.get()
                if error is not None:
                    raise error
                print(result.as_numpy("text_output")[0, 0].decode(), end="", flush=True)
                final = result.get_response().parameters["triton_final_response"].bool_param
        except InferenceServerException as error:
            print(f"error: {error}", file=sys.stderr)  # CODE id=... and what is wrong
            return 1
        except KeyboardInterrupt:
            client.stop_stream(cancel_requests=True)
            print("\ncancelled", file=sys.stderr)
            return INTERRUPTED
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
