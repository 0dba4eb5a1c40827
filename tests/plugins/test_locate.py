"""The direct rule: the host twin against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins import host, oracle
from plugins.host import ResolverTables, Threads
from tests.plugins.worlds import World, selections, worlds


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.integers(0, 6), st.sampled_from((Threads(), Threads(32, 3), Threads(1024, 4))))
def test_equals_the_oracle(world: World, tokens: int, threads: Threads) -> None:
    rng = np.random.default_rng(world.seed)
    slots = rng.integers(-1, len(world.lengths), tokens).astype(np.int32)
    selected = selections(rng, world, slots)
    ours = rng.integers(-(2**31), 2**31, selected.shape).astype(np.int32)
    theirs = ours.copy()
    masked = host.locate(world.tables, selected, slots, ours, threads)
    assert masked == oracle.locate(world.tables, selected, slots, theirs)
    np.testing.assert_array_equal(ours, theirs)


def tables() -> ResolverTables:
    """Two slots, pages of 4 rows: slot 0 has page 0 READY at 7 and pages 1, 2 in the tail at 8, 9; slot 1 is free."""
    ready = np.array([[7, -1, -1, -1], [-1, -1, -1, -1]], dtype=np.int32)
    tail = np.array([[-1, 8, 9], [-1, -1, -1]], dtype=np.int32)
    none = np.full((2, 0), -1, dtype=np.int32)
    return ResolverTables(ready, ready, np.array([1, -1], dtype=np.int32), tail, none, 4)


def test_rows_at_both_sides_of_page_boundaries() -> None:
    selected = np.array([[3, 4, 7, 8, 11]], dtype=np.int32)
    out = np.zeros_like(selected)
    assert host.locate(tables(), selected, np.zeros(1, dtype=np.int32), out) == 0
    assert out.tolist() == [[31, 32, 35, 36, 39]]


def test_what_is_not_found_is_masked_and_counted() -> None:
    selected = np.array([[12, 16, -1, -2], [0, -1, -1, -1], [0, 1, 2, 3]], dtype=np.int32)
    out = np.zeros_like(selected)
    assert host.locate(tables(), selected, np.array([0, 1, -1], dtype=np.int32), out) == 4
    assert out.tolist() == [[-1] * 4] * 3


def test_a_tail_page_that_is_none_leaves_the_ready_page() -> None:
    world = tables()
    world.tail_pages[0, 1] = -1
    world.ready_map[0, 1] = 5
    out = np.zeros((1, 1), dtype=np.int32)
    assert host.locate(world, np.array([[6]], dtype=np.int32), np.zeros(1, dtype=np.int32), out) == 0
    assert out.tolist() == [[22]]


def test_a_session_without_a_tail_has_no_tail_pages() -> None:
    world = tables()
    world.tail_first[0] = -1
    out = np.zeros((1, 3), dtype=np.int32)
    assert host.locate(world, np.array([[0, 4, 8]], dtype=np.int32), np.zeros(1, dtype=np.int32), out) == 2
    assert out.tolist() == [[28, -1, -1]]


def test_wrong_arguments_are_refused_with_their_numbers() -> None:
    selected = np.zeros((1, 2), dtype=np.int32)
    with pytest.raises(ValueError, match=r"slots\[0\]=2; legal range: -1 to 1"):
        host.locate(tables(), selected, np.array([2], dtype=np.int32), selected.copy())
    with pytest.raises(ValueError, match=r"out has shape \[1, 3\], expected \[1, 2\]"):
        host.locate(tables(), selected, np.zeros(1, dtype=np.int32), np.zeros((1, 3), dtype=np.int32))
    broken = replace(tables(), tail_pages=np.zeros((2, 2), dtype=np.int32))
    with pytest.raises(ValueError, match=r"tail_pages has shape \[2, 2\], expected \[2, 3\]"):
        host.locate(broken, selected, np.zeros(1, dtype=np.int32), selected.copy())
