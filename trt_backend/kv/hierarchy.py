"""The hierarchy of KV rows: admits sessions, places their rows, backs pages up, gives them back at their fences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.kv.budget import Use
from trt_backend.kv.free_list import FreeList
from trt_backend.kv.layout import TAIL_PAGES, KvLayout
from trt_backend.kv.pages import PageState, PageTable
from trt_backend.kv.residency import ResidencyPolicy, need_of
from trt_backend.kv.session import Session
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import Backup, Fence, PassedFence, Release, Transfers

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What a deployment has: slots, device pages, host pages and pages of index keys."""

    slots: int
    device_pages: int
    host_pages: int
    index_pages: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the next positions of a session are written: int32 [count] arena rows and index-key rows.

    Counted in tokens; sources whose rows stand for several tokens divide them by their ratio.
    """

    rows: Int32
    index_rows: Int32


class Hierarchy:
    """Owns every page, host page, index page and slot. Driven by the scheduler thread alone.

    A session's life: `admit`, then `place` and `wrote` around every step that writes rows of it, then `end`.
    `poll` carries on what waits for fences. The slot tables always describe what the next step may read.
    """

    def __init__(self, layout: KvLayout, policy: ResidencyPolicy, tables: SlotTables, transfers: Transfers,
                 sizes: PoolSizes) -> None:  # fmt: skip
        self.layout = layout
        self.policy = policy
        self.tables = tables
        self.sizes = sizes
        self.pages = PageTable(sizes.device_pages)
        self.host = FreeList(sizes.host_pages)
        self.index = FreeList(sizes.index_pages)
        self.slots = FreeList(sizes.slots)
        self.sessions: dict[int, Session] = {}
        self.backed_up_pages = 0
        self._transfers = transfers
        self._releases: list[Release] = []
        self._latest_step: Fence = PassedFence()

    # --- admission ---

    def refusal(self, prompt_tokens: int, max_length: int) -> str | None:
        """Why a request could not be admitted even alone, with the numbers and the setting; None when it could."""
        need = need_of(self.layout, self.policy, prompt_tokens, max_length)
        what = f"a {prompt_tokens}-token prompt that may become {max_length} tokens"
        if need.device > self.sizes.device_pages:
            return (
                f"{what} needs {need.device} device pages ({need.hot} hot cache, {need.tail} tail, {need.history} to "
                f"import, {need.growth} to grow); this deployment holds {self.sizes.device_pages} (device_pages)"
            )
        if need.host > self.sizes.host_pages:
            return f"{what} needs {need.host} host pages; this deployment holds {self.sizes.host_pages} (host_pages)"
        if need.index > self.sizes.index_pages:
            capacity = self.sizes.index_pages * self.layout.page_tokens
            return f"{what} needs index keys for {max_length} tokens; this deployment holds {capacity} (index_tokens)"
        return None

    def admit(self, prompt_tokens: int, max_length: int) -> Session | None:
        """Give a request everything it needs to run to its end, or nothing: None when something is short now."""
        need = need_of(self.layout, self.policy, prompt_tokens, max_length)
        if (
            self.slots.free < 1
            or need.device > self.pages.budget.free
            or need.host > self.host.free
            or need.index > self.index.free
        ):
            return None
        slot = int(self.slots.take(1)[0])
        hot = self.pages.take(need.hot, slot, PageState.HOT)
        filling = self.pages.take(need.history + need.tail + need.growth, slot, PageState.FILLING)
        history, tail, growth = np.split(filling, [need.history, need.history + need.tail])
        session = Session(
            slot=slot,
            prompt_tokens=prompt_tokens,
            max_length=max_length,
            need=need,
            host_pages=self.host.take(need.host),
            index_pages=self.index.take(need.index),
            growth=growth.tolist(),
        )
        tables = self.tables
        tables.clear(slot)
        tables.hot_pages[slot, : need.hot] = hot
        tables.ready_map[slot, : need.history] = history
        tables.tail_first[slot] = need.history
        tables.tail_pages[slot, (need.history + np.arange(need.tail)) % TAIL_PAGES] = tail
        tables.index_map[slot, : need.index] = session.index_pages
        self.sessions[slot] = session
        return session

    # --- steps ---

    def room(self, session: Session) -> int:
        """Positions that can be written now: the rest of the prompt, or what the tail takes before a backup lands."""
        if session.importing:
            return session.prompt_tokens - session.length
        tail_end = (int(self.tables.tail_first[session.slot]) + TAIL_PAGES) * self.layout.page_tokens
        return min(tail_end, session.max_length) - session.length

    def place(self, session: Session, count: int) -> Placement:
        """Rows for the next `count` positions; at most `room`."""
        if count > self.room(session):
            raise ValueError(
                f"{count} positions of slot {session.slot} don't fit: there is room for {self.room(session)}"
            )
        positions = np.arange(session.length, session.length + count, dtype=np.int32)
        index, offset = np.divmod(positions, self.layout.page_tokens)
        tables, slot = self.tables, session.slot
        in_tail = index >= tables.tail_first[slot]
        pages = np.where(in_tail, tables.tail_pages[slot, index % TAIL_PAGES], tables.ready_map[slot, index])
        return Placement(
            rows=pages * self.layout.page_tokens + offset,
            index_rows=tables.index_map[slot, index] * self.layout.page_tokens + offset,
        )

    def wrote(self, session: Session, count: int, step: Fence) -> None:
        """The step behind `step` writes the next `count` positions: seal the pages they complete."""
        self._latest_step = step
        first = session.length // self.layout.page_tokens
        session.length += count
        complete = session.length // self.layout.page_tokens
        boundary = min(max(first, session.need.history), complete)
        self._complete_history(session, first, boundary, step)
        for index in range(boundary, complete):
            self._seal_tail(session, index, step)
        self._give_up_history(session)

    def poll(self) -> None:
        """Carry on everything whose fence has passed."""
        for session in list(self.sessions.values()):
            while session.backups and session.backups[0].fence.done():
                self._land(session, session.backups.popleft())
            if session.ending and not session.backups:
                self._release_all(session)
        waiting = []
        for release in self._releases:
            if release.fence.done():
                self._free(release)
            else:
                waiting.append(release)
        self._releases = waiting

    @property
    def busy(self) -> bool:
        """Whether something waits for a fence, so that `poll` is worth calling again soon."""
        return bool(self._releases) or any(session.backups for session in self.sessions.values())

    def end(self, session: Session) -> None:
        """The session does no more steps; all it holds comes back once copies and steps under way are done."""
        session.ending = True
        if not session.backups:
            self._release_all(session)

    # --- completing pages ---

    def _complete_history(self, session: Session, first: int, end: int, step: Fence) -> None:
        if first >= end:
            return
        pages = self.tables.ready_map[session.slot, first:end].copy()
        if self.policy.keeps_history:
            self.pages.move(pages, PageState.READY, Use.REQUIRED)
        else:
            self._back_up(session, first, pages, step)

    def _seal_tail(self, session: Session, index: int, step: Fence) -> None:
        tables, slot, column = self.tables, session.slot, index % TAIL_PAGES
        page = tables.tail_pages[slot, column : column + 1].copy()
        if not self.policy.keeps_history:
            self._back_up(session, index, page, step)
            return
        self.pages.move(page, PageState.READY, Use.REQUIRED)
        tables.ready_map[slot, index] = page[0]
        tables.tail_pages[slot, column] = session.growth.pop(0) if session.growth else -1
        tables.tail_first[slot] = index + 1
        tables.changed.add(slot)

    def _back_up(self, session: Session, first: int, pages: Int32, step: Fence) -> None:
        self.pages.move(pages, PageState.BACKING_UP, Use.REQUIRED)
        host_pages = session.host_pages[first : first + len(pages)]
        fence = self._transfers.backup(pages, host_pages, after=step)
        session.backups.append(Backup(first, pages, host_pages, fence))

    # --- what fences allow ---

    def _land(self, session: Session, backup: Backup) -> None:
        self.pages.move(backup.device_pages, PageState.CLEAN, Use.REQUIRED)
        session.backed_up = backup.first + len(backup.device_pages)
        self.backed_up_pages += len(backup.device_pages)
        if not session.ending:
            self._give_up_history(session)
            self._recycle_tail(session)

    def _give_up_history(self, session: Session) -> None:
        """Once the import is over, history whose copies have landed leaves the device: host map in, ready map out."""
        first, end = session.released, min(session.backed_up, session.need.history)
        if session.importing or self.policy.keeps_history or first >= end:
            return
        tables, slot = self.tables, session.slot
        pages = tables.ready_map[slot, first:end].copy()
        tables.host_map[slot, first:end] = session.host_pages[first:end]
        tables.ready_map[slot, first:end] = -1
        tables.changed.add(slot)
        session.released = end
        self._let_go(pages)

    def _recycle_tail(self, session: Session) -> None:
        """Sealed pages whose copies have landed leave the tail; each takes the place three pages on, if needed."""
        tables, slot = self.tables, session.slot
        last = self.layout.pages_for(session.max_length)
        while (index := int(tables.tail_first[slot])) < session.backed_up:
            column = index % TAIL_PAGES
            page = tables.tail_pages[slot, column : column + 1].copy()
            tables.host_map[slot, index] = session.host_pages[index]
            tables.tail_first[slot] = index + 1
            tables.changed.add(slot)
            if index + TAIL_PAGES < last:
                self.pages.move(page, PageState.FILLING, Use.REQUIRED)
            else:
                tables.tail_pages[slot, column] = -1
                self._let_go(page)

    def _let_go(self, pages: Int32) -> None:
        """Pages that the tables no longer name are free once the steps that saw the old tables are done."""
        self.pages.move(pages, PageState.RELEASING, Use.IN_TRANSIT)
        self._releases.append(Release(pages, self._latest_step))

    def _release_all(self, session: Session) -> None:
        slot = session.slot
        owned = self.pages.owned_by(slot)
        for state in np.unique(self.pages.state[owned]):
            self.pages.move(owned[self.pages.state[owned] == state], PageState.RELEASING, Use.IN_TRANSIT)
        self.tables.clear(slot)
        del self.sessions[slot]
        self._releases.append(Release(owned, self._latest_step, session.host_pages, session.index_pages, slot))

    def _free(self, release: Release) -> None:
        self.pages.free(release.device_pages)
        self.host.give(release.host_pages)
        self.index.give(release.index_pages)
        if release.slot is not None:
            self.slots.give(np.array([release.slot], dtype=np.int32))

    # --- invariants ---

    def check(self) -> None:
        """Assert the invariants of the memory model that hold between any two calls."""
        self.pages.check()
        for slot, session in self.sessions.items():
            self._check_session(slot, session)
        named = np.concatenate([table[table >= 0] for table in self._page_columns()])
        assert len(np.unique(named)) == len(named), "a page has two owners"
        assert (self.pages.owner[named] >= 0).all(), "a table names a page that is on its way back"

    def _page_columns(self) -> tuple[Int32, Int32, Int32]:
        return self.tables.ready_map, self.tables.tail_pages, self.tables.hot_pages

    def _check_session(self, slot: int, session: Session) -> None:
        tables = self.tables
        index = np.arange(session.length // self.layout.page_tokens, dtype=np.int32)
        tail = index - tables.tail_first[slot]
        readable = (
            (tables.ready_map[slot, index] >= 0)
            | (tables.host_map[slot, index] >= 0)
            | ((tail >= 0) & (tail < TAIL_PAGES) & (tables.tail_pages[slot, index % TAIL_PAGES] >= 0))
        )
        assert readable.all(), f"slot {slot}: pages {index[~readable].tolist()} are nowhere"
        on_host = np.flatnonzero(tables.host_map[slot] >= 0)
        assert (on_host < session.backed_up).all(), f"slot {slot}: a host page is published before its bytes landed"
