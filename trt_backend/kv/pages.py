"""The page table: one line a device page, in columns."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from trt_backend.kv.budget import Budget, Use
from trt_backend.kv.free_list import FreeList

Int32 = npt.NDArray[np.int32]


class PageState(IntEnum):
    """Where a page is in its life: FILLING → READY → BACKING_UP → CLEAN → RELEASING → FREE, or REFILLING → CLEAN.

    HOT pages hold a session's hot cache and have no life of their own.
    """

    FREE = 0
    HOT = 1
    FILLING = 2
    READY = 3
    """Complete and readable, without a host copy: dirty."""
    BACKING_UP = 4
    CLEAN = 5
    """Complete and readable, with a host copy."""
    RELEASING = 6
    REFILLING = 7
    """A host copy is on its way into it; nobody may read it."""


NEXT_STATES: dict[PageState, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.HOT, PageState.FILLING, PageState.REFILLING}),
    PageState.HOT: frozenset({PageState.RELEASING}),
    PageState.FILLING: frozenset({PageState.READY, PageState.BACKING_UP, PageState.RELEASING}),
    PageState.READY: frozenset({PageState.BACKING_UP, PageState.RELEASING}),
    # Back to READY when the copy has failed.
    PageState.BACKING_UP: frozenset({PageState.CLEAN, PageState.READY}),
    # A tail page, or one of an import's window, whose copy has landed is filled anew.
    PageState.CLEAN: frozenset({PageState.RELEASING, PageState.FILLING}),
    PageState.REFILLING: frozenset({PageState.CLEAN, PageState.RELEASING}),
    PageState.RELEASING: frozenset({PageState.FREE}),
}


STATES, USES = tuple(PageState), tuple(Use)
USE_UNIT = 1 << 8
"""In a page's kind, the state is in the low byte and the use in the next."""


class PageTable:
    """Columns, one line a page: `state` and `use` (uint8), `owner` (int32 slot, −1 when free or on its way back) and
    `index` (int32: which of its session's pages a complete one is).

    Every change of a page goes through `take`, `move`, `move_each` and `free`, which keep the budget true and refuse
    steps that a page's life does not have. State and use are views of one column of kinds, for both change together.
    """

    def __init__(self, capacity: int) -> None:
        self.budget = Budget(capacity)
        self._kind = np.full(capacity, _kind(PageState.FREE, Use.FREE), dtype="<u2")
        self.state: npt.NDArray[np.uint8] = self._kind.view(np.uint8)[0::2]
        self.use: npt.NDArray[np.uint8] = self._kind.view(np.uint8)[1::2]
        self.owner = np.full(capacity, -1, dtype=np.int32)
        self.index = np.full(capacity, -1, dtype=np.int32)
        self._free = FreeList(capacity)

    def take(self, count: int, owner: int, state: PageState, use: Use = Use.REQUIRED) -> Int32:
        """Hand `count` free pages to slot `owner` in `state`; int32 [count].

        Raises:
            MemoryError: fewer are free; nothing is taken.
        """
        pages = self._free.take(count)
        self.owner[pages] = owner
        self._kind[pages] = _kind(state, use)
        self.budget.move(count, Use.FREE, use)
        return pages

    def assign(self, pages: Int32, owners: Int32, index: Int32) -> None:
        """Say whose pages are, and which, that were taken together for several slots."""
        self.owner[pages] = owners
        self.index[pages] = index

    def move(self, pages: Int32, state: PageState, use: Use) -> None:
        """Bring pages, all in one state and one use, to the next.

        Raises:
            ValueError: the pages differ, or a page's life has no such step.
        """
        if len(pages) == 0:
            return
        kinds = self._kind[pages]
        if (kinds != kinds[0]).any():
            before, used = PageState(self.state[pages[0]]), Use(self.use[pages[0]])
            raise ValueError(f"pages {pages.tolist()} are not all {before.name} and {used.name}")
        self._step(pages, int(kinds[0]), state, use)

    def move_each(self, pages: Int32, state: PageState | None, use: Use | None) -> None:
        """`move` for pages of different states and uses; None leaves a page's own."""
        if len(pages) == 0:
            return
        kinds = self._kind[pages]
        if (kinds == kinds[0]).all():
            self._step(pages, int(kinds[0]), state, use)
            return
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            self._step(pages[kinds == kind], kind, state, use)

    def _step(self, pages: Int32, kind: int, state: PageState | None, use: Use | None) -> None:
        """The next step in the life of pages of one kind."""
        before, used = STATES[kind % USE_UNIT], USES[kind // USE_UNIT]
        after = before if state is None else state
        if after != before and after not in NEXT_STATES[before]:
            raise ValueError(f"pages {pages.tolist()} can't go from {before.name} to {after.name}")
        counted = used if use is None else use
        self._kind[pages] = _kind(after, counted)
        if after == PageState.RELEASING:
            self.owner[pages] = -1
        self.budget.move(len(pages), used, counted)

    def free(self, pages: Int32) -> None:
        """Give RELEASING pages back, once nothing reads them any more."""
        self.move(pages, PageState.FREE, Use.FREE)
        self._free.give(pages)

    def owned_by(self, slot: int) -> Int32:
        """Ids of the pages of a slot, ascending; int32."""
        return np.flatnonzero(self.owner == slot).astype(np.int32)

    def check(self) -> None:
        """Assert that columns, budget and free list tell the same story."""
        self.budget.check()
        assert np.bincount(self.use, minlength=len(Use)).tolist() == self.budget.counts
        free = self.state == PageState.FREE
        assert ((free | (self.state == PageState.RELEASING)) == (self.owner < 0)).all()
        assert (free == (self.use == Use.FREE)).all()
        assert int(free.sum()) == self._free.free


def _kind(state: PageState, use: Use) -> int:
    return state + USE_UNIT * use
