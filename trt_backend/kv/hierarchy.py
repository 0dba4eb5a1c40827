"""The hierarchy of KV rows: admits sessions, places their rows, lends spare memory to them and takes it back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.kv.books import Books, Moved
from trt_backend.kv.budget import Use
from trt_backend.kv.check import check
from trt_backend.kv.free_list import FreeList
from trt_backend.kv.imports import Imports
from trt_backend.kv.layout import TAIL_PAGES, KvLayout
from trt_backend.kv.lending import Lending
from trt_backend.kv.movement import Movement, Settled
from trt_backend.kv.pages import PageState, PageTable
from trt_backend.kv.reclaim import note_hits
from trt_backend.kv.residency import Need, ResidencyPolicy, ResidencyTuning, need_of
from trt_backend.kv.session import Session, SessionColumns
from trt_backend.kv.tables import Recycled, SlotTables
from trt_backend.kv.tails import Tails
from trt_backend.kv.transfers import Copy, Direction, Fence, Release, Transfers

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What a deployment has: slots, device pages, host pages and pages of index keys; tokens of a prompt in a step."""

    slots: int
    device_pages: int
    host_pages: int
    index_pages: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the next positions of some sessions are written, one after another: int32 [positions] each.

    `rows` and `index_rows` are counted in tokens; sources whose rows stand for several divide them by their ratio.
    """

    slots: Int32
    positions: Int32
    rows: Int32
    index_rows: Int32


class Hierarchy:
    """Owns every page, host page, index page and slot. Driven by the scheduler thread alone.

    A session's life: `admit`, then `place` and `wrote` around every step that writes rows of it, then `end`.
    `poll` carries on what waits for fences, `tend` uses memory that is spare. The slot tables always describe what the
    next step may read.
    """

    def __init__(
        self,
        layout: KvLayout,
        policy: ResidencyPolicy,
        tables: SlotTables,
        transfers: Transfers,
        sizes: PoolSizes,
        tuning: ResidencyTuning | None = None,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.tuning = tuning or ResidencyTuning()
        self.tables = tables
        self.sizes = sizes
        self.pages = PageTable(sizes.device_pages)
        self.host = FreeList(sizes.host_pages)
        self.index = FreeList(sizes.index_pages)
        self.slots = FreeList(sizes.slots)
        self.columns = SessionColumns(sizes.slots)
        self._movement = Movement(transfers, self.columns)
        reserved = np.full(tables.host_map.shape, -1, dtype=np.int32)
        self.books = Books(layout, policy, self.tuning, tables, self.pages, self.columns, self._movement, reserved)
        self.lending = Lending(self.books)
        self._tails = Tails(self.books, self.lending)
        self._imports = Imports(self.books, self.lending)
        self._serial = 0
        self._failed: dict[int, str] = {}

    @property
    def sessions(self) -> dict[int, Session]:
        """By slot: those that run, and those that have ended and hold something yet."""
        return self.books.sessions

    @property
    def moved(self) -> Moved:
        """Pages moved since the start."""
        return self.books.moved

    def contend(self, contended: bool) -> None:
        """Say whether somebody waits for memory: then none of it is lent."""
        self.books.contended = contended

    # --- admission ---

    def need_of(self, prompt_tokens: int, max_length: int) -> Need:
        """What a session would take here."""
        return need_of(
            self.layout, self.policy, prompt_tokens, max_length, self.sizes.device_pages, self.sizes.chunk_tokens
        )

    def refusal(self, prompt_tokens: int, max_length: int) -> str | None:
        """Why a request could not be admitted even alone, with the numbers and the setting; None when it could."""
        need = self.need_of(prompt_tokens, max_length)
        what = f"a {prompt_tokens}-token prompt that may become {max_length} tokens"
        if need.device > self.sizes.device_pages:
            return (
                f"{what} needs {need.device} device pages ({need.hot} hot cache, {need.tail} tail, {need.history} to "
                f"import); this deployment holds {self.sizes.device_pages} (device_pages)"
            )
        if need.host > self.sizes.host_pages:
            return f"{what} needs {need.host} host pages; this deployment holds {self.sizes.host_pages} (host_pages)"
        if need.index > self.sizes.index_pages:
            capacity = self.sizes.index_pages * self.layout.page_tokens
            return f"{what} needs index keys for {max_length} tokens; this deployment holds {capacity} (index_tokens)"
        return None

    def admit(self, prompt_tokens: int, max_length: int) -> Session | None:
        """Give a request everything it needs to run to its end, or nothing: None when something is short now.

        If device pages are short, as many sessions lose all their optional pages as it takes to cover what is missing
        and not on its way back already; if all of them together don't cover it, nobody loses any. Pages come back
        with time: ask again. Nobody else may be admitted meanwhile.
        """
        need = self.need_of(prompt_tokens, max_length)
        if self.slots.free < 1 or need.host > self.host.free or need.index > self.index.free:
            return None
        if need.device > self.pages.budget.free:
            self.lending.cover(need.device - self.pages.budget.free - self.pages.budget.counts[Use.IN_TRANSIT])
            return None
        return self._open(need, prompt_tokens, max_length)

    def _open(self, need: Need, prompt_tokens: int, max_length: int) -> Session:
        slot = int(self.slots.take(1)[0])
        hot = self.pages.take(need.hot, slot, PageState.HOT)
        filling = self.pages.take(need.history + need.tail, slot, PageState.FILLING)
        history, tail = np.split(filling, [need.history])
        session = Session(
            slot=slot,
            prompt_tokens=prompt_tokens,
            max_length=max_length,
            need=need,
            host_pages=self.host.take(need.host),
            index_pages=self.index.take(need.index),
            columns=self.columns,
        )
        self._serial += 1
        self.columns.open(slot, prompt_tokens, max_length, self._serial)
        tables = self.tables
        tables.clear(slot)
        tables.hot_pages[slot, : need.hot] = hot
        if need.windowed:
            session.window = history.tolist()
        else:
            tables.ready_map[slot, : need.history] = history
        first = prompt_tokens // self.layout.page_tokens if self.policy.uses_host else need.history
        tables.tail_first[slot] = first
        tables.tail_pages[slot, (first + np.arange(need.tail)) % TAIL_PAGES] = tail
        tables.index_map[slot, : need.index] = session.index_pages
        self.books.reserved[slot, : need.host] = session.host_pages
        self.sessions[slot] = session
        return session

    # --- steps ---

    def rooms(self, slots: Int32) -> Int32:
        """Positions of each session that can be written now, int32 [n]: the rest of the prompt, or what the tail takes
        before a backup lands."""
        columns = self.columns
        length = columns.length[slots]
        tail_end = (self.tables.tail_first[slots] + TAIL_PAGES) * self.layout.page_tokens
        if not self.policy.uses_host:
            tail_end = columns.limit[slots]
        decoding: Int32 = np.minimum(tail_end, columns.limit[slots]) - length
        importing = columns.importing[slots]
        if not importing.any():
            return decoding
        rooms: Int32 = np.where(importing, columns.prompt[slots] - length, decoding)
        for i in importing.nonzero()[0].tolist():
            session = self.sessions[int(slots[i])]
            if session.need.windowed:
                rooms[i] = min(int(rooms[i]), self._imports.window_room(session))
        return rooms

    def room(self, session: Session) -> int:
        """`rooms` of one session."""
        return int(self.rooms(np.array([session.slot], dtype=np.int32))[0])

    def place(self, slots: Int32, counts: Int32) -> Placement:
        """Rows for the next `counts` positions of the sessions in `slots`, int32 [n] both; at most `rooms`.

        Raises:
            ValueError: a session has no room for so many.
        """
        rooms = self.rooms(slots)
        if (counts > rooms).any():
            i = int(np.argmax(counts > rooms))
            raise ValueError(f"{counts[i]} positions of slot {slots[i]} don't fit: there is room for {rooms[i]}")
        for i in self.columns.importing[slots].nonzero()[0].tolist():
            session = self.sessions[int(slots[i])]
            if session.need.windowed:
                self._imports.open_window(session, int(counts[i]))
        start = self.columns.length[slots]
        if len(slots) and (counts == counts[0]).all() and counts[0] <= self.layout.page_tokens:
            return self._place_blocks(slots, start, int(counts[0]))
        # Page by page first: positions are many, and few of a session's are in more than one page.
        page_tokens = self.layout.page_tokens
        end = start + counts
        first = start // page_tokens
        spanned = (end - 1) // page_tokens - first + 1
        owner, index = np.repeat(slots, spanned), _ramps(first, spanned)
        lengths = np.minimum(np.repeat(end, spanned), (index + 1) * page_tokens)
        lengths -= np.maximum(np.repeat(start, spanned), index * page_tokens)
        to_rows, to_index_rows = self._shifts(owner, index)
        positions = _ramps(start, counts)
        return Placement(
            slots=np.repeat(slots, counts),
            positions=positions,
            rows=positions + np.repeat(to_rows, lengths),
            index_rows=positions + np.repeat(to_index_rows, lengths),
        )

    def _place_blocks(self, slots: Int32, start: Int32, count: int) -> Placement:
        """`place` where all write equally many positions, a page at most: what decoding does."""
        page_tokens = self.layout.page_tokens
        first, last = start // page_tokens, (start + count - 1) // page_tokens
        positions = start[:, np.newaxis] + np.arange(count, dtype=np.int32)
        to_rows, to_index_rows = self._shifts(slots, first)
        rows, index_rows = positions + to_rows[:, np.newaxis], positions + to_index_rows[:, np.newaxis]
        crossing = (last > first).nonzero()[0]
        if len(crossing):
            beyond = positions[crossing] >= (last[crossing] * page_tokens)[:, np.newaxis]
            to_rows, to_index_rows = self._shifts(slots[crossing], last[crossing])
            there = positions[crossing]
            rows[crossing] = np.where(beyond, there + to_rows[:, np.newaxis], rows[crossing])
            index_rows[crossing] = np.where(beyond, there + to_index_rows[:, np.newaxis], index_rows[crossing])
        return Placement(np.repeat(slots, count), positions.reshape(-1), rows.reshape(-1), index_rows.reshape(-1))

    def _shifts(self, slots: Int32, index: Int32) -> tuple[Int32, Int32]:
        """What to add to positions of page `index` of each slot to get their rows, and their index rows."""
        tables, page_tokens = self.tables, self.layout.page_tokens
        in_tail = index >= tables.tail_first[slots]
        pages = tables.tail_pages[slots, index % TAIL_PAGES]
        if not in_tail.all():
            pages = np.where(in_tail, pages, tables.ready_map[slots, index])
        index_pages = tables.index_map[slots, index]
        return (pages - index) * page_tokens, (index_pages - index) * page_tokens

    def wrote(self, slots: Int32, counts: Int32, step: Fence) -> None:
        """The step behind `step` writes what was placed: seal the pages that it completes."""
        self.books.latest_step = step
        columns, page_tokens = self.columns, self.layout.page_tokens
        before = columns.length[slots] // page_tokens
        columns.length[slots] += counts
        after = columns.length[slots] // page_tokens
        if not (after > before).any() and not columns.importing[slots].any():
            return
        arrived = columns.importing[slots] & (columns.length[slots] >= columns.prompt[slots])
        columns.importing[slots[arrived]] = False
        history = np.minimum(after, np.maximum(before, self.tables.tail_first[slots]))
        for i in ((history > before) | arrived).nonzero()[0].tolist():
            session = self.sessions[int(slots[i])]
            self._imports.complete(session, int(before[i]), int(history[i]), step)
            if arrived[i]:
                self._imports.finish(session)
        sealed = after - history
        if sealed.any():
            self._tails.seal(np.repeat(slots, sealed), _ramps(history, sealed), step)

    def note_hits(self, slots: Int32, hits: npt.NDArray[np.int64]) -> None:
        """Count what a step's resolves found directly for the sessions in `slots`; see `reclaim.note_hits`."""
        note_hits(self.columns, slots, hits)

    def take_recycled(self) -> list[Recycled]:
        """Pages that have left tails since the last step, in order; the next step must be told."""
        return self._tails.take_recycled()

    # --- fences ---

    def poll(self) -> None:
        """Carry on everything whose fence has passed."""
        for settled in self._movement.settled():
            self._settle(settled)
        for release in self._movement.passed():
            self.pages.free(release.device_pages)
            self.host.give(release.host_pages)
            self.index.give(release.index_pages)
            if release.slot is not None:
                self.slots.give(np.array([release.slot], dtype=np.int32))

    def _settle(self, settled: Settled) -> None:
        copy = settled.copy
        if copy.direction is Direction.BACKUP:
            if settled.error is None:
                self._landed(copy)
            else:
                self._backup_failed(copy, settled.error)
        elif settled.error is None:
            self.lending.refilled(copy)
        else:
            self.lending.refill_failed(copy)
        self.moved.failures += settled.error is not None
        for slot in np.unique(copy.slots[~self.columns.active[copy.slots]]).tolist():
            self._close_if_still(slot)

    def _landed(self, copy: Copy) -> None:
        """Host copies are complete: publish them, and let go of the pages that waited for this."""
        slots, index, pages = copy.slots, copy.index, copy.device_pages
        self.moved.backed_up += len(pages)
        self.pages.move_each(pages, PageState.CLEAN, None)
        active = self.columns.active[slots]
        self.books.publish(slots[active], index[active])
        use = self.pages.use[pages]
        leaving = use == Use.IN_TRANSIT
        gone = active & leaving
        self.tables.ready_map[slots[gone], index[gone]] = -1
        np.minimum.at(self.columns.refill_from, slots[gone].astype(np.intp), index[gone])
        self.books.let_go(pages[leaving])
        required = active & (use == Use.REQUIRED)
        if required.any():
            self._tails.shorten(np.unique(slots[required]))
            self._refill_windows(slots[required], index[required])

    def _refill_windows(self, slots: Int32, index: Int32) -> None:
        for slot in np.unique(slots[self.columns.importing[slots]]).tolist():
            if self.sessions[slot].need.windowed:
                self._imports.backed_up(self.sessions[slot], index[slots == slot])

    def _backup_failed(self, copy: Copy, error: str) -> None:
        """Without its host copy a session can't go on."""
        slots, pages = copy.slots, copy.device_pages
        self.pages.move_each(pages, PageState.READY, None)
        active = self.columns.active[slots]
        taken = self.pages.use[pages] == Use.IN_TRANSIT
        self.books.let_go(pages[taken & ~active])
        self.pages.move_each(pages[taken & active], None, Use.REQUIRED)  # until it is ended
        for slot in np.unique(slots[active]).tolist():
            self._failed[slot] = f"copying its rows to the host failed: {error}"

    def take_failed(self) -> list[tuple[Session, str]]:
        """Sessions that can't go on, and why; whoever asks must `end` them now."""
        failed, self._failed = self._failed, {}
        return [(self.sessions[slot], reason) for slot, reason in failed.items() if self.columns.active[slot]]

    # --- spare memory ---

    def tend(self) -> None:
        """Use what is spare: bring history back to the device, and copy some of what has no host copy yet."""
        if self.policy.lends:
            self.lending.refill()
            self.lending.back_up_some()

    # --- the end ---

    def end(self, session: Session) -> None:
        """The session does no more steps; all it holds comes back once copies and steps under way are done."""
        slot, tables = session.slot, self.tables
        self.columns.active[slot] = False
        self.lending.forget(session)
        self._tails.forget(slot)
        self.columns.optional[slot] = self.columns.dirty[slot] = 0
        named = (tables.ready_map[slot], tables.tail_pages[slot], tables.hot_pages[slot])
        owned = np.concatenate([*(table[table >= 0] for table in named), np.array(session.window, dtype=np.int32)])
        moving = self.pages.state[owned] == PageState.BACKING_UP
        self.pages.move_each(owned[moving], None, Use.IN_TRANSIT)
        self.books.let_go(owned[~moving])
        tables.clear(slot)
        self._close_if_still(slot)

    def _close_if_still(self, slot: int) -> None:
        """An ended session's host pages, index keys and slot come back once no copy concerns it any more."""
        if self.columns.copies[slot] or self.columns.active[slot] or slot not in self.sessions:
            return
        session = self.sessions.pop(slot)
        none = np.empty(0, dtype=np.int32)
        self._movement.release(Release(none, self.books.latest_step, session.host_pages, session.index_pages, slot))

    # --- looking in ---

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        check(self)

    @property
    def copying(self) -> int:
        """Pages that copies under way read or write."""
        return int(self.columns.copies.sum())

    @property
    def busy(self) -> bool:
        """Whether something waits for a fence, so that `poll` is worth calling again soon."""
        return self._movement.busy

    def give_up_copies(self, seconds: float) -> None:
        """Count copies that have been under way for longer as failed for their sessions, which `take_failed` names.

        What such a copy reads or writes stays taken until its fence passes, if it ever does.
        """
        now = time.monotonic()
        for copy in self._movement.copies:
            if now - copy.started > seconds:
                way = "to the host" if copy.direction is Direction.BACKUP else "to the device"
                for slot in np.unique(copy.slots[self.columns.active[copy.slots]]).tolist():
                    pages = int((copy.slots == slot).sum())
                    self._failed[slot] = f"copying {pages} of its pages {way} has taken {now - copy.started:.1f} s"

    def waits(self, session: Session) -> str:
        """What keeps a session from going on, in words; nothing if it can."""
        if self.room(session) > 0:
            return ""
        now = time.monotonic()
        copies = [copy for copy in self._movement.copies if (copy.slots == session.slot).any()]
        pages = sum(int((copy.slots == session.slot).sum()) for copy in copies)
        longest = max((now - copy.started for copy in copies), default=0.0)
        return f"for {pages} pages that are being copied, the oldest for {longest:.1f} s"

    def shortage(self, prompt_tokens: int, max_length: int) -> str:
        """What a request waits for that is not admitted, with the numbers."""
        needs = self.need_of(prompt_tokens, max_length)
        pools = (
            ("slots", 1, self.slots.free, self.slots.capacity),
            ("device pages", needs.device, self.pages.budget.free, self.sizes.device_pages),
            ("host pages", needs.host, self.host.free, self.host.capacity),
            ("index pages", needs.index, self.index.free, self.index.capacity),
        )
        short = [f"{what}: {need} needed, {free} of {size} free" for what, need, free, size in pools if need > free]
        coming = self.pages.budget.counts[Use.IN_TRANSIT]
        return f"for {', '.join(short) or 'its turn'}; {coming} device pages are on their way back"


def _ramps(first: Int32, counts: Int32) -> Int32:
    """first[0], first[0] + 1, … (counts[0] of them), first[1], first[1] + 1, …; int32."""
    before = counts.cumsum(dtype=np.int32) - counts
    ramps: Int32 = np.arange(counts.sum(), dtype=np.int32) + np.repeat(first - before, counts)
    return ramps
