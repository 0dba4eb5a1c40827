"""Planning one step: which sessions decode, which prompts go on, and the flat batch that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trt_backend.engines.base import StepBatch
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.session import Session
from trt_backend.request import Deliver, Request, RequestTimes, RowCounts


@dataclass(slots=True, eq=False)
class Running:
    """A request with a session. `pending` is its newest token, whose row is not written yet."""

    request: Request
    deliver: Deliver
    session: Session
    times: RequestTimes
    rows: RowCounts = field(default_factory=RowCounts)
    generated: int = 0
    pending: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """What one request has in a step: `count` tokens, and whether its next token comes out of it."""

    running: Running
    count: int
    yields_token: bool


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
        count = min(left, hierarchy.room(r.session))
        parts.append(Part(r, count, r.session.length + count == r.session.prompt_tokens))
        left -= count
    if not parts:
        return None
    return Step(_flatten(parts, len(decodes), hierarchy), tuple(parts))


def _flatten(parts: Sequence[Part], decodes: int, hierarchy: Hierarchy) -> StepBatch:
    placements = [hierarchy.place(part.running.session, part.count) for part in parts]
    ends = np.cumsum([part.count for part in parts])
    return StepBatch(
        tokens=np.concatenate([_tokens(part) for part in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(part.count) + part.running.session.length for part in parts]).astype(
            np.int32
        ),
        slots=np.repeat([part.running.session.slot for part in parts], [part.count for part in parts]).astype(np.int32),
        rows=np.concatenate([placement.rows for placement in placements]).astype(np.int32),
        index_rows=np.concatenate([placement.index_rows for placement in placements]).astype(np.int32),
        decodes=decodes,
        logits_of=(ends[[part.yields_token for part in parts]] - 1).astype(np.int32),
    )


def _tokens(part: Part) -> np.ndarray:  # type: ignore[type-arg]
    session = part.running.session
    if session.importing:
        return part.running.request.prompt[session.length : session.length + part.count]
    return np.array([part.running.pending])
