"""The hierarchy under fences that pass in any order: no row is ever lost, wrong or overwritten while it can be read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.manual import ManualFence, ManualTransfers
from trt_backend.config import Residency
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import TAIL_PAGES, IndexGroup, KvLayout, KvSource
from trt_backend.kv.residency import POLICIES
from trt_backend.kv.session import Session
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import PassedFence

PAGE = 4
MAX_TOKENS = 96


def small_layout(hot_tokens: int = 8) -> KvLayout:
    return KvLayout(
        sources=(KvSource("only", row_bytes=8),),
        groups=(IndexGroup(sources=(0,), top_k=8, key_bytes=4),),
        page_tokens=PAGE,
        hot_tokens=hot_tokens,
    )


def small_hierarchy(residency: Residency, sizes: PoolSizes) -> tuple[Hierarchy, ManualTransfers]:
    layout = small_layout(0 if residency is Residency.RESIDENT else 8)
    tables = SlotTables.empty(layout, sizes.slots, MAX_TOKENS)
    device = np.full((sizes.device_pages, PAGE), -1, dtype=np.int64)
    pool = np.full((sizes.host_pages, PAGE), -1, dtype=np.int64)
    transfers = ManualTransfers(device, pool)
    return Hierarchy(layout, POLICIES[residency], tables, transfers, sizes), transfers


class Life(RuleBasedStateMachine):
    """Sessions come, write, and go, while copies and steps finish in an order of hypothesis's choosing.

    Every row holds a number that no other row of the run has, so that a wrong row can't look right.
    """

    @initialize(residency=st.sampled_from(list(Residency)), device_pages=st.integers(12, 40))
    def start(self, residency: Residency, device_pages: int) -> None:
        sizes = PoolSizes(slots=4, device_pages=device_pages, host_pages=60, index_pages=80)
        self.hierarchy, self.transfers = small_hierarchy(residency, sizes)
        self.written: dict[int, list[int]] = {}
        self.sessions: list[Session] = []
        self.next_tag = 0
        self.steps: list[tuple[ManualFence, tuple[npt.NDArray[np.int64], list[int]]]] = []

    @rule(prompt=st.integers(1, 60), extra=st.integers(1, 36))
    def admit(self, prompt: int, extra: int) -> None:
        if self.hierarchy.refusal(prompt, prompt + extra) is not None:
            return
        free = self.hierarchy.pages.budget.free
        session = self.hierarchy.admit(prompt, prompt + extra)
        if session is None:
            assert self.hierarchy.pages.budget.free == free, "a session that was not admitted took pages"
            return
        self.sessions.append(session)
        self.written[id(session)] = []

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One step writes some positions of some sessions; it can read everything that the tables name now."""
        fence = ManualFence()
        for session in data.draw(st.lists(st.sampled_from(self.sessions), unique=True, min_size=1)):
            room = self.hierarchy.room(session)
            if room == 0:
                continue
            count = data.draw(st.integers(1, room)) if session.importing else 1
            placement = self.hierarchy.place(session, count)
            tags = np.arange(self.next_tag, self.next_tag + count)
            self.next_tag += count
            assert len(np.unique(placement.index_rows)) == count
            self.transfers.device.reshape(-1)[placement.rows] = tags
            self.written[id(session)] += tags.tolist()
            self.hierarchy.wrote(session, count, fence)
        self.steps.append((fence, self._readable()))

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def step_ends(self, data: st.DataObject) -> None:
        """Steps end in order: they are on one stream."""
        fence, _ = self.steps.pop(0)
        fence.passed = True
        if data.draw(st.booleans()):
            self.hierarchy.poll()

    @precondition(lambda self: self.transfers.ready())
    @rule(data=st.data())
    def copy_lands(self, data: st.DataObject) -> None:
        """Copies land in any order."""
        self.transfers.do(data.draw(st.sampled_from(self.transfers.ready())))
        if data.draw(st.booleans()):
            self.hierarchy.poll()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        self.hierarchy.end(session)

    @rule()
    def poll(self) -> None:
        self.hierarchy.poll()

    @invariant()
    def the_books_are_true(self) -> None:
        self.hierarchy.check()

    @invariant()
    def every_row_is_where_the_tables_say(self) -> None:
        for session in self.sessions:
            assert self._read(session) == self.written[id(session)]

    @invariant()
    def a_step_under_way_still_finds_its_rows(self) -> None:
        for _, (rows, tags) in self.steps:
            assert self.transfers.device.reshape(-1)[rows].tolist() == tags

    def teardown(self) -> None:
        """Everything comes back once everything is over."""
        if not hasattr(self, "hierarchy"):
            return
        for session in self.sessions:
            self.hierarchy.end(session)
        for fence, _ in self.steps:
            fence.passed = True
        while self.transfers.waiting:
            self.transfers.do(self.transfers.ready()[-1])
        self.hierarchy.poll()
        assert self.hierarchy.pages.budget.free == self.hierarchy.sizes.device_pages
        assert (self.hierarchy.host.used, self.hierarchy.index.used, self.hierarchy.slots.used) == (0, 0, 0)
        assert not self.hierarchy.busy

    def _device_rows(self, session: Session) -> npt.NDArray[np.int64]:
        """Device row of every written position, or −1: the direct rule of the resolver."""
        tables, slot = self.hierarchy.tables, session.slot
        index, offset = np.divmod(np.arange(session.length), PAGE)
        tail = index - tables.tail_first[slot]
        in_tail = (tail >= 0) & (tail < TAIL_PAGES)
        pages = np.where(in_tail, tables.tail_pages[slot, index % TAIL_PAGES], tables.ready_map[slot, index])
        return np.where(pages >= 0, pages * PAGE + offset, -1)

    def _read(self, session: Session) -> list[int]:
        rows = self._device_rows(session)
        index, offset = np.divmod(np.arange(session.length), PAGE)
        pool = self.transfers.pool[self.hierarchy.tables.host_map[session.slot, index], offset]
        found: list[int] = np.where(rows >= 0, self.transfers.device.reshape(-1)[rows], pool).tolist()
        return found

    def _readable(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Rows of history that a step planned now may read on the device, and what they hold.

        A page that the tail takes anew is left out: later steps of the same stream write it, which disturbs no reader
        on a device, but this test writes at once.
        """
        rows: list[int] = []
        tags: list[int] = []
        for session in self.sessions:
            history = min(session.length, session.need.history * PAGE)
            device = self._device_rows(session)[:history]
            rows += device[device >= 0].tolist()
            tags += np.array(self.written[id(session)])[:history][device >= 0].tolist()
        return np.array(rows, dtype=np.int64), tags


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.long
class TestLongLife(Life.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=120, deadline=None)


def run_to(hierarchy: Hierarchy, transfers: ManualTransfers, session: Session, length: int) -> None:
    """Write a session's rows up to `length`, with every copy landing at once."""
    while session.length < length:
        count = min(hierarchy.room(session), length - session.length)
        assert count > 0
        hierarchy.place(session, count)
        hierarchy.wrote(session, count, PassedFence())
        while transfers.waiting:
            transfers.do(transfers.waiting[0])
        hierarchy.poll()


def test_history_leaves_the_device_when_the_import_is_over() -> None:
    sizes = PoolSizes(slots=1, device_pages=20, host_pages=20, index_pages=20)
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes)
    session = hierarchy.admit(prompt_tokens=42, max_length=80)
    assert session is not None
    assert hierarchy.pages.budget.counts == [20 - 15, 15, 0, 0]  # 2 hot, 3 tail, 10 to import
    run_to(hierarchy, transfers, session, 20)
    assert hierarchy.pages.budget.counts[Use.REQUIRED] == 15, "an import keeps its pages until it is over"
    run_to(hierarchy, transfers, session, 42)
    assert hierarchy.pages.budget.counts == [15, 5, 0, 0]
    assert (hierarchy.tables.ready_map[0] == -1).all()
    assert (hierarchy.tables.host_map[0, :10] == session.host_pages[:10]).all()


def test_decoding_in_hisparse_never_takes_another_page() -> None:
    sizes = PoolSizes(slots=1, device_pages=8, host_pages=24, index_pages=24)
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes)
    session = hierarchy.admit(prompt_tokens=10, max_length=96)
    assert session is not None
    run_to(hierarchy, transfers, session, 96)
    assert hierarchy.pages.budget.counts == [6, 2, 0, 0]  # the hot cache; its last pages complete, the tail is gone
    assert session.backed_up == 24


def test_a_session_whose_backups_lag_waits_instead_of_losing_rows() -> None:
    sizes = PoolSizes(slots=1, device_pages=8, host_pages=24, index_pages=24)
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes)
    session = hierarchy.admit(prompt_tokens=4, max_length=96)
    assert session is not None
    run_to(hierarchy, transfers, session, 4)
    for _ in range(TAIL_PAGES * PAGE):
        hierarchy.place(session, 1)
        hierarchy.wrote(session, 1, PassedFence())
        hierarchy.poll()
    assert hierarchy.room(session) == 0
    with pytest.raises(ValueError, match="there is room for 0"):
        hierarchy.place(session, 1)
    transfers.do(transfers.waiting[0])
    hierarchy.poll()
    assert hierarchy.room(session) == PAGE


def test_a_resident_session_keeps_every_row_on_the_device() -> None:
    sizes = PoolSizes(slots=1, device_pages=24, host_pages=0, index_pages=24)
    hierarchy, transfers = small_hierarchy(Residency.RESIDENT, sizes)
    session = hierarchy.admit(prompt_tokens=10, max_length=96)
    assert session is not None
    run_to(hierarchy, transfers, session, 96)
    assert (hierarchy.tables.ready_map[0] >= 0).all()
    assert hierarchy.pages.budget.counts == [0, 24, 0, 0]


def test_a_request_that_could_never_fit_is_refused_with_the_numbers() -> None:
    sizes = PoolSizes(slots=1, device_pages=12, host_pages=9, index_pages=30)
    hierarchy, _ = small_hierarchy(Residency.HISPARSE, sizes)
    assert hierarchy.refusal(28, 36) is None
    assert hierarchy.refusal(40, 44) == (
        "a 40-token prompt that may become 44 tokens needs 13 device pages (2 hot cache, 1 tail, 10 to import, "
        "0 to grow); this deployment holds 12 (device_pages)"
    )
    assert hierarchy.refusal(4, 40) == (
        "a 4-token prompt that may become 40 tokens needs 10 host pages; this deployment holds 9 (host_pages)"
    )


def test_nothing_is_taken_when_something_is_short() -> None:
    sizes = PoolSizes(slots=2, device_pages=20, host_pages=10, index_pages=30)
    hierarchy, _ = small_hierarchy(Residency.HISPARSE, sizes)
    assert hierarchy.admit(8, 24) is not None  # 6 host pages of 10
    before = (hierarchy.pages.budget.free, hierarchy.host.free, hierarchy.index.free, hierarchy.slots.free)
    assert hierarchy.admit(8, 24) is None
    assert (hierarchy.pages.budget.free, hierarchy.host.free, hierarchy.index.free, hierarchy.slots.free) == before
