"""Adoption of recycled pages: the host twin against the oracle, and the fetches from the host that it saves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins import host, oracle
from plugins.host import Adoption, Counts, HotState, Int32, Plan, ResolverTables, Threads
from tests.plugins.test_resolve import SLOT0, lines, orders, relaxed, small
from tests.plugins.worlds import World, copy_hot, dirty_adoption, latest_selections, make_world, recycled_pages, worlds


def check_equals_oracle(world: World, queries: int, threads: Threads) -> int:
    """Returns how many rows were adopted."""
    rng = np.random.default_rng(world.seed)
    tables = world.tables
    ours, theirs = copy_hot(world.hot), copy_hot(world.hot)
    adopted = 0
    for step in range(world.steps):
        group = int(rng.integers(ours.positions.shape[0]))
        latest = latest_selections(rng, world, theirs, group, queries)
        ours = copy_hot(theirs)
        pages = recycled_pages(rng, world, latest)
        plan, expected = (dirty_adoption(rng, len(pages[0]), tables.page_rows) for _ in range(2))
        host.adopt(tables, ours, group, latest, *pages, plan, replace(threads, seed=threads.seed + step))
        oracle.adopt(tables, theirs, group, latest, *pages, expected)
        for name in ("counts", "source_rows", "target_rows"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=f"{name}, step {step}")
        np.testing.assert_array_equal(ours.lru, theirs.lru, err_msg=f"lru, step {step}")
        np.testing.assert_array_equal(ours.positions, theirs.positions, err_msg=f"hot positions, step {step}")
        adopted += int(plan.counts.sum())
    return adopted


@relaxed(max_examples=120)
@given(worlds(ks=(1, 31, 32, 33, 64, 300), most_rows=50_000), st.integers(1, 3), orders)
def test_equals_the_oracle_over_steps(world: World, queries: int, threads: Threads) -> None:
    check_equals_oracle(world, queries, threads)


@relaxed(max_examples=40)
@given(st.integers(0, 2**32 - 1), orders)
def test_equals_the_oracle_where_a_block_selects_more_than_is_hot(seed: int, threads: Threads) -> None:
    """Three queries of K = B = 48, and tails of 48 rows: there are more rows to adopt than victims."""
    world = make_world(
        k=48,
        page_rows=16,
        hot_pages=3,
        slots=3,
        pages=30,
        resident=0.0,
        lost=0.0,
        batch=3,
        steps=4,
        seed=seed,
    )
    check_equals_oracle(world, 3, threads)


@pytest.mark.parametrize("threads", [Threads(), Threads(1024, 5)])
def test_equals_the_oracle_at_full_size(threads: Threads) -> None:
    """K = 2048 and B = 4096, in a history of 100,000 rows of which no page is resident."""
    world = make_world(
        k=2048,
        page_rows=64,
        hot_pages=64,
        slots=2,
        pages=100_000 // 64,
        resident=0.0,
        lost=0.0,
        batch=2,
        steps=4,
        seed=3,
    )
    assert check_equals_oracle(world, 1, threads) > 0


def test_a_row_adopted_when_its_page_leaves_the_tail_is_hot_for_the_next_resolve() -> None:
    tables, hot = small()
    arena = np.arange(100, dtype=np.uint8)[:, np.newaxis] + np.zeros(3, dtype=np.uint8)
    selected = lines([14, 2, 15, 17])  # 14 and 15 are page 7, in the tail at 30: rows 60 and 61
    plan = host.resolve(tables, hot, 0, selected, SLOT0, Plan.empty(1, 4))
    assert plan.totals() == Counts(direct=3, hot=0, host=1, padding=0, masked=0)

    tables.host_map[0, 7] = 25
    tables.tail_first[0] = 8
    assert adopt_page(tables, hot, selected, index=7, page=30, arena=arena) == [(60, 81), (61, 82)]
    tables.tail_pages[0, 1] = -1
    arena[60:62] = 0xEE  # the page is filled again

    host.resolve(tables, hot, 0, selected, SLOT0, plan)
    assert plan.totals() == Counts(direct=1, hot=3, host=0, padding=0, masked=0)
    assert arena[plan.locations[0, [0, 2]], 0].tolist() == [60, 61]


def adopt_page(
    tables: ResolverTables,
    hot: HotState,
    latest: Int32,
    index: int,
    page: int,
    arena: host.UInt8 | None = None,
) -> list[tuple[int, int]]:
    """Adopt one page of slot 0 in group 0. Returns the copies: (source row, target row)."""
    numbers = np.array([index], dtype=np.int32), np.array([page], dtype=np.int32)
    adoption = host.adopt(tables, hot, 0, latest, SLOT0, *numbers, Adoption.empty(1, tables.page_rows))
    if arena is not None:
        host.copy_rows(arena, adoption)
    count = int(adoption.counts[0])
    assert (adoption.source_rows[0, count:] == -1).all()
    assert (adoption.target_rows[0, count:] == -1).all()
    return list(zip(adoption.source_rows[0, :count].tolist(), adoption.target_rows[0, :count].tolist(), strict=True))


def holding(positions: list[int], lru: list[int]) -> HotState:
    return HotState(np.array([[positions]], dtype=np.int32), np.array([[lru]], dtype=np.int32))


def test_adopted_rows_take_the_oldest_slots_in_order_of_position_and_become_the_most_recent() -> None:
    tables, _ = small()
    hot = holding([2, 3, 4, 5], [3, 1, 0, 2])
    assert adopt_page(tables, hot, lines([15, 14, 4, 17]), index=7, page=30) == [(60, 83), (61, 81)]
    assert hot.positions.tolist() == [[[2, 15, 4, 14]]]
    assert hot.lru.tolist() == [[[0, 2, 3, 1]]]


def test_slots_that_hold_something_selected_are_no_victims_however_old_they_are() -> None:
    tables, _ = small()
    hot = holding([2, 3, 4, 5], [0, 1, 2, 3])
    assert adopt_page(tables, hot, lines([2, 4, 14, -1]), index=7, page=30) == [(60, 81)]
    assert hot.positions.tolist() == [[[2, 14, 4, 5]]]
    assert hot.lru.tolist() == [[[0, 2, 3, 1]]]


def test_rows_for_which_no_slot_is_left_are_not_adopted() -> None:
    """A block of several queries may select more than the hot cache has room for."""
    tables, _ = small()
    hot = holding([2, 3, 4, 5], [0, 1, 2, 3])
    assert adopt_page(tables, hot, lines([2, 3, 5, 14, 15, -1]), index=7, page=30) == [(60, 82)]
    assert hot.positions.tolist() == [[[2, 3, 14, 5]]]
    assert adopt_page(tables, hot, lines([2, 3, 5, 14, 15, -1]), index=7, page=30) == []
    assert hot.lru.tolist() == [[[0, 1, 3, 2]]]


def test_rows_that_are_hot_already_keep_their_slots_and_their_age() -> None:
    tables, _ = small()
    hot = holding([14, 15, 4, 5], [0, 1, 2, 3])
    assert adopt_page(tables, hot, lines([14, 15]), index=7, page=30) == []
    assert hot.lru.tolist() == [[[0, 1, 2, 3]]]
    hot = holding([14, -1, 4, 5], [0, 1, 2, 3])
    assert adopt_page(tables, hot, lines([14, 15]), index=7, page=30) == [(61, 81)]
    assert hot.lru.tolist() == [[[0, 2, 3, 1]]]


def test_a_position_selected_twice_is_adopted_once() -> None:
    tables, hot = small()
    assert adopt_page(tables, hot, lines([15, -1, 15, 15]), index=7, page=30) == [(61, 80)]
    assert hot.positions.tolist() == [[[15, -1, -1, -1]]]


@pytest.mark.parametrize("latest", [[-1, -1, -1], [2, 13, 16], [-2, -(2**31), 2**31 - 1]])
def test_a_page_of_which_nothing_was_selected_leaves_the_hot_cache_alone(latest: list[int]) -> None:
    tables, _ = small()
    hot = holding([2, 3, -1, 5], [3, 1, 0, 2])
    assert adopt_page(tables, hot, lines(latest), index=7, page=30) == []
    assert hot.positions.tolist() == [[[2, 3, -1, 5]]]
    assert hot.lru.tolist() == [[[3, 1, 0, 2]]]


def test_without_a_complete_hot_cache_nothing_is_adopted() -> None:
    tables, hot = small()
    tables.hot_pages[0, 1] = -1
    assert adopt_page(tables, hot, lines([14, 15]), index=7, page=30) == []
    assert hot.positions.tolist() == [[[-1, -1, -1, -1]]]
    tables, _ = small(hot_pages=0)
    assert adopt_page(tables, HotState.empty(1, 1, 0), lines([14, 15]), index=7, page=30) == []


def test_pages_of_one_session_are_adopted_in_the_order_in_which_they_left() -> None:
    tables, _ = small()
    hot = holding([2, 3, 4, 5], [0, 1, 2, 3])
    pages = [np.array(numbers, dtype=np.int32) for numbers in ([0, -1, 0], [8, 0, 7], [31, 9, 30])]
    adoption = host.adopt(tables, hot, 0, lines([14, 15, 16, -1]), *pages, Adoption.empty(3, 2))
    assert adoption.counts.tolist() == [1, 0, 2]
    assert adoption.source_rows.tolist() == [[62, -1], [-1, -1], [60, 61]]
    assert adoption.target_rows.tolist() == [[80, -1], [-1, -1], [81, 82]]
    assert hot.positions.tolist() == [[[16, 14, 15, 5]]]
    assert hot.lru.tolist() == [[[3, 0, 1, 2]]]


@relaxed(max_examples=40)
@given(st.sampled_from((1, 13, 16, 656)), st.integers(0, 5), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_copies_the_rows_of_the_adoption_and_nothing_else(row_bytes: int, count: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arena = rng.integers(0, 256, (700, row_bytes), dtype=np.uint8)
    adoption = dirty_adoption(rng, count, rows)
    apart = rng.permutation(700)[: 2 * count * rows].reshape(2, count, rows)
    adoption.counts[:] = rng.integers(0, rows + 1, count)
    adoption.source_rows[:], adoption.target_rows[:] = apart
    expected = arena.copy()
    oracle.copy_rows(expected, adoption)
    host.copy_rows(arena, adoption)
    np.testing.assert_array_equal(arena, expected)


def test_wrong_arguments_are_refused_with_their_numbers() -> None:
    tables, hot = small()
    one = np.array([1], dtype=np.int32)
    good = {"tables": tables, "hot": hot, "group": 0, "latest": lines([2, 3]), "slots": SLOT0, "index": one}
    good |= {"pages": one, "out": Adoption.empty(1, 2)}

    def refuses(message: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=message):
            host.adopt(**(good | changes))  # type: ignore[arg-type]

    refuses("group=1; legal range: 0 to 0", group=1)
    refuses(r"latest has shape \[2, 1\], expected \[1, any\]", latest=lines([2], [3]))
    refuses(r"slots\[0\]=1; legal range: -1 to 0", slots=one)
    refuses(r"index has shape \[2\], expected \[1\]", index=np.zeros(2, dtype=np.int32))
    refuses(r"index\[0\]=-1; legal range: 0 to 1073741822", index=-one)
    refuses(r"pages\[0\]=1073741823; legal range: 0 to 1073741822", pages=one * (2**30 - 1))
    refuses(r"out.source_rows has shape \[1, 3\], expected \[1, 2\]", out=Adoption.empty(1, 3))
    refuses("page_rows=0 must be positive", tables=replace(tables, page_rows=0))
    assert hot.positions.tolist() == [[[-1, -1, -1, -1]]]


def test_a_copy_outside_the_arena_is_refused_before_anything_is_copied() -> None:
    arena = np.arange(4, dtype=np.uint8)[:, np.newaxis].copy()
    adoption = Adoption.empty(1, 2)
    adoption.counts[0] = 3
    with pytest.raises(ValueError, match=r"adoption.counts\[0\]=3; legal range: 0 to 2"):
        host.copy_rows(arena, adoption)
    adoption.counts[0] = 2
    adoption.source_rows[0], adoption.target_rows[0] = [0, 1], [2, 4]
    with pytest.raises(ValueError, match=r"adoption.target_rows\[0, 1\]=4; its store has 4 rows"):
        host.copy_rows(arena, adoption)
    assert arena[:, 0].tolist() == [0, 1, 2, 3]
