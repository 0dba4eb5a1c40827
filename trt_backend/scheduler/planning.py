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
    """A batch and whose it is: `parts` in the batch's order, decoding requests first; their slots and token counts."""

    batch: StepBatch
    parts: tuple[Part, ...]
    slots: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


def plan_step(running: Sequence[Running], hierarchy: Hierarchy, chunk_tokens: int) -> Step | None:
    """One token for every decoding session that has room for it, and up to `chunk_tokens` tokens of prompts.

    Prompts go on in order of admission: the oldest first, the next with what is left. A session that has no room
    because a backup lags sits this step out. None when there is nothing to do.
    """
    if not running:
        return None
    slots = np.array([r.session.slot for r in running], dtype=np.int32)
    rooms = hierarchy.rooms(slots).tolist()
    importing = hierarchy.columns.importing[slots].tolist()
    parts = [
        Part(r, 1, True) for r, room, imports in zip(running, rooms, importing, strict=True) if room and not imports
    ]
    decodes = len(parts)
    left = chunk_tokens
    for r, room, imports in zip(running, rooms, importing, strict=True):
        if imports and room and left:
            part = _prompt_part(r, min(left, room))
            parts.append(part)
            left -= part.count
    return _flatten(parts, decodes, hierarchy) if parts else None


def _prompt_part(running: Running, count: int) -> Part:
    session, request = running.session, running.request
    if request.score_prompt:
        count = min(count, SCORED_TOKENS)
    end = session.length + count
    complete = end == session.prompt_tokens
    scored = min(count, session.prompt_tokens - 1 - session.length) if request.score_prompt else 0
    return Part(running, count, yields_token=complete and request.max_tokens > 0, scored=scored)


def _flatten(parts: Sequence[Part], decodes: int, hierarchy: Hierarchy) -> Step:
    slots = np.array([part.running.session.slot for part in parts], dtype=np.int32)
    counts = np.array([part.count for part in parts], dtype=np.int32)
    placement = hierarchy.place(slots, counts)
    pending = np.array([part.running.pending for part in parts[:decodes]], dtype=np.int32)
    batch = StepBatch(
        tokens=np.concatenate([pending, *map(_prompt_tokens, parts[decodes:])]),
        positions=placement.positions,
        slots=placement.slots,
        rows=placement.rows,
        index_rows=placement.index_rows,
        decodes=decodes,
        logits_of=_logits_of(parts),
        recycled=tuple(hierarchy.take_recycled()),
    )
    return Step(batch, tuple(parts), slots, counts)


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


def _prompt_tokens(part: Part) -> npt.NDArray[np.int32]:
    first = part.running.session.length
    return part.running.request.prompt[first : first + part.count]
