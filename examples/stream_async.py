"""Print an answer as it comes: tritonclient's asyncio client. Ctrl-C cancels the request.

python examples/stream_async.py --max-tokens 40 "def binary_search("
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number, as shells have it."""


def tensor(name: str, dtype: str, value: Any) -> grpcclient.InferInput:
    """An input with one value; its shape has the batch dimension in front."""
    made = grpcclient.InferInput(name, [1, 1], dtype)
    made.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(dtype)))
    return made


async def answer(arguments: argparse.Namespace) -> AsyncIterator[str]:
    """The pieces of the answer; closing the client, also in the middle, cancels what still runs."""
    inputs = [
        tensor("text_input", "BYTES", arguments.prompt.encode()),
        tensor("max_tokens", "INT32", arguments.max_tokens),
        tensor("temperature", "FP32", arguments.temperature),
        tensor("stream", "BOOL", True),
    ]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": arguments.model, "inputs": inputs, "request_id": f"async-{uuid.uuid4().hex[:8]}"}

    async with grpcclient.InferenceServerClient(arguments.url) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            yield result.as_numpy("text_output")[0, 0].decode()


async def show(arguments: argparse.Namespace) -> None:
    """Print the pieces; meanwhile the loop is free for other work."""
    async for piece in answer(arguments):
        print(piece, end="", flush=True)
    print()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Print an answer as it comes, with asyncio.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="127.0.0.1:8001", help="host:port of the server's gRPC (default: %(default)s)")
    parser.add_argument("--model", default="glm53-tiny", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    try:
        asyncio.run(show(parser.parse_args()))
    except InferenceServerException as error:
        print(f"error: {error}", file=sys.stderr)  # CODE id=... and what is wrong
        return 1
    except grpc.RpcError as error:  # the stream itself has broken; stream_infer hands these on as they are
        print(f"error: [{error.code()}] {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncancelled", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
