"""Optional memory: history that is on the device only because there is room. Lent, taken back, and lent again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.kv.books import Books
from trt_backend.kv.budget import Use
from trt_backend.kv.pages import PageState
from trt_backend.kv.reclaim import reclaim_order
from trt_backend.kv.session import Session, tally
from trt_backend.kv.transfers import Copy, Direction, PassedFence

Int32 = npt.NDArray[np.int32]
REFILL_QUANTUM = 8
"""Pages that one session gets before it is the next one's turn: copies of some pages are cheaper than of one."""
SCAN_PAGES = 64
"""Pages of a session that are looked at in its turn for missing ones."""
BLOCK_PAGES = 64
"""Pages on loan are counted by so many places: whoever looks for them goes through the blocks that have any."""


class Lending:
    """What sessions have on loan are the pages that their ready maps name and the page table counts as optional."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._coming = np.zeros(books.reserved.shape, dtype=np.bool_)
        """Pages that a refill is on its way to, by slot and place."""
        slots, places = books.reserved.shape
        self._lent = np.zeros((slots, -(-places // BLOCK_PAGES)), dtype=np.int32)
        """Pages on loan, by slot and block of places. Added up, a slot's are its `optional` column."""
        self._turn = 0
        self._background: Copy | None = None

    # --- lending ---

    def lend(self, session: Session) -> None:
        """An import is over: from now on its history is on the device only because, and while, there is room."""
        books, slot = self._books, session.slot
        index = np.flatnonzero(books.tables.ready_map[slot] >= 0).astype(np.int32)
        pages = books.tables.ready_map[slot, index]
        books.pages.move_each(pages, None, Use.OPTIONAL)
        self._count(np.full(len(pages), slot, dtype=np.int32), index)
        books.columns.dirty[slot] = int((books.pages.state[pages] == PageState.READY).sum())
        if not books.policy.lends:
            self.take_back(np.array([slot], dtype=np.int32))

    def keep(self, slots: Int32, index: Int32, pages: Int32, state: PageState) -> None:
        """Pages that decoding has filled stay for now, READY or CLEAN."""
        books = self._books
        books.pages.move_each(pages, state, Use.OPTIONAL)
        books.tables.ready_map[slots, index] = pages
        self._count(slots, index)
        if state is PageState.READY:
            tally(books.columns.dirty, slots)
        books.moved.promoted += len(pages)

    def _count(self, slots: Int32, index: Int32) -> None:
        """Pages at these places of sessions are on loan from now on."""
        tally(self._books.columns.optional, slots)
        tally(self._lent.reshape(-1), slots.astype(np.intp) * self._lent.shape[1] + index // BLOCK_PAGES)

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
        for column in (columns.optional, columns.dirty, columns.refill_from, self._lent):
            column[slots] = 0

    def _all_lent(self, slots: Int32) -> tuple[Int32, Int32]:
        """Slots and places of all pages that some sessions have on loan, int32 [n] each."""
        ready_map = self._books.tables.ready_map
        width = ready_map.shape[1]
        line, block = self._lent[slots].nonzero()
        index = (block * BLOCK_PAGES)[:, np.newaxis] + np.arange(BLOCK_PAGES)
        places = index + (slots[line].astype(np.int64) * width)[:, np.newaxis]
        pages = ready_map.reshape(-1).take(places, mode="clip")
        present = (pages >= 0) & (index < width)
        owners = np.repeat(slots[line], np.count_nonzero(present, axis=1))
        lent = self._books.pages.use[pages[present]] == Use.OPTIONAL
        return owners[lent], index[present][lent].astype(np.int32)

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
        if len(wanting) == 0:
            return
        turn = int(wanting.searchsorted(self._turn))
        # Some need less than a quantum, so twice as many are looked at as would do.
        in_turn = np.concatenate([wanting[turn:], wanting[:turn]])[: 2 * -(-left // REFILL_QUANTUM)].astype(np.int32)
        slots, index = self._missing_pages(in_turn, ends[in_turn], left)
        if len(slots):
            self._turn = int(slots[-1]) + 1
            self._start(slots, index)
        else:  # what seems to be missing is still being copied away
            self._turn = int(in_turn[-1]) + 1

    def _start(self, slots: Int32, index: Int32) -> None:
        books = self._books
        pages = books.pages.take(len(index), int(slots[0]), PageState.REFILLING, Use.OPTIONAL)
        books.pages.assign(pages, slots, index)
        self._coming[slots, index] = True
        tally(books.columns.refilling, slots)
        books.movement.refill(slots, index, pages, books.reserved[slots, index], PassedFence())

    def _refill_ends(self) -> Int32:
        """Pages of each session, from its first, that may be on the device as history."""
        tail_first: Int32 = self._books.tables.tail_first
        if self._books.tuning.promote_decode_pages:
            return tail_first
        return np.minimum(tail_first, self._books.columns.prompt // self._books.layout.page_tokens)

    def _missing_pages(self, slots: Int32, ends: Int32, count: int) -> tuple[Int32, Int32]:
        """The next pages of some sessions that are on the host alone, a quantum each and `count` in all at most: slots
        and places, int32 [n] each."""
        tables, columns = self._books.tables, self._books.columns
        first, last = columns.refill_from[slots], tables.ready_map.shape[1] - 1
        index = first[:, np.newaxis] + np.arange(SCAN_PAGES, dtype=np.int32)
        places = slots[:, np.newaxis], np.minimum(index, last)
        absent = (tables.ready_map[places] < 0) & ~self._coming[places] & (index < ends[:, np.newaxis])
        wanted = absent & (absent.cumsum(axis=1) <= REFILL_QUANTUM)
        line, offset = (found[:count].astype(np.int32) for found in wanted.nonzero())
        seen = np.minimum(first + SCAN_PAGES, ends)
        # Who has more than it gets now goes on behind that: the latest of its places is written last.
        more = absent.sum(axis=1) > np.bincount(line, minlength=len(slots))
        seen[more] = first[more]
        going_on = more[line]
        seen[line[going_on]] = (first[line] + offset + 1)[going_on]
        columns.refill_from[slots] = seen
        return slots[line], first[line] + offset

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
        self._count(slots, index)
        tally(books.columns.refilling, slots, -1)
        books.moved.refilled += len(pages)

    def refill_failed(self, copy: Copy) -> None:
        """The sessions go on from their host copies, and are not refilled again."""
        books = self._books
        kept = books.pages.use[copy.device_pages] == Use.OPTIONAL
        slots = copy.slots[kept]
        self._coming[slots, copy.index[kept]] = False
        tally(books.columns.refilling, slots, -1)
        books.columns.no_refill[slots] = True
        books.let_go(copy.device_pages)

    # --- background backup ---

    def back_up_some(self) -> None:
        """Copy a few dirty pages, of those who would lose theirs first, once the few before them have landed."""
        books = self._books
        count = books.tuning.backup_pages_per_tick
        if count == 0 or not books.columns.dirty.any():
            return
        if any(copy is self._background for copy in books.movement.copies):
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
        self._background = books.movement.copies[-1]

    def forget(self, session: Session) -> None:
        """A session has ended: nothing comes to it any more, and it has nothing on loan."""
        self._lent[session.slot] = 0
        self._cancel_refills(np.array([session.slot], dtype=np.int32))
