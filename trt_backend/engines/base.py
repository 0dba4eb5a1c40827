"""The protocol between the scheduler and an engine: one step over a flat batch of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_backend.kv.layout import KvLayout
from trt_backend.kv.tables import Recycled, SlotTables

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, flat: first one token for each decoding session, then chunks of prompts.

    Every array is int32 of shape [tokens] unless said otherwise. A chunk's tokens are consecutive and in order of
    position, and its rows of earlier positions are all READY on the device or in the tail.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    rows: Int32
    """Arena row that receives the token's KV row, in every source."""
    index_rows: Int32
    """Row of the index-key arena that receives the token's index keys, in every group."""
    decodes: int
    """The first `decodes` tokens resolve through the hot cache; the rest are prompt chunks, found directly."""
    logits_of: Int32
    """[wanted] indices of the tokens whose logits are wanted."""
    recycled: tuple[Recycled, ...] = ()
    """Pages that have left a tail since the last step and may be written by this one: before anything is written, what
    the latest resolve of the session in each group selected of them goes into the hot cache, page after page."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` float32 [wanted, vocabulary]; `counts` int64 [decodes, 5]: for each decoding token, selected rows
    found direct, hot and host, padding entries, and masked rows (a fault), summed over the index groups."""

    logits: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]


class Engine(Protocol):
    """Runs steps. Owned and called by the scheduler thread alone."""

    layout: KvLayout
    tables: SlotTables
    vocab_size: int

    def open_slot(self, slot: int) -> None:
        """Forget the hot cache of a slot that is about to have a new owner, and what the old one selected."""

    def step(self, batch: StepBatch) -> StepResult:
        """Run one step to its end: rows and index keys are written, logits are on the host."""
