"""The hierarchy under fences that pass in any order: no row is ever lost, wrong or overwritten while it can be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.manual import ManualFence, ManualTransfers
from trt_backend.config import ReclaimOrder, Residency
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import TAIL_PAGES, IndexGroup, KvLayout, KvSource
from trt_backend.kv.lending import REFILL_QUANTUM
from trt_backend.kv.pages import PageState
from trt_backend.kv.reclaim import note_hits, reclaim_order
from trt_backend.kv.residency import POLICIES, ResidencyTuning
from trt_backend.kv.session import Session
from trt_backend.kv.tables import Recycled, SlotTables
from trt_backend.kv.transfers import PassedFence

PAGE = 2
MAX_TOKENS = 48
CHUNK = 6
BLOCK = 3
"""Tokens that an answer may go on by in a step, as verified drafts do: more than a page, so they span two or three."""
POISON = -55
"""What a page holds after it has been freed, on the device and on the host."""


def small_layout(hot_tokens: int) -> KvLayout:
    return KvLayout(
        sources=(KvSource("only", row_bytes=8),),
        groups=(IndexGroup(sources=(0,), top_k=2 * PAGE, key_bytes=4),),
        page_tokens=PAGE,
        hot_tokens=hot_tokens,
    )


def small_hierarchy(
    residency: Residency, sizes: PoolSizes, tuning: ResidencyTuning | None = None
) -> tuple[Hierarchy, ManualTransfers]:
    """Its freed pages are poisoned at once."""
    layout = small_layout(0 if residency is Residency.RESIDENT else 2 * PAGE)
    tables = SlotTables.empty(layout, sizes.slots, MAX_TOKENS)
    device = np.full((sizes.device_pages, PAGE), POISON, dtype=np.int64)
    pool = np.full((sizes.host_pages, PAGE), POISON, dtype=np.int64)
    transfers = ManualTransfers(device, pool)
    hierarchy = Hierarchy(layout, POLICIES[residency], tables, transfers, sizes, tuning)
    free_device, free_host = hierarchy.pages.free, hierarchy.host.give

    def poison_device(pages: npt.NDArray[np.int32]) -> None:
        device[pages] = POISON
        free_device(pages)

    def poison_host(pages: npt.NDArray[np.int32]) -> None:
        pool[pages] = POISON
        free_host(pages)

    hierarchy.pages.free = poison_device  # type: ignore[method-assign]
    hierarchy.host.give = poison_host  # type: ignore[method-assign]
    return hierarchy, transfers


@dataclass(frozen=True)
class Ask:
    """A request at the head of the queue."""

    prompt: int
    length: int


class Life(RuleBasedStateMachine):
    """Sessions come, write, and go, while copies and steps finish in an order of hypothesis's choosing.

    Every row holds a number that no other row of the run has, so that a wrong row can't look right. One request at a
    time stands at the head of the queue and is asked for again and again, as the scheduler does.
    """

    @initialize(
        residency=st.sampled_from([*Residency, Residency.ADAPTIVE, Residency.ADAPTIVE]),
        device_pages=st.integers(6, 40),
        order=st.sampled_from(list(ReclaimOrder)),
        reserve=st.integers(0, 6),
        hysteresis=st.integers(0, 3),
        refill=st.integers(1, 20),
        background=st.integers(0, 3),
        promote=st.booleans(),
        early=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 18), st.integers(0, 10)), max_size=3),
    )
    def start(
        self,
        residency: Residency,
        device_pages: int,
        order: ReclaimOrder,
        reserve: int,
        hysteresis: int,
        refill: int,
        background: int,
        promote: bool,
        early: list[tuple[int, int, int]],
    ) -> None:
        sizes = PoolSizes(4, device_pages, host_pages=60, index_pages=80, chunk_tokens=CHUNK)
        self.tuning = ResidencyTuning(order, reserve, hysteresis, refill, background, promote)
        self.hierarchy, self.transfers = small_hierarchy(residency, sizes, self.tuning)
        self.written: dict[int, list[int]] = {}
        self.sessions: list[Session] = []
        self.next_tag = 0
        self.steps: list[tuple[ManualFence, tuple[npt.NDArray[np.int64], list[int]]]] = []
        self.head: Ask | None = None
        for prompt, extra, ticks in early:  # so that there is something to lend and to take back
            if self.head is None:
                self.a_request_comes(prompt, extra)
            self.ticks(ticks, 0)

    # --- what the scheduler does ---

    @precondition(lambda self: self.head is None)
    @rule(prompt=st.integers(1, 30), extra=st.integers(1, 18))
    def a_request_comes(self, prompt: int, extra: int) -> None:
        if self.hierarchy.refusal(prompt, prompt + extra) is None:
            self.head = Ask(prompt, prompt + extra)
            self.hierarchy.contend(True)
            self.the_head_is_tried()

    @precondition(lambda self: self.head is not None)
    @rule()
    def the_head_is_tried(self) -> None:
        assert self.head is not None
        hierarchy = self.hierarchy
        need = hierarchy.need_of(self.head.prompt, self.head.length)
        counts = list(hierarchy.pages.budget.counts)
        lenders = reclaim_order(hierarchy.columns, self.tuning.reclaim_order)
        lent = hierarchy.columns.optional[lenders] + hierarchy.columns.refilling[lenders]
        session = hierarchy.admit(self.head.prompt, self.head.length)
        if session is not None:
            assert hierarchy.pages.budget.free == counts[Use.FREE] - need.device
            self.sessions.append(session)
            self.written[id(session)] = []
            self._head_is_gone()
            return
        assert hierarchy.pages.budget.free == counts[Use.FREE], "a session that was not admitted took pages"
        taken = counts[Use.OPTIONAL] - hierarchy.pages.budget.counts[Use.OPTIONAL]
        deficit = need.device - counts[Use.FREE] - counts[Use.IN_TRANSIT]
        if taken:
            assert taken >= deficit > 0
            losers = int(np.searchsorted(np.cumsum(lent), deficit)) + 1
            assert taken == lent[:losers].sum(), "more sessions lost pages than had to, or others than the order says"
        elif hierarchy.slots.free and need.host <= hierarchy.host.free and need.index <= hierarchy.index.free:
            assert deficit <= 0 or counts[Use.OPTIONAL] < deficit

    @precondition(lambda self: self.head is not None)
    @rule()
    def the_head_gives_up(self) -> None:
        self._head_is_gone()

    def _head_is_gone(self) -> None:
        self.head = None
        self.hierarchy.contend(False)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def one_step(self, data: st.DataObject) -> None:
        """A step writes some positions of some sessions."""
        chosen = data.draw(st.lists(st.sampled_from(self.sessions), unique=True, min_size=1))
        self._step(chosen, data.draw(st.integers(1, CHUNK)), data.draw(st.integers(1, BLOCK)))

    @precondition(lambda self: self.sessions)
    @rule(ticks=st.integers(2, 12), lag=st.integers(0, 2))
    def ticks(self, ticks: int, lag: int) -> None:
        """The scheduler goes round: every session takes part in every step, and steps end soon."""
        self.poll()
        for _ in range(ticks):
            self.poll()
            if self.head is not None:
                self.the_head_is_tried()
            self._step(self.sessions, CHUNK)
            self.tend()
            while len(self.steps) > lag:
                self.steps.pop(0)[0].passed = True

    def _step(self, chosen: list[Session], chunk: int, block: int = 1) -> None:
        """Prompts go on by a chunk, answers by a block. It can read all that the tables name when it is planned."""
        for recycled in self.hierarchy.take_recycled():
            session = self.hierarchy.sessions[recycled.slot]
            first = recycled.index * PAGE
            held = self.transfers.device[recycled.page].tolist()
            assert held == self.written[id(session)][first : first + PAGE], "a page was written before it was copied"
        rooms = [(session, self.hierarchy.room(session)) for session in chosen]
        parts = [
            (session.slot, min(room, chunk if session.importing else block)) for session, room in rooms if room > 0
        ]
        if parts:
            slots, counts = np.array(parts, dtype=np.int32).T
            fence, readable = ManualFence(), self._readable()
            self._write(slots, counts, fence)
            self.steps.append((fence, readable))

    def _write(self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], fence: ManualFence) -> None:
        placement = self.hierarchy.place(slots, counts)
        tags = np.arange(self.next_tag, self.next_tag + counts.sum())
        self.next_tag += len(tags)
        assert len(np.unique(placement.index_rows)) == len(np.unique(placement.rows)) == len(tags)
        assert placement.slots.tolist() == np.repeat(slots, counts).tolist()
        self.transfers.device.reshape(-1)[placement.rows] = tags
        for slot in slots.tolist():
            session = self.hierarchy.sessions[slot]
            own = placement.slots == slot
            expected = np.arange(session.length, session.length + own.sum())
            assert placement.positions[own].tolist() == expected.tolist()
            self.written[id(session)] += tags[own].tolist()
        self.hierarchy.wrote(slots, counts, fence)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def a_session_ends(self, data: st.DataObject) -> None:
        """It has all its tokens, is cancelled, or is late."""
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        self.hierarchy.end(session)

    @rule()
    def poll(self) -> None:
        self.hierarchy.poll()
        for session, reason in self.hierarchy.take_failed():
            assert reason == "copying its rows to the host failed: OSError: the test wants it to fail"
            self.sessions.remove(session)
            self.hierarchy.end(session)

    @rule()
    def tend(self) -> None:
        before = self.hierarchy.pages.budget.free
        self.hierarchy.tend()
        after = self.hierarchy.pages.budget.free
        if after < before:
            assert self.head is None, "memory was lent while somebody waits"
            assert after >= self.tuning.reserve_pages + self.tuning.hysteresis_pages
            assert before - after <= self.tuning.refill_pages_per_tick

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def rows_are_found_directly(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        hits = np.array([data.draw(st.integers(0, 50))])
        note_hits(self.hierarchy.columns, np.array([session.slot], dtype=np.int32), hits)

    # --- what the device does ---

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def a_step_ends(self, data: st.DataObject) -> None:
        """Steps end in order: they are on one stream."""
        fence, _ = self.steps.pop(0)
        fence.passed = True
        if data.draw(st.booleans()):
            self.poll()

    @precondition(lambda self: self.transfers.ready())
    @rule(data=st.data(), most=st.integers(1, 6))
    def copies_land(self, data: st.DataObject, most: int) -> None:
        """In any order."""
        for copy in data.draw(st.permutations(self.transfers.ready()))[:most]:
            self.transfers.do(copy)
        if data.draw(st.booleans()):
            self.poll()

    @precondition(lambda self: self.transfers.ready())
    @rule(data=st.data())
    def a_copy_fails(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)) == 0:
            self.transfers.fail(data.draw(st.sampled_from(self.transfers.ready())))
            self.poll()

    # --- what must always hold ---

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
        """Who waits is admitted once the others are gone, and everything comes back once everything is over."""
        if not hasattr(self, "hierarchy"):
            return
        self._end_everything()
        if self.head is not None:
            for _ in range(3):
                if self.head is not None:
                    self.the_head_is_tried()
                self._settle()
            assert self.head is None, "a request that fits an empty pool was not admitted to one"
        self._end_everything()
        assert self.hierarchy.pages.budget.free == self.hierarchy.sizes.device_pages
        assert (self.hierarchy.host.used, self.hierarchy.index.used, self.hierarchy.slots.used) == (0, 0, 0)
        assert not self.hierarchy.busy
        assert (self.transfers.device == POISON).all()
        assert (self.transfers.pool[:60] == POISON).all() or not self.hierarchy.policy.uses_host

    def _end_everything(self) -> None:
        for session in self.sessions:
            self.hierarchy.end(session)
        self.sessions = []
        self._settle()

    def _settle(self) -> None:
        for fence, _ in self.steps:
            fence.passed = True
        self.steps = []
        while self.transfers.waiting or self.hierarchy.busy:
            while self.transfers.waiting:
                self.transfers.do(self.transfers.ready()[-1])
            self.poll()

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
        if not self.hierarchy.policy.uses_host:
            assert (rows >= 0).all()
        pool = self.transfers.pool[self.hierarchy.tables.host_map[session.slot, index], offset]
        found: list[int] = np.where(rows >= 0, self.transfers.device.reshape(-1)[rows], pool).tolist()
        return found

    def _readable(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Rows of history that a step planned now may read on the device, and what they hold.

        Pages that are filled anew, of a tail or of an import's window, are left out: later steps of the same stream
        write them, which disturbs no reader on a device, but this test writes at once.
        """
        rows: list[int] = []
        tags: list[int] = []
        for session in self.sessions:
            if session.importing and session.need.windowed:
                continue
            history = min(session.length, int(self.hierarchy.tables.tail_first[session.slot]) * PAGE)
            device = self._device_rows(session)[:history]
            rows += device[device >= 0].tolist()
            tags += np.array(self.written[id(session)])[:history][device >= 0].tolist()
        return np.array(rows, dtype=np.int64), tags


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=2000, stateful_step_count=30, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(7200)
class TestLongLife(Life.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=60, deadline=None)


def write(hierarchy: Hierarchy, session: Session, count: int) -> None:
    """One step of one session, over when it returns."""
    slots, counts = np.array([session.slot], dtype=np.int32), np.array([count], dtype=np.int32)
    hierarchy.place(slots, counts)
    hierarchy.wrote(slots, counts, PassedFence())


def land(hierarchy: Hierarchy, transfers: ManualTransfers) -> None:
    """Every copy lands, and what waited for it goes on."""
    while transfers.waiting or hierarchy.busy:
        while transfers.waiting:
            transfers.do(transfers.waiting[0])
        hierarchy.poll()


def run_to(hierarchy: Hierarchy, transfers: ManualTransfers, session: Session, length: int) -> None:
    """Write a session's rows up to `length`, with every copy landing at once."""
    while session.length < length:
        count = min(hierarchy.room(session), length - session.length)
        assert count > 0
        write(hierarchy, session, count)
        land(hierarchy, transfers)


def admit(hierarchy: Hierarchy, prompt_tokens: int, max_length: int) -> Session:
    session = hierarchy.admit(prompt_tokens, max_length)
    assert session is not None
    return session


def sizes(slots: int = 1, device: int = 20, host: int = 60, index: int = 60) -> PoolSizes:
    return PoolSizes(slots, device, host, index, CHUNK)


def test_history_leaves_the_device_when_the_import_is_over() -> None:
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes())
    session = admit(hierarchy, prompt_tokens=21, max_length=40)
    assert hierarchy.pages.budget.counts == [20 - 15, 15, 0, 0]  # 2 hot, 3 tail, 10 to import
    run_to(hierarchy, transfers, session, 10)
    assert hierarchy.pages.budget.counts[Use.REQUIRED] == 15, "an import keeps its pages until it is over"
    run_to(hierarchy, transfers, session, 21)
    assert hierarchy.pages.budget.counts == [15, 5, 0, 0]
    assert (hierarchy.tables.ready_map[0] == -1).all()
    assert (hierarchy.tables.host_map[0, :10] == session.host_pages[:10]).all()


def test_decoding_in_hisparse_never_takes_another_page() -> None:
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes(device=8))
    session = admit(hierarchy, prompt_tokens=5, max_length=48)
    run_to(hierarchy, transfers, session, 48)
    assert hierarchy.pages.budget.counts == [6, 2, 0, 0]  # the hot cache; its last pages complete, the tail is gone
    assert (hierarchy.tables.host_map[0] >= 0).all()


def test_a_session_whose_backups_lag_waits_instead_of_losing_rows() -> None:
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes(device=8))
    session = admit(hierarchy, prompt_tokens=2, max_length=48)
    run_to(hierarchy, transfers, session, 2)
    for _ in range(TAIL_PAGES * PAGE):
        write(hierarchy, session, 1)
        hierarchy.poll()
    assert hierarchy.room(session) == 0
    with pytest.raises(ValueError, match="there is room for 0"):
        write(hierarchy, session, 1)
    transfers.do(transfers.waiting[0])
    hierarchy.poll()
    assert hierarchy.room(session) == PAGE


def test_a_resident_session_keeps_every_row_on_the_device() -> None:
    hierarchy, transfers = small_hierarchy(Residency.RESIDENT, sizes(device=24, host=0))
    session = admit(hierarchy, prompt_tokens=5, max_length=48)
    run_to(hierarchy, transfers, session, 48)
    assert (hierarchy.tables.ready_map[0] >= 0).all()
    assert hierarchy.pages.budget.counts == [0, 24, 0, 0]


def test_a_request_that_could_never_fit_is_refused_with_the_numbers() -> None:
    hierarchy, _ = small_hierarchy(Residency.HISPARSE, sizes(device=6, host=9, index=15))
    assert hierarchy.refusal(4, 18) == (
        "a 4-token prompt that may become 18 tokens needs 7 device pages (2 hot cache, 3 tail, 2 to import); "
        "this deployment holds 6 (device_pages)"
    )
    assert hierarchy.refusal(1, 4) is None
    hierarchy, _ = small_hierarchy(Residency.HISPARSE, sizes(device=12, host=9, index=15))
    assert hierarchy.refusal(2, 20) == (
        "a 2-token prompt that may become 20 tokens needs 10 host pages; this deployment holds 9 (host_pages)"
    )


def test_nothing_is_taken_when_something_is_short() -> None:
    hierarchy, _ = small_hierarchy(Residency.HISPARSE, sizes(slots=2, host=10))
    admit(hierarchy, 4, 12)  # 6 host pages of 10
    before = (hierarchy.pages.budget.free, hierarchy.host.free, hierarchy.index.free, hierarchy.slots.free)
    assert hierarchy.admit(4, 12) is None
    assert (hierarchy.pages.budget.free, hierarchy.host.free, hierarchy.index.free, hierarchy.slots.free) == before


def test_history_stays_dirty_on_the_device_until_somebody_needs_the_room() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(2, device=26), ResidencyTuning())
    first = admit(hierarchy, 20, 30)
    while first.importing:
        write(hierarchy, first, CHUNK if first.length + CHUNK <= 20 else 20 - first.length)
    assert not transfers.waiting, "a backup was made that nobody needs"
    assert hierarchy.pages.budget.counts == [26 - 15, 5, 10, 0]
    assert hierarchy.admit(20, 30) is None  # needs 15 of 11: 4 short, and the first session has 10
    assert hierarchy.pages.budget.counts == [11, 5, 0, 10]
    assert (hierarchy.tables.ready_map[first.slot, :10] >= 0).all(), "pages stay readable until they have a copy"
    assert hierarchy.admit(20, 30) is None
    assert len(transfers.waiting) == 1, "the same pages were taken twice"
    land(hierarchy, transfers)
    assert hierarchy.pages.budget.counts == [21, 5, 0, 0]
    assert (hierarchy.tables.host_map[first.slot, :10] >= 0).all()
    admit(hierarchy, 20, 30)
    assert hierarchy.moved.reclaimed == 10


def test_reclaim_leaves_other_sessions_alone() -> None:
    for order, loser in ((ReclaimOrder.OLDEST, 0), (ReclaimOrder.NEWEST, 2), (ReclaimOrder.LARGEST, 1)):
        hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(4, device=45), ResidencyTuning(order))
        sessions = [admit(hierarchy, prompt, 24) for prompt in (16, 20, 18)]
        for session in sessions:
            run_to(hierarchy, transfers, session, session.prompt_tokens)
        lent = [int(hierarchy.columns.optional[session.slot]) for session in sessions]
        assert lent == [8, 10, 9]
        assert hierarchy.admit(2, 10) is None
        left = [int(hierarchy.columns.optional[session.slot]) for session in sessions]
        assert left == [0 if number == loser else pages for number, pages in enumerate(lent)]


def test_the_coldest_session_is_the_one_whose_pages_are_hit_least() -> None:
    hierarchy, transfers = small_hierarchy(
        Residency.ADAPTIVE, sizes(4, device=45), ResidencyTuning(ReclaimOrder.COLDEST)
    )
    sessions = [admit(hierarchy, prompt, 24) for prompt in (16, 20, 18)]
    for session in sessions:
        run_to(hierarchy, transfers, session, session.prompt_tokens)
    slots = np.array([session.slot for session in sessions], dtype=np.int32)
    for _ in range(20):
        hierarchy.note_hits(slots, np.array([40, 45, 60]))  # 5, 4.5 and 6.7 a page
    assert hierarchy.admit(2, 10) is None
    assert hierarchy.columns.optional[slots].tolist() == [8, 0, 9]


def test_nothing_is_taken_where_it_would_not_be_enough() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(4, device=30), ResidencyTuning())
    session = admit(hierarchy, 20, 24)
    run_to(hierarchy, transfers, session, 20)
    importing = admit(hierarchy, 20, 24)
    assert hierarchy.pages.budget.counts == [2, 18, 10, 0]
    assert hierarchy.admit(20, 24) is None
    assert hierarchy.pages.budget.counts == [2, 18, 10, 0], "10 pages don't cover 12, and an import keeps its own"
    assert importing.importing


def test_history_comes_back_when_there_is_room_and_nobody_waits() -> None:
    tuning = ResidencyTuning(reserve_pages=2, hysteresis_pages=1, refill_pages_per_tick=4)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(2, device=26), tuning)
    first = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, first, 20)
    assert hierarchy.admit(20, 30) is None
    land(hierarchy, transfers)
    second = admit(hierarchy, 20, 30)
    hierarchy.contend(True)
    hierarchy.tend()
    assert hierarchy.moved.refilled == 0
    assert not transfers.waiting
    hierarchy.contend(False)
    hierarchy.tend()
    land(hierarchy, transfers)
    assert hierarchy.moved.refilled == 3, "6 pages are free; the reserve and the hysteresis keep 3"
    hierarchy.end(second)
    land(hierarchy, transfers)
    for expected in (7, 10, 10):
        hierarchy.tend()
        land(hierarchy, transfers)
        assert hierarchy.moved.refilled == expected
    assert (hierarchy.pages.state[hierarchy.tables.ready_map[first.slot, :10]] == PageState.CLEAN).all()


def test_sessions_are_refilled_in_turn() -> None:
    tuning = ResidencyTuning(refill_pages_per_tick=REFILL_QUANTUM)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(4, device=60), tuning)
    sessions = [admit(hierarchy, 20, 24) for _ in range(2)]
    for session in sessions:
        run_to(hierarchy, transfers, session, 20)
        hierarchy.lending.take_back(np.array([session.slot], dtype=np.int32))
    land(hierarchy, transfers)
    for expected in ([8, 0], [8, 8], [10, 10]):
        hierarchy.tend()
        land(hierarchy, transfers)
        assert hierarchy.columns.optional[[session.slot for session in sessions]].tolist() == expected


def test_a_refill_under_way_to_a_reclaimed_session_comes_back_behind_its_fence() -> None:
    tuning = ResidencyTuning(backup_pages_per_tick=0)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(2, device=26), tuning)
    session = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, session, 20)
    hierarchy.lending.take_back(np.array([session.slot], dtype=np.int32))
    land(hierarchy, transfers)
    hierarchy.tend()
    (refill,) = transfers.waiting
    assert hierarchy.pages.budget.counts[Use.OPTIONAL] == len(refill.device_pages) == REFILL_QUANTUM
    assert hierarchy.admit(24, 30) is None  # needs 17 of 13
    assert hierarchy.pages.budget.counts[Use.IN_TRANSIT] == REFILL_QUANTUM
    hierarchy.poll()
    assert hierarchy.pages.budget.counts[Use.IN_TRANSIT] == REFILL_QUANTUM, "the copy still writes them"
    land(hierarchy, transfers)
    assert hierarchy.pages.budget.counts[Use.IN_TRANSIT] == 0
    assert (hierarchy.tables.ready_map[session.slot] == -1).all()


def test_pages_that_decoding_fills_stay_while_there_is_room() -> None:
    tuning = ResidencyTuning(reserve_pages=3)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(device=12), tuning)
    session = admit(hierarchy, 2, 48)
    run_to(hierarchy, transfers, session, 2)
    run_to(hierarchy, transfers, session, 30)
    assert hierarchy.pages.budget.free == 3, "promotion went below the reserve, or stopped above it"
    assert hierarchy.moved.promoted == 3
    assert (hierarchy.tables.ready_map[session.slot, :4] >= 0).all()
    assert (hierarchy.tables.ready_map[session.slot, 4:] == -1).all()


def test_without_promotion_they_leave() -> None:
    tuning = ResidencyTuning(promote_decode_pages=False)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(device=30), tuning)
    session = admit(hierarchy, 2, 48)
    run_to(hierarchy, transfers, session, 30)
    hierarchy.tend()
    assert hierarchy.pages.budget.counts == [24, 5, 1, 0]
    assert hierarchy.moved.promoted == 0


def test_a_recycled_page_is_told_of_before_it_is_written_again() -> None:
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes(device=8))
    session = admit(hierarchy, prompt_tokens=2, max_length=48)
    run_to(hierarchy, transfers, session, 2)
    first = int(hierarchy.tables.tail_pages[session.slot, 1])
    run_to(hierarchy, transfers, session, 4)
    assert hierarchy.take_recycled() == [Recycled(session.slot, 1, first)]
    assert hierarchy.take_recycled() == []


def test_dirty_pages_are_backed_up_little_by_little_so_that_taking_them_is_quick() -> None:
    tuning = ResidencyTuning(backup_pages_per_tick=3)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(2, device=26), tuning)
    session = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, session, 20)
    for expected in (3, 6, 9, 10, 10):
        hierarchy.tend()
        hierarchy.tend()
        assert len(transfers.waiting) <= 1, "background copies pile up"
        land(hierarchy, transfers)
        assert hierarchy.moved.backed_up == expected
    assert hierarchy.pages.budget.counts[Use.OPTIONAL] == 10
    hierarchy.lending.take_back(np.array([session.slot], dtype=np.int32))
    assert not transfers.waiting


def test_a_prompt_longer_than_the_pool_is_imported_through_a_window() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(device=12), ResidencyTuning())
    session = admit(hierarchy, 40, 46)
    assert session.need.windowed
    assert hierarchy.pages.budget.counts == [1, 11, 0, 0]  # 2 hot, 3 tail, 2 chunks of 3 pages
    assert hierarchy.room(session) == 12
    write(hierarchy, session, 6)
    write(hierarchy, session, 6)
    assert hierarchy.room(session) == 0, "the window is full until its pages have copies"
    transfers.do(transfers.waiting[0])
    hierarchy.poll()
    assert hierarchy.room(session) == 6
    run_to(hierarchy, transfers, session, 46)
    assert (hierarchy.tables.host_map[session.slot, :17] >= 0).all()


def test_a_session_whose_backup_fails_is_named_and_nobody_else() -> None:
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, sizes(2, device=26))
    session, neighbour = admit(hierarchy, 8, 12), admit(hierarchy, 8, 12)
    write(hierarchy, neighbour, 8)
    land(hierarchy, transfers)
    write(hierarchy, session, 8)
    transfers.fail(transfers.waiting[0])
    hierarchy.poll()
    assert hierarchy.take_failed() == [
        (session, "copying its rows to the host failed: OSError: the test wants it to fail")
    ]
    assert hierarchy.take_failed() == []
    hierarchy.end(session)
    run_to(hierarchy, transfers, neighbour, 12)
    hierarchy.end(neighbour)
    land(hierarchy, transfers)
    assert hierarchy.pages.budget.counts == [26, 0, 0, 0]


def test_a_session_whose_refill_fails_goes_on_from_the_host() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, sizes(2, device=26), ResidencyTuning())
    session = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, session, 20)
    hierarchy.lending.take_back(np.array([session.slot], dtype=np.int32))
    land(hierarchy, transfers)
    hierarchy.tend()
    transfers.fail(transfers.waiting[0])
    hierarchy.poll()
    assert hierarchy.take_failed() == []
    land(hierarchy, transfers)
    hierarchy.tend()
    assert not transfers.waiting, "a refill that fails is tried again and again"
    assert hierarchy.pages.budget.counts == [21, 5, 0, 0]
    hierarchy.check()
