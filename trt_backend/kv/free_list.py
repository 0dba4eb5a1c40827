"""A stack of free ids: device pages, host pages, index pages and slots are all handed out by one of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class FreeList:
    """Ids 0 to `capacity` − 1, each free or taken. Taking and giving back are O(ids moved)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._taken = np.zeros(capacity, dtype=np.bool_)
        self._place = np.zeros(capacity, dtype=np.int32)
        self.free = capacity

    @property
    def used(self) -> int:
        """How many ids are taken."""
        return self.capacity - self.free

    def take(self, count: int) -> Int32:
        """Take `count` ids; int32 [count].

        Raises:
            MemoryError: fewer are free; nothing is taken.
        """
        if count > self.free:
            raise MemoryError(f"{count} needed, {self.free} of {self.capacity} free")
        ids = self._stack[self.free - count : self.free][::-1].copy()
        self.free -= count
        self._taken[ids] = True
        return ids

    def give(self, ids: Int32) -> None:
        """Give ids back.

        Raises:
            ValueError: an id is not taken, or named twice; nothing is given back.
        """
        order = np.arange(len(ids), dtype=np.int32)
        self._place[ids] = order  # of an id that is named twice, only the last place stays
        if (self._place[ids] != order).any() or not self._taken[ids].all():
            raise ValueError(f"ids {ids.tolist()} are not all taken, or not distinct")
        self._taken[ids] = False
        self._stack[self.free : self.free + len(ids)] = ids
        self.free += len(ids)
