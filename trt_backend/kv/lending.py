"""Optional memory: history that is on the device only because there is room. Lent, taken back, and lent again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.kv.books import Books
from trt_backend.kv.budget import Use
from trt_backend.kv.pages import PageState
from trt_backend.kv.reclaim import reclaim_order
from trt_backend.kv.session import Session
from trt_backend.kv.transfers import Copy, Direction, PassedFence

Int32 = npt.NDArray[np.int32]
REFILL_QUANTUM = 8
"""Pages that one session gets before it is the next one's turn: copies of some pages are cheaper than of one."""
SCAN_PAGES = 2048
"""Pages of a session that are looked at together for missing ones."""


class Lending:
    """What sessions have on loan are the pages that their ready maps name and the page table counts as optional."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._coming = np.zeros(books.reserved.shape, dtype=np.bool_)
        """Pages that a refill is on its way to, by slot and place."""
        self._turn = 0

    # --- lending ---

    def lend(self, session: Session) -> None:
        """An import is over: from now on its history is on the device only because, and while, there is room."""
        books, slot = self._books, session.slot
        index = np.flatnonzero(books.tables.ready_map[slot] >= 0).astype(np.int32)
        pages = books.tables.ready_map[slot, index]
        books.pages.move_each(pages, None, Use.OPTIONAL)
        books.columns.optional[slot] = len(pages)
        books.columns.dirty[slot] = int((books.pages.state[pages] == PageState.READY).sum())
        if not books.policy.lends:
            self.take_back(np.array([slot], dtype=np.int32))

    def keep(self, slots: Int32, index: Int32, pages: Int32, state: PageState) -> None:
        """Pages that decoding has filled stay for now, READY or CLEAN."""
        books = self._books
        books.pages.move_each(pages, state, Use.OPTIONAL)
        books.tables.ready_map[slots, index] = pages
        np.add.at(books.columns.optional, slots, 1)
        if state is PageState.READY:
            np.add.at(books.columns.dirty, slots, 1)
        books.moved.promoted += len(pages)

    # --- reclaim ---

    def cover(self, deficit: int) -> None:
        """Take the optional pages of as many whole sessions as it takes; of none if all together are too few."""
        books, columns = self._books, self._books.columns
        if deficit <= 0 or books.pages.budget.counts[Use.OPTIONAL] < deficit:
            return
        order = reclaim_order(columns, books.tuning.reclaim_order)
        lent = np.cumsum(columns.optional[order] + columns.refilling[order])
        losers = order[: int(np.searchsorted(lent, deficit)) + 1].astype(np.int32)
        books.moved.reclaims += len(losers)
        books.moved.reclaimed += int(lent[len(losers) - 1])
        self.take_back(losers)

    def take_back(self, slots: Int32) -> None:
        """Take all optional pages of some sessions. Dirty ones are copied first, and stay readable meanwhile; what a
        copy reads or writes comes back behind the copy's fence."""
        books, columns = self._books, self._books.columns
        owners, index = self._all_lent(slots)
        pages = books.tables.ready_map[owners, index]
        state = books.pages.state[pages]
        clean, dirty, moving = (state == kind for kind in (PageState.CLEAN, PageState.READY, PageState.BACKING_UP))
        books.publish(owners[clean], index[clean])
        books.tables.ready_map[owners[clean], index[clean]] = -1
        books.let_go(pages[clean])
        books.pages.move(pages[moving], PageState.BACKING_UP, Use.IN_TRANSIT)
        books.back_up(owners[dirty], index[dirty], pages[dirty], Use.IN_TRANSIT, books.latest_step)
        self._cancel_refills(slots)
        for column in (columns.optional, columns.dirty, columns.refill_from):
            column[slots] = 0

    def _all_lent(self, slots: Int32) -> tuple[Int32, Int32]:
        """Slots and places of all pages that some sessions have on loan, int32 [n] each."""
        tables = self._books.tables
        places = [np.flatnonzero(tables.ready_map[slot, : tables.tail_first[slot]] >= 0) for slot in slots.tolist()]
        owners = np.repeat(slots, [len(index) for index in places])
        index = np.concatenate(places).astype(np.int32)
        lent = self._books.pages.use[tables.ready_map[owners, index]] == Use.OPTIONAL
        return owners[lent], index[lent]

    def _cancel_refills(self, slots: Int32) -> None:
        books = self._books
        losers = np.zeros(len(self._coming), dtype=np.bool_)
        losers[slots] = True
        for copy in books.movement.copies:
            if copy.direction is Direction.REFILL:
                own = losers[copy.slots] & (books.pages.use[copy.device_pages] == Use.OPTIONAL)
                books.pages.move(copy.device_pages[own], PageState.REFILLING, Use.IN_TRANSIT)
                self._coming[copy.slots[own], copy.index[own]] = False
        books.columns.refilling[slots] = 0

    # --- refill ---

    def refill(self) -> None:
        """Restore host pages, session by session in turn. Only above reserve and hysteresis, and if nobody waits."""
        books, columns = self._books, self._books.columns
        left = min(books.spare() - books.tuning.hysteresis_pages, books.tuning.refill_pages_per_tick)
        if left <= 0:
            return
        ends = self._refill_ends()
        missing = ends - columns.optional - columns.refilling
        wanting = np.flatnonzero(columns.active & ~columns.importing & ~columns.no_refill & (missing > 0))
        in_turn = np.concatenate([wanting[wanting >= self._turn], wanting[wanting < self._turn]])
        slots, places = [], []
        for slot in in_turn.tolist():
            if left <= 0:
                break
            index = self._missing_pages(slot, int(ends[slot]), min(left, REFILL_QUANTUM))
            slots.append(np.full(len(index), slot, dtype=np.int32))
            places.append(index)
            left -= len(index)
            self._turn = slot + 1
        if places:
            self._start(np.concatenate(slots), np.concatenate(places))

    def _start(self, slots: Int32, index: Int32) -> None:
        if len(slots) == 0:  # what seemed to be missing is still being copied away
            return
        books = self._books
        pages = books.pages.take(len(index), int(slots[0]), PageState.REFILLING, Use.OPTIONAL)
        books.pages.assign(pages, slots, index)
        self._coming[slots, index] = True
        np.add.at(books.columns.refilling, slots, 1)
        books.movement.refill(slots, index, pages, books.reserved[slots, index], PassedFence())

    def _refill_ends(self) -> Int32:
        """Pages of each session, from its first, that may be on the device as history."""
        tail_first: Int32 = self._books.tables.tail_first
        if self._books.tuning.promote_decode_pages:
            return tail_first
        return np.minimum(tail_first, self._books.columns.prompt // self._books.layout.page_tokens)

    def _missing_pages(self, slot: int, end: int, count: int) -> Int32:
        """The first pages of a session that are on the host alone, at most `count`."""
        ready, coming = self._books.tables.ready_map[slot], self._coming[slot]
        start = int(self._books.columns.refill_from[slot])
        found: Int32 = np.empty(0, dtype=np.int32)
        for first in range(start, end, SCAN_PAGES):
            last = min(first + SCAN_PAGES, end)
            absent = ready[first:last] < 0
            absent &= ~coming[first:last]
            places = absent.nonzero()[0][: count - len(found)].astype(np.int32) + first
            found = np.concatenate([found, places]) if len(found) else places
            if len(found) == count:
                break
        self._books.columns.refill_from[slot] = found[-1] + 1 if len(found) else end
        return found

    def refilled(self, copy: Copy) -> None:
        """Pages are back on the device, unless they have been taken meanwhile."""
        books = self._books
        taken = books.pages.use[copy.device_pages] == Use.IN_TRANSIT
        books.let_go(copy.device_pages[taken])
        slots, index, pages = copy.slots[~taken], copy.index[~taken], copy.device_pages[~taken]
        if len(pages) == 0:
            return
        books.pages.move(pages, PageState.CLEAN, Use.OPTIONAL)
        books.tables.ready_map[slots, index] = pages
        books.tables.changed[slots] = True
        self._coming[slots, index] = False
        np.add.at(books.columns.optional, slots, 1)
        np.subtract.at(books.columns.refilling, slots, 1)
        books.moved.refilled += len(pages)

    def refill_failed(self, copy: Copy) -> None:
        """The sessions go on from their host copies, and are not refilled again."""
        books = self._books
        kept = books.pages.use[copy.device_pages] == Use.OPTIONAL
        slots = copy.slots[kept]
        self._coming[slots, copy.index[kept]] = False
        np.subtract.at(books.columns.refilling, slots, 1)
        books.columns.no_refill[slots] = True
        books.let_go(copy.device_pages)

    # --- background backup ---

    def back_up_some(self) -> None:
        """Copy a few dirty pages, of those who would lose theirs first, while no other copy is under way."""
        books = self._books
        count = books.tuning.backup_pages_per_tick
        if count == 0 or books.movement.copies:
            return
        order = reclaim_order(books.columns, books.tuning.reclaim_order)
        dirty_ones = order[books.columns.dirty[order] > 0]
        if len(dirty_ones) == 0:
            return
        slot = int(dirty_ones[0])
        _, index = self._all_lent(np.array([slot], dtype=np.int32))
        pages = books.tables.ready_map[slot, index]
        dirty = np.flatnonzero(books.pages.state[pages] == PageState.READY)[:count]
        books.columns.dirty[slot] -= len(dirty)
        slots = np.full(len(dirty), slot, dtype=np.int32)
        books.back_up(slots, index[dirty], pages[dirty], Use.OPTIONAL, books.latest_step)

    def forget(self, session: Session) -> None:
        """A session has ended: nothing comes to it any more."""
        self._cancel_refills(np.array([session.slot], dtype=np.int32))
