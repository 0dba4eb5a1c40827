"""From a client's tensors to a validated request. Nothing is allocated for a request that does not pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from trt_backend.request import ErrorCode, Request, RequestError, SamplingParams
from trt_backend.triton.text import Tokenizer

DEFAULT_MAX_TOKENS = 256
MAX_SEED = 2**64 - 1

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Fields:
    """A client's inputs as Python values, still unchecked against the deployment. `max_tokens` None: the default."""

    text: str
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    stream: bool = False


def read_fields(request_id: str, tensors: Tensors) -> Fields:
    """Read the input tensors: text_input BYTES, max_tokens INT32, temperature FP32, seed UINT64, stream BOOL.

    Each has one element, in whatever shape ([1] or [1, 1]); all but text_input may be absent.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    if "text_input" not in tensors:
        raise _invalid(request_id, "text_input is missing; it is one BYTES element with the prompt in UTF-8")
    prompt = _only_element(request_id, "text_input", tensors["text_input"])
    if not isinstance(prompt, bytes):
        raise _invalid(request_id, f"text_input is {type(prompt).__name__}; it must be BYTES")
    try:
        text = prompt.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(
            request_id, f"text_input is not UTF-8: byte {error.start} of {len(prompt)} is 0x{prompt[error.start]:02x}"
        ) from error
    given = {
        name: _only_element(request_id, name, tensors[name])
        for name in ("max_tokens", "temperature", "seed", "stream")
        if name in tensors
    }
    return Fields(
        text=text,
        max_tokens=int(given["max_tokens"]) if "max_tokens" in given else None,
        temperature=float(given.get("temperature", 0.0)),
        seed=int(given.get("seed", 0)),
        stream=bool(given.get("stream", False)),
    )


def make_request(
    request_id: str, fields: Fields, tokenizer: Tokenizer, end_ids: frozenset[int], max_model_len: int
) -> Request:
    """Check the fields against the deployment and tokenise the prompt.

    Raises:
        RequestError: INVALID_ARGUMENT, with the numbers and the setting that would change it.
    """
    if not fields.text:
        raise _invalid(request_id, "text_input is empty; the prompt must have at least 1 token")
    if fields.max_tokens is not None and fields.max_tokens < 1:
        raise _invalid(request_id, f"max_tokens={fields.max_tokens} is not legal; legal range: 1 to {max_model_len}")
    if not math.isfinite(fields.temperature) or fields.temperature < 0:
        raise _invalid(
            request_id, f"temperature={fields.temperature:g} is not legal; legal: 0 (greedy) or any finite number above"
        )
    if not 0 <= fields.seed <= MAX_SEED:
        raise _invalid(request_id, f"seed={fields.seed} is not legal; legal range: 0 to {MAX_SEED}")
    try:
        size = len(fields.text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _invalid(
            request_id, f"the prompt is not Unicode text: {error.reason} at character {error.start}"
        ) from error
    # A token covers so many bytes at most, so a huge prompt is refused without tokenising it first.
    least_tokens = -(-size // tokenizer.longest_token_bytes)
    if least_tokens >= max_model_len:
        raise _invalid(
            request_id,
            f"a prompt of {size} bytes has at least {least_tokens} tokens; with 1 new token it needs more positions "
            f"than this deployment holds, {max_model_len} (max_model_len)",
        )
    prompt = tokenizer.encode(fields.text)
    room = max_model_len - len(prompt)
    max_tokens = fields.max_tokens if fields.max_tokens is not None else max(1, min(DEFAULT_MAX_TOKENS, room))
    if max_tokens > room:
        raise _invalid(
            request_id,
            f"max_tokens={max_tokens} with a {len(prompt)}-token prompt needs {len(prompt) + max_tokens} positions; "
            f"this deployment holds {max_model_len} (max_model_len)",
        )
    return Request(request_id, prompt, max_tokens, SamplingParams(fields.temperature, fields.seed), end_ids)


def _only_element(request_id: str, name: str, tensor: npt.NDArray[Any]) -> Any:
    if tensor.size != 1:
        raise _invalid(request_id, f"{name} has shape {list(tensor.shape)}; it must have exactly 1 element")
    return tensor.reshape(-1)[0]


def _invalid(request_id: str, detail: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, request_id, detail)
