"""Whose optional memory is taken back first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.config import ReclaimOrder
from trt_backend.kv.session import SessionColumns

HITS_KEPT = 0.98
"""What of a session's direct hits still counts after another step: the last 50 steps or so are "lately"."""


def reclaim_order(columns: SessionColumns, order: ReclaimOrder) -> npt.NDArray[np.intp]:
    """Slots of the sessions that have optional pages, or get some, in the order in which they lose them.

    `oldest` and `newest` go by admission, `largest` by optional pages, `coldest` by direct hits a page lately; ties go
    to the oldest.
    """
    lent = columns.optional + columns.refilling
    lenders = np.flatnonzero(columns.active & (lent > 0))
    serial = columns.serial[lenders]
    if order is ReclaimOrder.OLDEST:
        key = serial.astype(np.float64)
    elif order is ReclaimOrder.NEWEST:
        key = -serial.astype(np.float64)
    elif order is ReclaimOrder.LARGEST:
        key = -lent[lenders].astype(np.float64)
    else:
        key = columns.hits[lenders] / lent[lenders]
    ordered: npt.NDArray[np.intp] = lenders[np.lexsort((serial, key))]
    return ordered


def note_hits(columns: SessionColumns, slots: npt.NDArray[np.int32], hits: npt.NDArray[np.int64]) -> None:
    """Count what a step's resolves found directly, int64 [n] for the decoding sessions in `slots`, int32 [n]."""
    columns.hits[slots] = columns.hits[slots] * HITS_KEPT + hits
