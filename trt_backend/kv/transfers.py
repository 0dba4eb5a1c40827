"""What the hierarchy asks of the machinery that moves rows: copies, and fences that can be asked "done?"."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class Fence(Protocol):
    """A point in a stream of work: a CUDA event, or its CPU twin."""

    def done(self) -> bool:
        """Whether everything before this point has happened. Raises what made the work fail."""


class PassedFence:
    """The fence of work that was over when it returned: a synchronous step."""

    def done(self) -> bool:
        """Always."""
        return True


class Transfers(Protocol):
    """Copies between the device's arenas and the host pool, in all sources at once."""

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        """Copy device pages to host pages once `after` is done; the fence says when the bytes have landed."""

    def refill(self, host_pages: Int32, device_pages: Int32, after: Fence) -> Fence:
        """Copy host pages to device pages once `after` is done; the fence says when the bytes have landed."""


class Direction(Enum):
    """Which way a copy goes."""

    BACKUP = "backup"
    REFILL = "refill"


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages that are copied together, of one session or of several: int32 [n] each. `index` is a page's place in its
    session, `started` is of `time.monotonic`."""

    direction: Direction
    slots: Int32
    index: Int32
    device_pages: Int32
    fence: Fence
    started: float


NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Release:
    """What nobody will read after `fence`: device pages, and at a session's end the rest of what it held."""

    device_pages: Int32
    fence: Fence
    host_pages: Int32 = field(default_factory=lambda: NO_PAGES)
    index_pages: Int32 = field(default_factory=lambda: NO_PAGES)
    slot: int | None = None
