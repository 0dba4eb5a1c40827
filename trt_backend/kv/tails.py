"""The newest pages of sessions: sealed, copied to the host, and then filled again or kept where there is room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.kv.books import Books
from trt_backend.kv.budget import Use
from trt_backend.kv.layout import TAIL_PAGES
from trt_backend.kv.lending import Lending
from trt_backend.kv.pages import PageState
from trt_backend.kv.tables import Recycled
from trt_backend.kv.transfers import Fence

Int32 = npt.NDArray[np.int32]


class Tails:
    """Three pages a session: one filling, one for the overflow of a block, one sealed and in backup."""

    def __init__(self, books: Books, lending: Lending) -> None:
        self._books = books
        self._lending = lending
        self._recycled: list[Recycled] = []

    def seal(self, slots: Int32, index: Int32, step: Fence) -> None:
        """Pages are complete, int32 [n] each, in order: they stay where there is room to spare, and are copied
        otherwise. A page stays only if it is the oldest of its tail, for a tail has no gaps."""
        books, tables = self._books, self._books.tables
        pages = tables.tail_pages[slots, index % TAIL_PAGES]
        books.pages.index[pages] = index
        oldest = index == tables.tail_first[slots]
        kept = oldest & (np.cumsum(oldest) <= self._spare())
        tables.tail_first[slots[kept]] += 1
        self._keep(slots[kept], index[kept], pages[kept], PageState.READY)
        leaving = ~kept
        books.back_up(slots[leaving], index[leaving], pages[leaving], Use.REQUIRED, step)

    def shorten(self, slots: Int32) -> None:
        """Pages whose copies have landed leave their tails, oldest first, or stay where there is room by now.

        Slots are distinct. One page of each tail at a time: there is rarely a second.
        """
        books, tables = self._books, self._books.tables
        while True:
            index = tables.tail_first[slots]
            last = -(-books.columns.limit[slots] // books.layout.page_tokens)
            landed = (index < last) & (tables.host_map[slots, np.minimum(index, last - 1)] >= 0)
            slots, index, last = slots[landed], index[landed], last[landed]
            if len(slots) == 0:
                return
            pages = tables.tail_pages[slots, index % TAIL_PAGES]
            tables.tail_first[slots] += 1
            spare = self._spare()
            self._keep(slots[:spare], index[:spare], pages[:spare], PageState.CLEAN)
            again = index + TAIL_PAGES < last
            again[:spare] = False
            self._fill_again(slots[again], index[again], pages[again])
            gone = ~again
            gone[:spare] = False
            self._drop(slots[gone], index[gone], pages[gone])

    def _spare(self) -> int:
        """How many sealed pages may stay: each costs a free page that takes its place in the tail."""
        books = self._books
        return books.spare() if books.policy.lends and books.tuning.promote_decode_pages else 0

    def _keep(self, slots: Int32, index: Int32, pages: Int32, state: PageState) -> None:
        """They become history on loan; fresh pages take their places."""
        if len(pages) == 0:
            return
        books, tables = self._books, self._books.tables
        tables.tail_pages[slots, index % TAIL_PAGES] = -1
        tables.changed[slots] = True
        self._lending.keep(slots, index, pages, state)
        again = index + TAIL_PAGES < -(-books.columns.limit[slots] // books.layout.page_tokens)
        slots, index = slots[again], index[again] + TAIL_PAGES
        if len(slots):
            fresh = books.pages.take(len(slots), int(slots[0]), PageState.FILLING)
            books.pages.assign(fresh, slots, index)
            tables.tail_pages[slots, index % TAIL_PAGES] = fresh

    def _fill_again(self, slots: Int32, index: Int32, pages: Int32) -> None:
        self._books.pages.move_each(pages, PageState.FILLING, Use.REQUIRED)
        self._recycled.extend(map(Recycled, slots.tolist(), index.tolist(), pages.tolist()))
        self._left(slots, index)

    def _drop(self, slots: Int32, index: Int32, pages: Int32) -> None:
        self._books.tables.tail_pages[slots, index % TAIL_PAGES] = -1
        self._books.let_go(pages)
        self._left(slots, index)

    def _left(self, slots: Int32, index: Int32) -> None:
        """Pages are on the host alone from now on. Slots are distinct."""
        books = self._books
        books.columns.refill_from[slots] = np.minimum(books.columns.refill_from[slots], index)
        books.tables.changed[slots] = True
        books.moved.recycled += len(slots)

    def take_recycled(self) -> list[Recycled]:
        """Pages that have left tails since the last step, in order; the next step must be told."""
        recycled, self._recycled = self._recycled, []
        return recycled

    def forget(self, slot: int) -> None:
        """A session has ended: its pages need not be told of."""
        self._recycled = [one for one in self._recycled if one.slot != slot]
