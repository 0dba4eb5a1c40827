"""Copies between the tiers: the host twin against the oracle, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import host, oracle
from plugins.host import Plan, UInt8

row_sizes = st.sampled_from((1, 4, 13, 16, 100, 656))


def store(rng: np.random.Generator, rows: int, row_bytes: int) -> UInt8:
    return rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(row_sizes, st.integers(0, 4), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_fetch_copies_the_rows_of_the_plan_and_nothing_else(row_bytes: int, sessions: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, arena = store(rng, 500, row_bytes), store(rng, 400, row_bytes)
    plan = Plan.empty(sessions + 1, k)
    plan.sessions = sessions
    plan.fetch_counts[:] = rng.integers(0, k + 1, sessions + 1)
    plan.fetch_host_rows[:] = rng.integers(0, 500, plan.fetch_host_rows.shape)
    plan.fetch_device_rows[:] = rng.permutation(400)[: (sessions + 1) * k].reshape(sessions + 1, k)
    expected = arena.copy()
    oracle.fetch_rows(pool, expected, plan)
    before = pool.copy()
    host.fetch_rows(pool, arena, plan)
    np.testing.assert_array_equal(arena, expected)
    np.testing.assert_array_equal(pool, before)


@settings(max_examples=60, deadline=None)
@given(row_sizes, st.sampled_from((1, 3, 64)), st.integers(0, 10), st.integers(0, 2**32 - 1))
def test_pages_arrive_whole_and_others_stay(row_bytes: int, page_rows: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arena, pool = store(rng, 12 * page_rows + 2, row_bytes), store(rng, 10 * page_rows, row_bytes)
    sources = rng.integers(0, 12, count).astype(np.int32)
    targets = rng.permutation(10)[:count].astype(np.int32)
    expected = pool.copy()
    oracle.copy_pages(arena, expected, sources, targets, page_rows)
    host.copy_pages(arena, pool, sources, targets, page_rows)
    np.testing.assert_array_equal(pool, expected)


def test_a_row_outside_its_store_is_refused_before_anything_is_copied() -> None:
    pool, arena = np.ones((4, 8), dtype=np.uint8), np.zeros((3, 8), dtype=np.uint8)
    plan = Plan.empty(1, 2)
    plan.sessions = 1
    plan.fetch_counts[0] = 2
    plan.fetch_host_rows[0] = [0, 4]
    with pytest.raises(ValueError, match=r"plan.fetch_host_rows\[0, 1\]=4; its store has 4 rows"):
        host.fetch_rows(pool, arena, plan)
    plan.fetch_host_rows[0] = [0, 1]
    plan.fetch_device_rows[0] = [0, -1]
    with pytest.raises(ValueError, match=r"plan.fetch_device_rows\[0, 1\]=-1; its store has 3 rows"):
        host.fetch_rows(pool, arena, plan)
    assert arena.sum() == 0


def test_stores_of_different_row_sizes_are_refused() -> None:
    pool, arena = np.ones((4, 8), dtype=np.uint8), np.zeros((4, 9), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"device has shape \[4, 9\], expected \[any, 8\]"):
        host.fetch_rows(pool, arena, Plan.empty(1, 1))
    with pytest.raises(ValueError, match=r"target has shape \[4, 9\], expected \[any, 8\]"):
        host.copy_pages(pool, arena, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32), 2)


def test_a_page_outside_its_store_is_refused() -> None:
    pool, arena = np.ones((4, 8), dtype=np.uint8), np.zeros((5, 8), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"target_pages\[0\]=2; its store has 2 pages"):
        host.copy_pages(pool, arena, np.array([1], dtype=np.int32), np.array([2], dtype=np.int32), 2)
    assert arena.sum() == 0


def test_fetch_refuses_a_plan_for_more_sessions_than_it_has_lines() -> None:
    plan = Plan.empty(1, 1)
    plan.sessions = 2
    with pytest.raises(ValueError, match=r"plan\.sessions=2; legal range: 0 to 1"):
        host.fetch_rows(np.ones((4, 8), dtype=np.uint8), np.ones((4, 8), dtype=np.uint8), plan)
