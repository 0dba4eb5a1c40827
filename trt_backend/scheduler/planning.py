"""Planning one step: which sessions decode, which prompts go on, and the flat batch that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trt_backend.engines.base import StepBatch
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.session import Session
from trt_backend.request import Deliver, Request, RequestTimes, RowCounts
from trt_backend.scheduler.sampling import Sampler

SCORED_TOKENS = 128
"""Tokens of a prompt that are scored in one step: their logits are all kept, a vocabulary's width each."""


@dataclass(slots=True, eq=False)
class Running:
    """A request with a session. `pending` is its newest token, whose row is not written yet.

    `scores` are pieces of the prompt's log-probabilities, `scores_told` whether they have been delivered.
    """

    request: Request
    deliver: Deliver
    session: Session
    times: RequestTimes
    sampler: Sampler
    rows: RowCounts = field(default_factory=RowCounts)
    pending: int = -1
    scores: list[npt.NDArray[np.float32]] = field(default_factory=list)
    scores_told: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one request has in a step: `count` tokens, and whether its next token comes out of it.

    `scored` of them, the first ones, are wanted for the log-probabilities of the tokens that follow them.
    """

    running: Running
    count: int
    yields_token: bool
    scored: int = 0

    @property
    def logits(self) -> int:
        """How many rows of logits it wants."""
        return self.scored + self.yields_token


@dataclass(frozen=True, slots=True)
class Step:
    """A batch and whose it is: `parts` in the batch's order, decoding requests first."""

    batch: StepBatch
    parts: tuple[Part, ...]


def plan_step(running: Sequence[Running], hierarchy: Hierarchy, chunk_tokens: int) -> Step | None:
    """One token for every decoding session that has room for it, and up to `chunk_tokens` tokens of prompts.

    Prompts go on in order of admission: the oldest first, the next with what is left. A session whose tail is full
    because a backup lags sits this step out. None when there is nothing to do.
    """
    decodes = [r for r in running if not r.session.importing and hierarchy.room(r.session) > 0]
    parts = [Part(r, 1, True) for r in decodes]
    left = chunk_tokens
    for r in running:
        if not r.session.importing or left == 0:
            continue
        part = _prompt_part(r, min(left, hierarchy.room(r.session)))
        parts.append(part)
        left -= part.count
    if not parts:
        return None
    return Step(_flatten(parts, len(decodes), hierarchy), tuple(parts))


def _prompt_part(running: Running, count: int) -> Part:
    session, request = running.session, running.request
    if request.score_prompt:
        count = min(count, SCORED_TOKENS)
    end = session.length + count
    complete = end == session.prompt_tokens
    scored = min(count, session.prompt_tokens - 1 - session.length) if request.score_prompt else 0
    return Part(running, count, yields_token=complete and request.max_tokens > 0, scored=scored)


def _flatten(parts: Sequence[Part], decodes: int, hierarchy: Hierarchy) -> StepBatch:
    placements = [hierarchy.place(part.running.session, part.count) for part in parts]
    return StepBatch(
        tokens=np.concatenate([_tokens(part) for part in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(part.count) + part.running.session.length for part in parts]).astype(
            np.int32
        ),
        slots=np.repeat([part.running.session.slot for part in parts], [part.count for part in parts]).astype(np.int32),
        rows=np.concatenate([placement.rows for placement in placements]).astype(np.int32),
        index_rows=np.concatenate([placement.index_rows for placement in placements]).astype(np.int32),
        decodes=decodes,
        logits_of=_logits_of(parts),
    )


def _logits_of(parts: Sequence[Part]) -> npt.NDArray[np.int32]:
    """Of each part its scored tokens, then its last one if a token comes out of it."""
    wanted: list[int] = []
    first = 0
    for part in parts:
        wanted.extend(range(first, first + part.scored))
        first += part.count
        if part.yields_token:
            wanted.append(first - 1)
    return np.array(wanted, dtype=np.int32)


def _tokens(part: Part) -> npt.NDArray[np.int32]:
    session = part.running.session
    if session.importing:
        return part.running.request.prompt[session.length : session.length + part.count]
    return np.array([part.running.pending], dtype=np.int32)
