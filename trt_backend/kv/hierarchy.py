"""The hierarchy of KV rows: admits sessions, places their rows, lends spare memory to them and takes it back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.kv.budget import Use
from trt_backend.kv.check import check
from trt_backend.kv.free_list import FreeList
from trt_backend.kv.layout import TAIL_PAGES, KvLayout
from trt_backend.kv.movement import Movement, Settled
from trt_backend.kv.pages import PageState, PageTable
from trt_backend.kv.reclaim import note_hits, reclaim_order
from trt_backend.kv.residency import Need, ResidencyPolicy, ResidencyTuning, need_of
from trt_backend.kv.session import Session, SessionColumns
from trt_backend.kv.tables import Recycled, SlotTables
from trt_backend.kv.transfers import Copy, Direction, Fence, PassedFence, Release, Transfers

Int32 = npt.NDArray[np.int32]
REFILL_QUANTUM = 8
"""Pages that one session gets before it is the next one's turn: copies of some pages are cheaper than of one."""


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


@dataclass(slots=True)
class Moved:
    """Pages moved since the start. `reclaimed` had to leave a session that wanted to keep them; `failures` are copies."""

    backed_up: int = 0
    refilled: int = 0
    reclaimed: int = 0
    reclaims: int = 0
    promoted: int = 0
    recycled: int = 0
    failures: int = 0


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
        self.sessions: dict[int, Session] = {}
        self.moved = Moved()
        self.contended = False
        """Somebody waits for memory: nothing of it is spare."""
        self._reserved = np.full(tables.host_map.shape, -1, dtype=np.int32)
        self._coming = np.zeros(tables.host_map.shape, dtype=np.bool_)
        self._movement = Movement(transfers, self.columns)
        self._latest_step: Fence = PassedFence()
        self._serial = 0
        self._turn = 0
        self._recycled: list[Recycled] = []
        self._failed: dict[int, str] = {}

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
            self._cover(need.device - self.pages.budget.free - self.pages.budget.counts[Use.IN_TRANSIT])
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
        self._reserved[slot, : need.host] = session.host_pages
        self.sessions[slot] = session
        return session

    # --- reclaim ---

    def _cover(self, deficit: int) -> None:
        if deficit <= 0 or self.pages.budget.counts[Use.OPTIONAL] < deficit:
            return
        before = self.pages.budget.counts[Use.OPTIONAL]
        for slot in reclaim_order(self.columns, self.tuning.reclaim_order).tolist():
            self._take_back(slot)
            self.moved.reclaims += 1
            if before - self.pages.budget.counts[Use.OPTIONAL] >= deficit:
                break
        self.moved.reclaimed += before - self.pages.budget.counts[Use.OPTIONAL]

    def _take_back(self, slot: int) -> None:
        """Take all optional pages of a session. Dirty ones are copied first, and stay readable meanwhile."""
        columns = self.columns
        owned = self.pages.owned_by(slot)
        owned = owned[self.pages.use[owned] == Use.OPTIONAL]
        state = self.pages.state[owned]
        index = self.pages.index[owned]
        clean = state == PageState.CLEAN
        self._leave(slot, index[clean], owned[clean])
        dirty = state == PageState.READY
        self.pages.move(owned[dirty], PageState.BACKING_UP, Use.IN_TRANSIT)
        slots = np.full(int(dirty.sum()), slot, dtype=np.int32)
        self._movement.back_up(slots, index[dirty], owned[dirty], self._reserved[slot, index[dirty]], self._latest_step)
        # What a copy writes or reads comes back behind the copy's fence.
        for moving in (PageState.BACKING_UP, PageState.REFILLING):
            self.pages.move(owned[state == moving], moving, Use.IN_TRANSIT)
        columns.optional[slot] = columns.dirty[slot] = columns.refilling[slot] = columns.refill_from[slot] = 0
        self._coming[slot] = False

    def _leave(self, slot: int, index: Int32, pages: Int32) -> None:
        """History whose host copies are complete leaves the device: host map in, ready map out, for the next step."""
        self.tables.host_map[slot, index] = self._reserved[slot, index]
        self.tables.ready_map[slot, index] = -1
        self.tables.changed.add(slot)
        self._let_go(pages)

    # --- steps ---

    def rooms(self, slots: Int32) -> Int32:
        """Positions of each session that can be written now, int32 [n]: the rest of the prompt, or what the tail takes
        before a backup lands."""
        columns = self.columns
        length = columns.length[slots]
        tail_end = (self.tables.tail_first[slots] + TAIL_PAGES) * self.layout.page_tokens
        if not self.policy.uses_host:
            tail_end = columns.limit[slots]
        decoding = np.minimum(tail_end, columns.limit[slots]) - length
        importing = columns.importing[slots]
        rooms: Int32 = np.where(importing, columns.prompt[slots] - length, decoding).astype(np.int32)
        for i in np.flatnonzero(importing).tolist():
            session = self.sessions[int(slots[i])]
            if session.need.windowed:
                rooms[i] = min(int(rooms[i]), self._window_room(session))
        return rooms

    def room(self, session: Session) -> int:
        """`rooms` of one session."""
        return int(self.rooms(np.array([session.slot], dtype=np.int32))[0])

    def _window_room(self, session: Session) -> int:
        """Positions of a windowed import: the page begun, the free ones of the window, and then the tail."""
        page_tokens = self.layout.page_tokens
        complete = session.prompt_tokens // page_tokens * page_tokens
        begun = -session.length % page_tokens
        pages = len(session.window) * page_tokens
        if session.length + begun + pages >= complete:
            return session.prompt_tokens - session.length
        return begun + pages

    def place(self, slots: Int32, counts: Int32) -> Placement:
        """Rows for the next `counts` positions of the sessions in `slots`, int32 [n] both; at most `rooms`.

        Raises:
            ValueError: a session has no room for so many.
        """
        rooms = self.rooms(slots)
        if (counts > rooms).any():
            i = int(np.argmax(counts > rooms))
            raise ValueError(f"{counts[i]} positions of slot {slots[i]} don't fit: there is room for {rooms[i]}")
        tables, page_tokens = self.tables, self.layout.page_tokens
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if self.columns.importing[slot] and self.sessions[slot].need.windowed:
                self._open_window(self.sessions[slot], count)
        owner = np.repeat(slots, counts)
        start = np.cumsum(counts) - counts
        positions = np.arange(len(owner), dtype=np.int32) + np.repeat(self.columns.length[slots] - start, counts)
        index, offset = np.divmod(positions, np.int32(page_tokens))
        in_tail = index >= tables.tail_first[owner]
        pages = np.where(in_tail, tables.tail_pages[owner, index % TAIL_PAGES], tables.ready_map[owner, index])
        return Placement(
            slots=owner,
            positions=positions.astype(np.int32),
            rows=(pages * page_tokens + offset).astype(np.int32),
            index_rows=(tables.index_map[owner, index] * page_tokens + offset).astype(np.int32),
        )

    def _open_window(self, session: Session, count: int) -> None:
        """Give pages of the window to the positions that come next."""
        page_tokens = self.layout.page_tokens
        first = self.layout.pages_for(session.length)
        last = min(self.layout.pages_for(session.length + count), session.prompt_tokens // page_tokens)
        for index in range(first, last):
            self.tables.ready_map[session.slot, index] = session.window.pop()
            self.tables.changed.add(session.slot)

    def wrote(self, slots: Int32, counts: Int32, step: Fence) -> None:
        """The step behind `step` writes what was placed: seal the pages that it completes."""
        self._latest_step = step
        columns, page_tokens = self.columns, self.layout.page_tokens
        before = columns.length[slots] // page_tokens
        columns.length[slots] += counts
        after = columns.length[slots] // page_tokens
        arrived = columns.importing[slots] & (columns.length[slots] >= columns.prompt[slots])
        columns.importing[slots[arrived]] = False
        sealed: list[tuple[int, int]] = []
        for i in np.flatnonzero((after > before) | arrived).tolist():
            slot, first, end = int(slots[i]), int(before[i]), int(after[i])
            history = min(end, int(self.tables.tail_first[slot]))
            self._complete_history(self.sessions[slot], first, history, bool(arrived[i]), step)
            sealed.extend((slot, index) for index in range(max(first, history), end))
        self._seal(sealed, step)

    def _complete_history(self, session: Session, first: int, end: int, arrived: bool, step: Fence) -> None:
        """Pages of a prompt are complete. They are copied at once where they are to leave soon; else that can wait."""
        slot = session.slot
        if first < end:
            index = np.arange(first, end, dtype=np.int32)
            pages = self.tables.ready_map[slot, first:end].copy()
            self.pages.index[pages] = index
            if self.policy.uses_host and (session.need.windowed or not self.policy.lends):
                self.pages.move(pages, PageState.BACKING_UP, Use.REQUIRED)
                slots = np.full(len(pages), slot, dtype=np.int32)
                self._movement.back_up(slots, index, pages, self._reserved[slot, index], step)
            else:
                self.pages.move(pages, PageState.READY, Use.REQUIRED)
        if arrived and self.policy.uses_host:
            self._lend(session)

    def _lend(self, session: Session) -> None:
        """The import is over: from now on its history is on the device only because, and while, there is room."""
        slot, columns = session.slot, self.columns
        self._let_go(np.array(session.window, dtype=np.int32))
        session.window = []
        index = np.flatnonzero(self.tables.ready_map[slot] >= 0)
        pages = self.tables.ready_map[slot, index]
        self.pages.move_each(pages, None, Use.OPTIONAL)
        columns.optional[slot] = len(pages)
        columns.dirty[slot] = int((self.pages.state[pages] == PageState.READY).sum())
        if not self.policy.lends:
            self._take_back(slot)

    # --- the tail ---

    def _seal(self, sealed: list[tuple[int, int]], step: Fence) -> None:
        """Tail pages are complete: they stay where there is room to spare, and are copied to the host otherwise."""
        if not sealed or not self.policy.uses_host:
            return
        kept: list[tuple[int, int, int]] = []
        leaving: list[tuple[int, int, int]] = []
        for slot, index in sealed:
            page = int(self.tables.tail_pages[slot, index % TAIL_PAGES])
            self.pages.index[page] = index
            first = index == self.tables.tail_first[slot]
            if first and self._promotes(len(kept)):
                kept.append((slot, index, page))
                self.tables.tail_first[slot] = index + 1  # so that a page behind it may be kept as well
            else:
                leaving.append((slot, index, page))
        self._keep(kept, PageState.READY)
        if leaving:
            slots, index, pages = np.array(leaving, dtype=np.int32).T.copy()
            self.pages.move(pages, PageState.BACKING_UP, Use.REQUIRED)
            self._movement.back_up(slots, index, pages, self._reserved[slots, index], step)

    def _promotes(self, already: int) -> bool:
        """Whether one more sealed page may stay: each costs a free page for the tail, and the reserve is not for it."""
        tuning = self.tuning
        spare = self.pages.budget.free - tuning.reserve_pages - already
        return self.policy.lends and tuning.promote_decode_pages and not self.contended and spare > 0

    def _keep(self, kept: list[tuple[int, int, int]], state: PageState) -> None:
        """Sealed pages, (slot, index, page) each, become optional; fresh ones take their places in the tails."""
        if not kept:
            return
        slots, index, pages = np.array(kept, dtype=np.int32).T.copy()
        self.pages.move_each(pages, state, Use.OPTIONAL)
        tables, columns = self.tables, self.columns
        tables.ready_map[slots, index] = pages
        np.add.at(columns.optional, slots, 1)
        if state is PageState.READY:
            np.add.at(columns.dirty, slots, 1)
        again = index + TAIL_PAGES < -(-columns.limit[slots] // self.layout.page_tokens)
        fresh = self.pages.take(int(again.sum()), int(slots[0]), PageState.FILLING)
        self.pages.assign(fresh, slots[again])
        tables.tail_pages[slots, index % TAIL_PAGES] = -1
        tables.tail_pages[slots[again], index[again] % TAIL_PAGES] = fresh
        tables.changed.update(slots.tolist())
        self.moved.promoted += len(kept)

    def _shorten_tail(self, slot: int) -> None:
        """Sealed pages whose copies have landed leave the tail, oldest first, or stay where there is room by now."""
        tables = self.tables
        last = self.layout.pages_for(int(self.columns.limit[slot]))
        while (index := int(tables.tail_first[slot])) < last and tables.host_map[slot, index] >= 0:
            column = index % TAIL_PAGES
            page = int(tables.tail_pages[slot, column])
            tables.tail_first[slot] = index + 1
            tables.changed.add(slot)
            if self._promotes(0):
                self._keep([(slot, index, page)], PageState.CLEAN)
                continue
            self.moved.recycled += 1
            self.columns.refill_from[slot] = min(int(self.columns.refill_from[slot]), index)
            if index + TAIL_PAGES < last:
                self._recycled.append(Recycled(slot, index, page))
                self.pages.move(np.array([page], dtype=np.int32), PageState.FILLING, Use.REQUIRED)
            else:
                tables.tail_pages[slot, column] = -1
                self._let_go(np.array([page], dtype=np.int32))

    def take_recycled(self) -> list[Recycled]:
        """Pages that have left tails since the last step, in order; the next step must be told."""
        recycled, self._recycled = self._recycled, []
        return recycled

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
        active = self.columns.active[copy.slots]
        in_transit = self.pages.use[copy.device_pages] == Use.IN_TRANSIT
        if settled.error is not None:
            self._fail(copy, settled.error)
        elif copy.direction is Direction.BACKUP:
            self._landed(copy, active, in_transit)
        else:
            self._refilled(copy, active, in_transit)
        for slot in np.unique(copy.slots[~active]).tolist():
            self._close_if_still(slot)

    def _landed(self, copy: Copy, active: npt.NDArray[np.bool_], in_transit: npt.NDArray[np.bool_]) -> None:
        """Host copies are complete: publish them, and let go of the pages that waited for this."""
        slots, index, pages = copy.slots, copy.index, copy.device_pages
        self.moved.backed_up += len(pages)
        self.pages.move_each(pages, PageState.CLEAN, None)
        self.tables.host_map[slots[active], index[active]] = self._reserved[slots[active], index[active]]
        leaving = active & in_transit
        self.tables.ready_map[slots[leaving], index[leaving]] = -1
        self.tables.changed.update(np.unique(slots[active]).tolist())
        self._let_go(pages[in_transit])
        required = active & (self.pages.use[pages] == Use.REQUIRED)
        for slot in np.unique(slots[required]).tolist():
            self._shorten_tail(slot)
            session = self.sessions[slot]
            if session.importing and session.need.windowed:
                self._return_to_window(session, index[required & (slots == slot)])

    def _return_to_window(self, session: Session, index: Int32) -> None:
        """Pages of an import that have their host copies are filled again, further on."""
        pages = self.tables.ready_map[session.slot, index]
        self.tables.ready_map[session.slot, index] = -1
        self.pages.move(pages, PageState.FILLING, Use.REQUIRED)
        session.window.extend(pages.tolist())

    def _refilled(self, copy: Copy, active: npt.NDArray[np.bool_], in_transit: npt.NDArray[np.bool_]) -> None:
        """Pages are back on the device, unless they have been taken meanwhile."""
        slots, index, pages = copy.slots, copy.index, copy.device_pages
        self._let_go(pages[in_transit])
        back = ~in_transit
        self.pages.move(pages[back], PageState.CLEAN, Use.OPTIONAL)
        self.tables.ready_map[slots[back], index[back]] = pages[back]
        self.tables.changed.update(np.unique(slots[back]).tolist())
        self._coming[slots[back], index[back]] = False
        np.add.at(self.columns.optional, slots[back], 1)
        np.subtract.at(self.columns.refilling, slots[back], 1)
        self.moved.refilled += int(back.sum())

    def _fail(self, copy: Copy, error: str) -> None:
        """A copy has failed. Without its backup a session can't go on; without a refill it can."""
        self.moved.failures += 1
        slots, pages = copy.slots, copy.device_pages
        active = self.columns.active[slots]
        in_transit = self.pages.use[pages] == Use.IN_TRANSIT
        if copy.direction is Direction.BACKUP:
            self.pages.move_each(pages, PageState.READY, None)
            self._let_go(pages[in_transit & ~active])
            self.pages.move_each(pages[in_transit & active], None, Use.OPTIONAL)  # until it is ended
            for slot in np.unique(slots[active]).tolist():
                self._failed[slot] = f"copying its rows to the host failed: {error}"
            return
        back = ~in_transit
        self._coming[slots[back], copy.index[back]] = False
        np.subtract.at(self.columns.refilling, slots[back], 1)
        self.columns.no_refill[slots[back]] = True
        self._let_go(pages)

    def take_failed(self) -> list[tuple[Session, str]]:
        """Sessions that can't go on, and why; whoever asks must `end` them now."""
        failed, self._failed = self._failed, {}
        return [(self.sessions[slot], reason) for slot, reason in failed.items() if slot in self.sessions]

    # --- spare memory ---

    def tend(self) -> None:
        """Use what is spare: bring history back to the device, and copy some of what has no host copy yet."""
        if not self.policy.lends:
            return
        self._refill()
        self._back_up_some()

    def _refill(self) -> None:
        """Restore host pages, session by session in turn. Only above reserve and hysteresis, and if nobody waits."""
        tuning, columns = self.tuning, self.columns
        spare = self.pages.budget.free - tuning.reserve_pages - tuning.hysteresis_pages
        left = min(spare, tuning.refill_pages_per_tick)
        if self.contended or left <= 0:
            return
        missing = self._refillable() - columns.optional - columns.refilling
        wanting = np.flatnonzero(columns.active & ~columns.importing & ~columns.no_refill & (missing > 0))
        wanting = np.concatenate([wanting[wanting >= self._turn], wanting[wanting < self._turn]])
        slots: list[Int32] = []
        places: list[Int32] = []
        for slot in wanting.tolist():
            if left <= 0:
                break
            index = self._missing_pages(slot, min(left, REFILL_QUANTUM))
            slots.append(np.full(len(index), slot, dtype=np.int32))
            places.append(index)
            left -= len(index)
            self._turn = slot + 1
        if not slots:
            return
        owner, index = np.concatenate(slots), np.concatenate(places)
        if len(index) == 0:
            return
        pages = self.pages.take(len(index), int(owner[0]), PageState.REFILLING, Use.OPTIONAL)
        self.pages.assign(pages, owner)
        self.pages.index[pages] = index
        self._coming[owner, index] = True
        np.add.at(columns.refilling, owner, 1)
        self._movement.refill(owner, index, pages, self._reserved[owner, index], PassedFence())

    def _refillable(self) -> Int32:
        """How many pages of each session may be on the device as history."""
        tail_first: Int32 = self.tables.tail_first
        if self.tuning.promote_decode_pages:
            return tail_first
        return np.minimum(tail_first, self.columns.prompt // self.layout.page_tokens)

    def _missing_pages(self, slot: int, count: int) -> Int32:
        """The first pages of a session that are on the host alone, at most `count`."""
        end = int(self._refillable()[slot])
        start = int(self.columns.refill_from[slot])
        absent = (self.tables.ready_map[slot, start:end] < 0) & ~self._coming[slot, start:end]
        found = np.flatnonzero(absent)[:count].astype(np.int32) + start
        if len(found):
            self.columns.refill_from[slot] = found[0]
        return found

    def _back_up_some(self) -> None:
        """Copy a few dirty pages, of those who would lose theirs first, while no other copy is under way."""
        count = self.tuning.backup_pages_per_tick
        if count == 0 or self._movement.copies:
            return
        for slot in reclaim_order(self.columns, self.tuning.reclaim_order).tolist():
            if self.columns.dirty[slot] == 0:
                continue
            index = np.flatnonzero(self.tables.ready_map[slot] >= 0).astype(np.int32)
            pages = self.tables.ready_map[slot, index]
            dirty = np.flatnonzero(self.pages.state[pages] == PageState.READY)[:count]
            self.pages.move(pages[dirty], PageState.BACKING_UP, Use.OPTIONAL)
            self.columns.dirty[slot] -= len(dirty)
            slots = np.full(len(dirty), slot, dtype=np.int32)
            self._movement.back_up(
                slots, index[dirty], pages[dirty], self._reserved[slot, index[dirty]], self._latest_step
            )
            return

    # --- the end ---

    def end(self, session: Session) -> None:
        """The session does no more steps; all it holds comes back once copies and steps under way are done."""
        slot = session.slot
        self.columns.active[slot] = False
        self.columns.optional[slot] = self.columns.dirty[slot] = self.columns.refilling[slot] = 0
        owned = self.pages.owned_by(slot)
        moving = np.isin(self.pages.state[owned], (PageState.BACKING_UP, PageState.REFILLING))
        self.pages.move_each(owned[moving], None, Use.IN_TRANSIT)
        self.pages.move_each(owned[~moving], PageState.RELEASING, Use.IN_TRANSIT)
        self._movement.release(Release(owned[~moving], self._latest_step))
        self.tables.clear(slot)
        self._coming[slot] = False
        self._recycled = [one for one in self._recycled if one.slot != slot]
        self._close_if_still(slot)

    def _close_if_still(self, slot: int) -> None:
        """An ended session's host pages, index keys and slot come back once no copy concerns it any more."""
        if self.columns.copies[slot] or self.columns.active[slot] or slot not in self.sessions:
            return
        session = self.sessions.pop(slot)
        none = np.empty(0, dtype=np.int32)
        self._movement.release(Release(none, self._latest_step, session.host_pages, session.index_pages, slot))

    def _let_go(self, pages: Int32) -> None:
        """Pages that the tables no longer name are free once the steps that saw the old tables are done."""
        if len(pages):
            self.pages.move_each(pages, PageState.RELEASING, Use.IN_TRANSIT)
            self._movement.release(Release(pages, self._latest_step))

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        check(self)

    def note_hits(self, slots: Int32, hits: npt.NDArray[np.int64]) -> None:
        """Count what a step's resolves found directly for the sessions in `slots`; see `reclaim.note_hits`."""
        note_hits(self.columns, slots, hits)

    @property
    def copying(self) -> int:
        """Pages that copies under way read or write."""
        return int(self.columns.copies.sum())

    @property
    def busy(self) -> bool:
        """Whether something waits for a fence, so that `poll` is worth calling again soon."""
        return self._movement.busy

    @property
    def oldest_copy(self) -> Copy | None:
        """The copy that has been under way longest."""
        return min(self._movement.copies, key=lambda copy: copy.started, default=None)
