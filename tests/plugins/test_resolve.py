"""The resolver: the host twin against the oracle, and against what one expects of a cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins import host, oracle
from plugins.host import Counts, HotState, Int32, Plan, ResolverTables, Threads
from tests.plugins.worlds import World, batch_slots, copy_hot, dirty_plan, make_world, payload, selections, worlds


def relaxed(max_examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=slow)


orders = st.one_of(
    st.just(Threads()), st.builds(Threads, st.sampled_from((1, 32, 64, 256, 1024)), st.integers(0, 2**32))
)


def check_equals_oracle(world: World, threads: Threads) -> None:
    rng = np.random.default_rng(world.seed)
    ours, theirs = copy_hot(world.hot), copy_hot(world.hot)
    plan = dirty_plan(rng, world.batch + 1, world.k)
    expected = dirty_plan(rng, world.batch + 1, world.k)
    for step in range(world.steps):
        slots = batch_slots(rng, world)
        selected = selections(rng, world, slots)
        group = int(rng.integers(ours.positions.shape[0]))
        host.resolve(world.tables, ours, group, selected, slots, plan, replace(threads, seed=threads.seed + step))
        oracle.resolve(world.tables, theirs, group, selected, slots, expected)
        assert plan.sessions == expected.sessions == len(slots)
        for name in ("locations", "fetch_counts", "fetch_host_rows", "fetch_device_rows", "counts"):
            np.testing.assert_array_equal(
                getattr(plan, name)[: len(slots)], getattr(expected, name)[: len(slots)], err_msg=f"{name}, step {step}"
            )
        np.testing.assert_array_equal(ours.lru, theirs.lru, err_msg=f"lru, step {step}")
        np.testing.assert_array_equal(ours.positions, theirs.positions, err_msg=f"hot positions, step {step}")


@relaxed(max_examples=120)
@given(worlds(), orders)
def test_equals_the_oracle_over_steps(world: World, threads: Threads) -> None:
    check_equals_oracle(world, threads)


@pytest.mark.long
@pytest.mark.timeout(3600)
@relaxed(max_examples=4000)
@given(worlds(), orders)
def test_equals_the_oracle_over_many_worlds(world: World, threads: Threads) -> None:
    check_equals_oracle(world, threads)


@pytest.mark.parametrize("hot_pages", [32, 64, 128])
@pytest.mark.parametrize("threads", [Threads(), Threads(1024, 5)])
def test_equals_the_oracle_at_full_size(hot_pages: int, threads: Threads) -> None:
    """K = 2048 with B = K, 2K and 8192, in a history of a million rows of which no page is resident."""
    world = make_world(
        k=2048,
        page_rows=64,
        hot_pages=hot_pages,
        slots=2,
        pages=1_000_000 // 64,
        resident=0.0,
        lost=0.0,
        batch=2,
        steps=4,
        seed=hot_pages,
    )
    check_equals_oracle(world, threads)


@relaxed(max_examples=60)
@given(worlds(most_rows=20_000), st.sampled_from((1, 4, 16, 24)))
def test_every_location_holds_the_row_of_its_position(world: World, row_bytes: int) -> None:
    """Invariant 6 of the hierarchy, seen from the bytes: resolve, fetch, then read the arena."""
    tables, rows = world.tables, world.tables.page_rows
    pages = max(int(m.max(initial=0)) for m in (tables.ready_map, tables.tail_pages, tables.hot_pages)) + 1
    arena = np.full((pages * rows, row_bytes), 0xEE, dtype=np.uint8)
    pool = np.full(((int(tables.host_map.max(initial=0)) + 1) * rows, row_bytes), 0xDD, dtype=np.uint8)
    for slot in range(len(world.lengths)):
        for page in range(tables.ready_map.shape[1]):
            content = payload(slot, np.arange(page * rows, (page + 1) * rows, dtype=np.int32), row_bytes)
            if (at := tables.host_map[slot, page]) >= 0:
                pool[at * rows : (at + 1) * rows] = content
            if (at := tables.ready_map[slot, page]) >= 0:
                arena[at * rows : (at + 1) * rows] = content
            first = tables.tail_first[slot]
            if first <= page < first + 3 and (at := tables.tail_pages[slot, page % 3]) >= 0:
                arena[at * rows : (at + 1) * rows] = content
    rng = np.random.default_rng(world.seed)
    plan = dirty_plan(rng, world.batch, world.k)
    hot = copy_hot(world.hot)
    for _ in range(world.steps):
        slots = batch_slots(rng, world)
        selected = selections(rng, world, slots)
        host.resolve(tables, hot, 0, selected, slots, plan)
        host.fetch_rows(pool, arena, plan)
        for n, slot in enumerate(slots.tolist()):
            located = plan.locations[n] >= 0
            if slot < 0:
                assert not located.any()
                continue
            np.testing.assert_array_equal(
                arena[plan.locations[n][located]], payload(slot, selected[n][located], row_bytes)
            )


def small(hot_pages: int = 2) -> tuple[ResolverTables, HotState]:
    """One slot, pages of 2 rows: page 0 READY at 10, pages 1 to 5 only on the host at 20 to 24, page 6 nowhere,
    pages 7 and 8 in the tail at 30 and 31; the hot cache is pages 40 and 41: rows 80 to 83."""
    ready = np.array([[10, -1, -1, -1, -1, -1, -1, -1, -1, -1]], dtype=np.int32)
    host_map = np.array([[-1, 20, 21, 22, 23, 24, -1, -1, -1, -1]], dtype=np.int32)
    tail = np.array([[-1, 30, 31]], dtype=np.int32)
    hot_ids = np.arange(40, 40 + hot_pages, dtype=np.int32)[None]
    tables = ResolverTables(ready, host_map, np.array([7], dtype=np.int32), tail, hot_ids, 2)
    return tables, HotState.empty(1, 1, 2 * hot_pages)


def lines(*selected: list[int]) -> Int32:
    return np.array(selected, dtype=np.int32)


SLOT0 = np.zeros(1, dtype=np.int32)


def test_tail_and_ready_rows_are_direct_and_leave_the_hot_cache_alone() -> None:
    tables, hot = small()
    plan = host.resolve(tables, hot, 0, lines([1, 14, 17, -1]), SLOT0, Plan.empty(1, 4))
    assert plan.locations.tolist() == [[21, 60, 63, -1]]
    assert plan.totals() == Counts(direct=3, hot=0, host=0, padding=1, masked=0)
    assert hot.lru.tolist() == [[[0, 1, 2, 3]]]
    assert hot.positions.tolist() == [[[-1, -1, -1, -1]]]


def test_missing_rows_take_the_least_recently_used_slots_in_order_of_appearance() -> None:
    tables, hot = small()
    plan = host.resolve(tables, hot, 0, lines([9, 2, 9, 0]), SLOT0, Plan.empty(1, 4))
    assert plan.locations.tolist() == [[80, 81, 80, 20]]
    assert plan.fetch_counts.tolist() == [2]
    assert plan.fetch_host_rows.tolist() == [[47, 40, -1, -1]]
    assert plan.fetch_device_rows.tolist() == [[80, 81, -1, -1]]
    assert plan.totals() == Counts(direct=1, hot=0, host=3, padding=0, masked=0)
    assert hot.positions.tolist() == [[[9, 2, -1, -1]]]
    assert hot.lru.tolist() == [[[2, 3, 0, 1]]]


def test_used_slots_become_most_recent_in_order_of_appearance_hits_and_misses_alike() -> None:
    tables, hot = small()
    plan = Plan.empty(1, 4)
    host.resolve(tables, hot, 0, lines([2, 3, 4, 5]), SLOT0, plan)
    host.resolve(tables, hot, 0, lines([4, 7, 3, -1]), SLOT0, plan)
    # 2 was the oldest: its slot 0 goes to 7. Untouched: 5 in slot 3. Then 4 (slot 2), 7 (slot 0), 3 (slot 1).
    assert plan.locations.tolist() == [[82, 80, 81, -1]]
    assert plan.totals() == Counts(direct=0, hot=2, host=1, padding=1, masked=0)
    assert hot.positions.tolist() == [[[7, 3, 4, 5]]]
    assert hot.lru.tolist() == [[[3, 2, 0, 1]]]


def test_a_masked_position_takes_no_hot_slot() -> None:
    tables, hot = small()
    plan = host.resolve(tables, hot, 0, lines([12, 20, -7, 2]), SLOT0, Plan.empty(1, 4))
    assert plan.locations.tolist() == [[-1, -1, -1, 80]]
    assert plan.totals() == Counts(direct=0, hot=0, host=1, padding=0, masked=3)
    assert hot.positions.tolist() == [[[2, -1, -1, -1]]]


def test_without_a_hot_cache_what_is_not_direct_is_masked() -> None:
    tables, _ = small(hot_pages=0)
    plan = host.resolve(tables, HotState.empty(1, 1, 0), 0, lines([2, 0]), SLOT0, Plan.empty(1, 2))
    assert plan.locations.tolist() == [[-1, 20]]
    assert plan.totals() == Counts(direct=1, hot=0, host=0, padding=0, masked=1)


def test_a_slot_that_lacks_a_hot_page_has_no_hot_cache() -> None:
    tables, hot = small()
    tables.hot_pages[0, 1] = -1
    plan = host.resolve(tables, hot, 0, lines([2]), SLOT0, Plan.empty(1, 1))
    assert plan.locations.tolist() == [[-1]]
    assert hot.positions.tolist() == [[[-1, -1, -1, -1]]]


def test_batch_padding_is_blank_and_counts_nothing() -> None:
    tables, hot = small()
    plan = dirty_plan(np.random.default_rng(0), 2, 2)
    host.resolve(tables, hot, 0, lines([2, 3], [4, 5]), np.array([-1, 0], dtype=np.int32), plan)
    assert plan.locations.tolist() == [[-1, -1], [80, 81]]
    assert plan.fetch_host_rows.tolist() == [[-1, -1], [42, 43]]
    assert plan.counts.tolist() == [[0, 0, 0, 0, 0], [0, 0, 2, 0, 0]]


def test_a_page_that_becomes_ready_is_direct_although_its_rows_are_hot() -> None:
    tables, hot = small()
    plan = Plan.empty(1, 1)
    host.resolve(tables, hot, 0, lines([2]), SLOT0, plan)
    tables.ready_map[0, 1] = 11
    host.resolve(tables, hot, 0, lines([2]), SLOT0, plan)
    assert plan.locations.tolist() == [[22]]
    assert hot.lru.tolist() == [[[1, 2, 3, 0]]]


def test_clear_forgets_one_slot_in_all_groups() -> None:
    hot = HotState.empty(2, 2, 3)
    hot.positions[:] = 5
    hot.lru[:] = [2, 1, 0]
    hot.clear(1)
    assert hot.positions.tolist() == [[[5, 5, 5], [-1, -1, -1]]] * 2
    assert hot.lru.tolist() == [[[2, 1, 0], [0, 1, 2]]] * 2


def test_wrong_arguments_are_refused_with_their_numbers() -> None:
    tables, hot = small()
    plan = Plan.empty(1, 2)
    good = lines([2, 3])

    def refuses(message: str, **changes: object) -> None:
        arguments = {"tables": tables, "hot": hot, "group": 0, "selected": good, "slots": SLOT0, "out": plan} | changes
        with pytest.raises(ValueError, match=message):
            host.resolve(**arguments)  # type: ignore[arg-type]

    refuses("selected must be of dtype int32.*64 bits", selected=good.astype(np.int64))
    refuses(r"selected has shape \[2\], expected \[any, any\]", selected=good[0])
    refuses("selected of shape .* must be C-contiguous", selected=lines([2, 0, 3, 0])[:, ::2])
    refuses(r"slots has shape \[2\], expected \[1\]", slots=np.zeros(2, dtype=np.int32))
    refuses(r"slots\[0\]=1; legal range: -1 to 0", slots=np.ones(1, dtype=np.int32))
    refuses("group=1; legal range: 0 to 0", group=1)
    refuses("4 rows, fewer than the K=5", selected=lines([1, 2, 3, 4, 5]), out=Plan.empty(1, 5))
    refuses(r"out.locations has shape \[1, 3\], expected \[any, 2\]", out=Plan.empty(1, 3))
    refuses("room for 1 sessions, the batch has 2", selected=lines([1, 2], [3, 4]), slots=lines([0, -1])[0])
    refuses(r"slots\[1\]=0 is in the batch twice", selected=lines([1, 2], [3, 4]), slots=lines([0, 0])[0])
    refuses("6 rows a slot, but hot_pages has 2 pages of page_rows=2", hot=HotState.empty(1, 1, 6))
    refuses("page_rows=0 must be positive", tables=replace(tables, page_rows=0))
    refuses(r"host_map has shape \[1, 9\], expected \[1, 10\]", tables=replace(tables, host_map=tables.host_map[:, :9]))
    assert plan.sessions == 0
