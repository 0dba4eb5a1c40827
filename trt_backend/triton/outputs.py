"""What a response holds: the output tensors of a piece of an answer, as clients see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_backend.request import FinishReason, RequestError, RequestTimes, RowCounts, TokenLogprob

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. `generated` counts the answer's tokens, an end token included; times are of
    `time.monotonic_ns()`."""

    request_id: str
    finish: FinishReason
    error: RequestError | None
    generated: int
    rows: RowCounts
    times: RequestTimes
    prompt_tokens: int = 0
    device_pages: int = 0


@dataclass(slots=True)
class Piece:
    """The part of an answer that one response carries.

    `echo` are the prompt's tokens, where they are shown at all. `logprobs` has an entry for each of `tokens` if the
    request asked for them; `logprob` is their sum over the answer so far. `end` is set in the last piece.
    """

    text: str = ""
    echo: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprob: float = 0.0
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    prompt_tokens: int = 0
    end: Ended | None = None


DecodeToken = Callable[[int], str]

TEXT_OUTPUTS = frozenset({"text_output"})
TOKEN_OUTPUTS = frozenset({"output_ids", "sequence_length"})
LOGPROB_OUTPUTS = frozenset({"output_log_probs", "cum_log_probs", "logprobs", "cumulative_logprob"})
PERFORMANCE_OUTPUTS = frozenset(
    {
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "kv_cache_alloc_new_blocks",
        "resolver_rows",
    }
)


def render(piece: Piece, wanted: frozenset[str], clock_offset_ns: int, decode: DecodeToken) -> dict[str, Array]:
    """The tensors of a response, of those `wanted`, without a batch dimension.

    `clock_offset_ns` makes wall-clock times of monotonic ones; `decode` gives a token's text.

    | tensor | type and shape | when |
    |---|---|---|
    | text_output | BYTES [1] | always: what is new, or all of it |
    | output_ids | INT32 [1, n] | always: the new tokens, an echoed prompt before the first |
    | sequence_length | INT32 [1] | always: n |
    | num_output_tokens | UINT32 [1] | always: n without an echoed prompt |
    | num_input_tokens | UINT32 [1] | always |
    | output_log_probs | FP32 [1, n] | always, of the new tokens |
    | cum_log_probs, cumulative_logprob | FP32 [1] | always: sum over the answer so far |
    | logprobs | BYTES [1] | always: JSON, a list with an object {token: {logprob, rank, decoded_token}} a token |
    | prompt_log_probs | FP32 [1, prompt_tokens - 1] | once |
    | finish_reason | BYTES [1] | in the last response |
    | `PERFORMANCE_OUTPUTS` | INT64 [1]; resolver_rows [5] | in the last response |
    """
    tensors: dict[str, Array] = {}
    if "text_output" in wanted:
        tensors["text_output"] = np.array([piece.text.encode()], dtype=np.object_)
    if len(wanted) == 1 and tensors:
        return tensors  # by far the most frequent case
    tensors |= _of_tokens(piece, decode)
    if piece.prompt_logprobs is not None:
        tensors["prompt_log_probs"] = piece.prompt_logprobs[None]
    if piece.end is not None:
        tensors |= _of_end(piece.end, clock_offset_ns)
    return {name: tensor for name, tensor in tensors.items() if name in wanted}


def _of_tokens(piece: Piece, decode: DecodeToken) -> dict[str, Array]:
    cumulative = np.array([piece.logprob], dtype=np.float32)
    described = json.dumps([_describe(entry, decode) for entry in piece.logprobs])
    shown = piece.echo + piece.tokens
    return {
        "output_ids": np.array([shown], dtype=np.int32),
        "sequence_length": np.array([len(shown)], dtype=np.int32),
        "num_output_tokens": np.array([len(piece.tokens)], dtype=np.uint32),
        "num_input_tokens": np.array([piece.prompt_tokens], dtype=np.uint32),
        "output_log_probs": np.array([[entry.logprob for entry in piece.logprobs]], dtype=np.float32),
        "cum_log_probs": cumulative,
        "cumulative_logprob": cumulative,
        "logprobs": np.array([described.encode()], dtype=np.object_),
    }


def _describe(entry: TokenLogprob, decode: DecodeToken) -> dict[str, dict[str, float | int | str]]:
    ranked: Sequence[tuple[int, float, int]] = [
        (token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)
    ]
    chosen = (entry.token, entry.logprob, entry.rank)
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": decode(token)}
        for token, logprob, rank in dict.fromkeys([chosen, *ranked])
    }


def _of_end(end: Ended, clock_offset_ns: int) -> dict[str, Array]:
    rows, times = end.rows, end.times
    stations = {
        "arrival_time_ns": times.arrival_ns,
        "first_scheduled_time_ns": times.admitted_ns,
        "first_token_time_ns": times.first_token_ns,
        "last_token_time_ns": times.last_token_ns,
    }
    walls = {name: ns + clock_offset_ns if ns else 0 for name, ns in stations.items()}
    return {
        "finish_reason": np.array([end.finish.value.encode()], dtype=np.object_),
        "resolver_rows": np.array([rows.direct, rows.hot, rows.host, rows.padding, rows.masked], dtype=np.int64),
        "kv_cache_alloc_new_blocks": np.array([end.device_pages], dtype=np.int64),
        **{name: np.array([wall], dtype=np.int64) for name, wall in walls.items()},
    }
