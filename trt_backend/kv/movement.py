"""Copies under way, and pages that wait for their last readers: everything that has a fence."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.kv.session import SessionColumns, tally
from trt_backend.kv.transfers import Copy, Direction, Fence, Release, Transfers

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Settled:
    """A copy that is over: landed, or failed with `error`."""

    copy: Copy
    error: str | None


class Movement:
    """Starts copies and releases, and tells when their fences have passed. Fences may pass in any order."""

    def __init__(self, transfers: Transfers, columns: SessionColumns) -> None:
        self._transfers = transfers
        self._columns = columns
        self.copies: list[Copy] = []
        self.releases: list[Release] = []

    @property
    def busy(self) -> bool:
        """Whether something waits for a fence."""
        return bool(self.copies or self.releases)

    def back_up(self, slots: Int32, index: Int32, device_pages: Int32, host_pages: Int32, after: Fence) -> None:
        """Copy pages to the host; they are BACKING_UP already."""
        if len(device_pages):
            fence = self._transfers.backup(device_pages, host_pages, after)
            self._note(Copy(Direction.BACKUP, slots, index, device_pages, fence, time.monotonic()))

    def refill(self, slots: Int32, index: Int32, device_pages: Int32, host_pages: Int32, after: Fence) -> None:
        """Copy pages from the host; they are REFILLING already."""
        fence = self._transfers.refill(host_pages, device_pages, after)
        self._note(Copy(Direction.REFILL, slots, index, device_pages, fence, time.monotonic()))

    def release(self, release: Release) -> None:
        """Wait until nobody can read something any more."""
        if len(release.device_pages) or release.slot is not None:
            self.releases.append(release)

    def settled(self) -> list[Settled]:
        """Copies that are over since the last call."""
        over: list[Settled] = []
        under_way = []
        for copy in self.copies:
            try:
                done, error = copy.fence.done(), None
            except Exception as fault:
                done, error = True, f"{type(fault).__name__}: {fault}"
            if done:
                over.append(Settled(copy, error))
                tally(self._columns.copies, copy.slots, -1)
            else:
                under_way.append(copy)
        self.copies = under_way
        return over

    def passed(self) -> list[Release]:
        """Releases whose fences have passed since the last call."""
        over: list[Release] = []
        waiting: list[Release] = []
        for release in self.releases:
            (over if release.fence.done() else waiting).append(release)
        self.releases = waiting
        return over

    def _note(self, copy: Copy) -> None:
        tally(self._columns.copies, copy.slots)
        self.copies.append(copy)
