"""What a client asks for and what comes back: the nouns that travel from the doors to the scheduler and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class FinishReason(StrEnum):
    """Why a request ended. The values are what clients see."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class ErrorCode(StrEnum):
    """First word of every error message: streams lose gRPC status codes, so the message has to carry them."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    OVERLOADED = "OVERLOADED"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """A request that can't be served. `str()` is the message a client sees: `CODE id=REQUEST_ID detail`.

    `retry_after_ms`, in front of the detail, is when an overloaded server expects to take a request again.
    """

    def __init__(self, code: ErrorCode, request_id: str, detail: str, retry_after_ms: int | None = None) -> None:
        retry = f"retry_after_ms={retry_after_ms} " if retry_after_ms is not None else ""
        super().__init__(f"{code.value} id={request_id} {retry}{detail}")
        self.code = code
        self.request_id = request_id
        self.detail = detail
        self.retry_after_ms = retry_after_ms


PRIORITIES = range(10)
"""Priority classes, the most urgent first."""
DEFAULT_PRIORITY = 5
MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for beside each token."""

TokenSequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    First the penalties change the logits: `repetition_penalty` divides positive and multiplies negative logits of
    tokens in the prompt or the answer (CTRL, arXiv 1909.05858; 1 is off), then `presence_penalty` is subtracted once
    and `frequency_penalty` once for each time from tokens in the answer (0 is off). `temperature` 0 then takes the
    best (ties go to the lower token id). Otherwise the probabilities softmax(logits / temperature) lose those below
    `min_p` times the highest (0 is off), then all but the `top_k` highest (0 is off), then all but the smallest set
    of the highest that holds `top_p` of what is left (1 is off), and a token is drawn from the rest with a generator
    keyed by (`seed`, position): the same seed gives the same text whatever else is in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request, validated and tokenised.

    `prompt` is int32 [prompt_tokens], not empty. Generation stops after `max_tokens` new tokens, at the first token
    of `end_ids`, or at the first of `stop_sequences`; what stopped it is delivered with the last tokens of the stream
    (text faces hide an end token). Neither may come before `min_tokens`. None of `bad_sequences` is ever generated.
    `logprobs` asks for the log-probability of each new token and of so many alternatives, `score_prompt` for those of
    the prompt's tokens; only then may `max_tokens` be 0. It arrived at `arrival_ns` (`time.monotonic_ns()`; without
    it, when it is submitted), and is given up if it has not ended `deadline_ms` later.
    """

    id: str
    prompt: npt.NDArray[np.int32]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    stop_sequences: TokenSequences = ()
    bad_sequences: TokenSequences = ()
    logprobs: int | None = None
    score_prompt: bool = False
    priority: int = DEFAULT_PRIORITY
    arrival_ns: int | None = None
    deadline_ms: int | None = None

    @property
    def max_length(self) -> int:
        """Longest this request may become, in tokens: prompt and new tokens."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability under the model's own logits, before penalties and filters.

    `rank` is 1 for the most likely token. `top` has the most likely tokens, best first, each with its own.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RowCounts:
    """Where selected rows came from, summed over index groups and steps (unit: rows).

    `padding` counts −1 entries of short selections; `masked` counts rows that should have been somewhere and were
    not: it is zero unless the server has a fault.
    """

    direct: int = 0
    hot: int = 0
    host: int = 0
    padding: int = 0
    masked: int = 0

    def add(self, other: RowCounts) -> None:
        """Add another count to this one."""
        self.direct += other.direct
        self.hot += other.hot
        self.host += other.host
        self.padding += other.padding
        self.masked += other.masked


@dataclass(slots=True)
class RequestTimes:
    """`time.monotonic_ns()` at the stations of a request; 0 where it has not been yet."""

    arrival_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What one step made for one request. Exactly one Output of a request has `finish` set, and it is the last.

    `tokens` may be empty only when `finish` is set. `error` is set only with `finish` ERROR, or CANCELLED.
    `device_pages` is what it was admitted with. `logprobs` has one entry a token if the request asked for them.
    `prompt_logprobs`, float32 [prompt_tokens - 1], comes once, with the first Output after the prompt: of each prompt
    token but the first.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    rows: RowCounts = field(default_factory=RowCounts)
    times: RequestTimes = field(default_factory=RequestTimes)
    device_pages: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: npt.NDArray[np.float32] | None = None


Deliver = Callable[[Output], None]
"""Called on the scheduler thread with each Output; must hand it on without blocking."""
