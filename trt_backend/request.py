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
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """A request that can't be served. `str()` is the message a client sees: `CODE id=REQUEST_ID detail`."""

    def __init__(self, code: ErrorCode, request_id: str, detail: str) -> None:
        super().__init__(f"{code.value} id={request_id} {detail}")
        self.code = code
        self.request_id = request_id
        self.detail = detail


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    `temperature` 0 is greedy (ties go to the lower token id). Otherwise tokens are drawn from
    softmax(logits / temperature) with a generator keyed by (`seed`, position): the same seed gives the same text
    whatever else is in the batch.
    """

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request, validated and tokenised.

    `prompt` is int32 [prompt_tokens], not empty. Generation stops after `max_tokens` new tokens or at the first
    token of `end_ids`, which is delivered as the last token of the stream (text faces hide it).
    """

    id: str
    prompt: npt.NDArray[np.int32]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_ids: frozenset[int] = frozenset()

    @property
    def max_length(self) -> int:
        """Longest this request may become, in tokens: prompt and new tokens."""
        return len(self.prompt) + self.max_tokens


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
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    rows: RowCounts = field(default_factory=RowCounts)
    times: RequestTimes = field(default_factory=RequestTimes)


Deliver = Callable[[Output], None]
"""Called on the scheduler thread with each Output; must hand it on without blocking."""
