"""The client of both models: requests one after another on each of many gRPC streams, and a count of what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

LARGEST_EMPTY = 4
"""A BYTES element is its length in 4 bytes, and then itself."""


@dataclass(slots=True)
class Count:
    """What has come in on one stream since its client began to count: responses with text."""

    responses: int = 0
    requests: int = 0


def make_request(model: str, prompt: bytes, tokens: int) -> service_pb2.ModelInferRequest:
    """A streaming request in its wire form; [1, 1] shapes."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, datatype, raw in (
        ("text_input", "BYTES", len(prompt).to_bytes(4, "little") + prompt),
        ("max_tokens", "INT32", tokens.to_bytes(4, "little")),
        ("stream", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return request


async def _run_stream(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest, count: Count, until: float
) -> None:
    """Ask again and again until `until` (`time.perf_counter`), then let the last request finish."""
    answered = asyncio.Event()

    async def ask() -> AsyncIterator[service_pb2.ModelInferRequest]:
        while time.perf_counter() < until:
            yield request
            await answered.wait()
            answered.clear()

    async for response in stub.ModelStreamInfer(ask()):
        if response.error_message:
            raise RuntimeError(response.error_message)
        answer = response.infer_response
        if any(len(raw) > LARGEST_EMPTY for raw in answer.raw_output_contents):
            count.responses += 1
        if answer.parameters["triton_final_response"].bool_param:
            count.requests += 1
            answered.set()


async def _measure(url: str, model: str, streams: int, tokens: int, warm_seconds: float, seconds: float) -> float:
    request = make_request(model, b"def", tokens)
    begin = time.perf_counter()
    counts = [Count() for _ in range(streams)]
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        until = begin + warm_seconds + seconds
        running = asyncio.gather(*(_run_stream(stub, request, count, until) for count in counts))
        await asyncio.sleep(warm_seconds)
        start, before = time.perf_counter(), sum(count.responses for count in counts)
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        end, after = time.perf_counter(), sum(count.responses for count in counts)
        await running
    return (after - before) / (end - start)


def responses_per_second(url: str, model: str, streams: int, tokens: int, warm_seconds: float, seconds: float) -> float:
    """Responses with text a second, over all streams, after `warm_seconds`.

    Raises:
        RuntimeError: the server answered with an error.
    """
    return asyncio.run(_measure(url, model, streams, tokens, warm_seconds, seconds))
