"""The CUDA sources, entry points included, on emulated CUDA threads (see cuda_fibers.cpp), against the oracle."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins import oracle
from plugins.host import Plan
from plugins.nvrtc import KERNELS
from tests.plugins.worlds import (
    World,
    batch_slots,
    copy_hot,
    dirty_adoption,
    dirty_plan,
    latest_selections,
    make_world,
    recycled_pages,
    selections,
    worlds,
)

Argument = npt.NDArray[np.generic] | int | None
block_sizes = st.sampled_from((32, 64, 96, 256))
seeds = st.integers(0, 2**32 - 1)


class Device:
    """Launches kernels by name. Arrays are passed as pointers, integers as int32 unless wrapped by numpy."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._launch = library.launch

    def launch(self, kernel: str, grid: int, block: int, seed: int, *arguments: Argument | np.int64) -> None:
        values: list[ctypes._SimpleCData[int] | ctypes.c_void_p] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                values.append(ctypes.c_void_p(argument.ctypes.data))
            elif isinstance(argument, np.int64):
                values.append(ctypes.c_int64(int(argument)))
            elif argument is None:
                values.append(ctypes.c_void_p(None))
            else:
                values.append(ctypes.c_int32(int(argument)))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        status = self._launch(kernel.encode(), grid, block, ctypes.c_uint64(seed), pointers)
        assert status == 0, f"{kernel} with {block} threads: {('', 'deadlock at a barrier', 'no such kernel')[status]}"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    build = tmp_path_factory.mktemp("cuda")
    source = (KERNELS / "entry.cu").read_text()
    assert source.count("extern __shared__") == 1
    (build / "entry.cu").write_text(source.replace("extern __shared__", "extern"))
    emulator = Path(__file__).with_name("cuda_fibers.cpp")
    library = build / "kernels.so"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{build}", f"-I{KERNELS}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(emulator)], check=True)
    return Device(ctypes.CDLL(str(library)))


def several(max_examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=slow)


def hash_size(entries: int) -> int:
    return 1 << (2 * entries - 1).bit_length()


def check_resolve(device: Device, world: World, block: int, in_shared_memory: bool) -> None:
    rng = np.random.default_rng(world.seed)
    tables, k = world.tables, world.k
    hot_rows = world.hot.lru.shape[2]
    words = 3 * max(2, hash_size(k)) + 2 * k + hot_rows
    ours, theirs = copy_hot(world.hot), copy_hot(world.hot)
    plan, expected = dirty_plan(rng, world.batch, k), Plan.empty(world.batch, k)
    for step in range(world.steps):
        slots = batch_slots(rng, world)
        selected = selections(rng, world, slots)
        workspace = None if in_shared_memory else rng.integers(-9, 9, (world.batch, words)).astype(np.int32)
        device.launch(
            "dhs_resolve",
            world.batch,
            block,
            world.seed + step,
            tables.ready_map,
            tables.host_map,
            tables.tail_first,
            tables.tail_pages,
            tables.hot_pages,
            *tables.ready_map.shape,
            tables.hot_pages.shape[1],
            tables.page_rows,
            ours.positions[1],
            ours.lru[1],
            hot_rows,
            selected,
            slots,
            k,
            plan.locations,
            plan.fetch_counts,
            plan.fetch_host_rows,
            plan.fetch_device_rows,
            plan.counts,
            workspace,
        )
        oracle.resolve(tables, theirs, 1, selected, slots, expected)
        for name in ("locations", "fetch_counts", "fetch_host_rows", "fetch_device_rows", "counts"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(ours.lru, theirs.lru)
        np.testing.assert_array_equal(ours.positions, theirs.positions)


@several(max_examples=20)
@given(worlds(ks=(1, 31, 32, 33, 64, 300), most_rows=50_000), block_sizes, st.booleans())
def test_resolve_equals_the_oracle(device: Device, world: World, block: int, in_shared_memory: bool) -> None:
    check_resolve(device, world, block, in_shared_memory)


def test_resolve_equals_the_oracle_at_full_size(device: Device) -> None:
    """K = 2048 and B = 4096 with the largest block there is, in shared memory."""
    world = make_world(
        k=2048,
        page_rows=64,
        hot_pages=64,
        slots=1,
        pages=100,
        resident=0.3,
        lost=0.05,
        batch=1,
        steps=3,
        seed=4,
    )
    check_resolve(device, world, 1024, in_shared_memory=True)


def check_adopt(device: Device, world: World, queries: int, block: int, in_shared_memory: bool) -> None:
    rng = np.random.default_rng(world.seed)
    tables, k = world.tables, queries * world.k
    hot_rows, page_rows = world.hot.lru.shape[2], world.tables.page_rows
    words = max(2, hash_size(k)) + hot_rows + 3 * page_rows
    theirs = copy_hot(world.hot)
    for step in range(world.steps):
        latest = latest_selections(rng, world, theirs, 1, queries)
        ours = copy_hot(theirs)
        recycled = recycled_pages(rng, world, latest)
        count = len(recycled[0])
        plan, expected = (dirty_adoption(rng, count, page_rows) for _ in range(2))
        workspace = None if in_shared_memory else rng.integers(-9, 9, (max(1, count), words)).astype(np.int32)
        device.launch(
            "dhs_adopt",
            count,
            block,
            world.seed + step,
            tables.hot_pages,
            *tables.hot_pages.shape,
            page_rows,
            ours.positions[1],
            ours.lru[1],
            hot_rows,
            latest,
            k,
            *recycled,
            count,
            plan.counts,
            plan.source_rows,
            plan.target_rows,
            workspace,
        )
        oracle.adopt(tables, theirs, 1, latest, *recycled, expected)
        for name in ("counts", "source_rows", "target_rows"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(ours.lru, theirs.lru)
        np.testing.assert_array_equal(ours.positions, theirs.positions)


@several(max_examples=20)
@given(worlds(ks=(1, 31, 32, 33, 64, 300), most_rows=50_000), st.integers(1, 3), block_sizes, st.booleans())
def test_adopt_equals_the_oracle(
    device: Device, world: World, queries: int, block: int, in_shared_memory: bool
) -> None:
    check_adopt(device, world, queries, block, in_shared_memory)


@several(max_examples=15)
@given(st.sampled_from((1, 12, 16, 656)), st.sampled_from((32, 256)), st.integers(1, 32), seeds)
def test_adopted_rows_are_copied_within_the_arena(
    device: Device, row_bytes: int, block: int, grid: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arena = rng.integers(0, 256, (300, row_bytes), dtype=np.uint8)
    adoption = dirty_adoption(rng, 3, 40)
    adoption.counts[:] = rng.integers(0, 41, 3)
    adoption.source_rows[:], adoption.target_rows[:] = rng.permutation(300)[:240].reshape(2, 3, 40)
    expected = arena.copy()
    oracle.copy_rows(expected, adoption)
    rows = adoption.counts, adoption.source_rows, adoption.target_rows
    device.launch("dhs_fetch_rows", grid, block, seed, arena, arena, np.int64(row_bytes), *rows, 3, 40)
    np.testing.assert_array_equal(arena, expected)


@several(max_examples=15)
@given(worlds(ks=(1, 33, 64, 300), most_rows=50_000), block_sizes)
def test_locate_equals_the_oracle(device: Device, world: World, block: int) -> None:
    rng = np.random.default_rng(world.seed)
    tables = world.tables
    slots = rng.integers(-1, len(world.lengths), 3).astype(np.int32)
    selected = selections(rng, world, slots)
    ours, theirs = np.zeros_like(selected), np.zeros_like(selected)
    masked = np.full(3, 77, dtype=np.int32)
    device.launch(
        "dhs_locate",
        3,
        block,
        world.seed,
        tables.ready_map,
        tables.tail_first,
        tables.tail_pages,
        *tables.ready_map.shape,
        tables.page_rows,
        selected,
        slots,
        world.k,
        ours,
        masked,
    )
    assert masked.sum() == oracle.locate(tables, selected, slots, theirs)
    np.testing.assert_array_equal(ours, theirs)


@several(max_examples=20)
@given(
    st.booleans(),
    st.sampled_from((1, 31, 32, 33, 64)),
    st.one_of(st.integers(1, 200), st.integers(4000, 6000)),
    seeds,
    block_sizes,
)
def test_topk_equals_sorting(device: Device, ties: bool, k: int, stride: int, seed: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, stride)).astype(np.float32)
    if ties:
        scores = rng.choice(np.array([0.0, -0.0, 1.0, -np.inf, np.nan], dtype=np.float32), (2, stride))
    visible = np.array([stride, rng.integers(0, stride + 1)], dtype=np.int32)
    out = np.full((2, k), -7, dtype=np.int32)
    device.launch("dhs_topk", 2, block, seed, scores, np.int64(stride), visible, k, out)
    np.testing.assert_array_equal(out, oracle.topk(scores, visible, k))


@several(max_examples=25)
@given(st.sampled_from((1, 12, 13, 16, 656)), st.integers(1, 5), st.sampled_from((32, 256)), st.integers(1, 32), seeds)
def test_fetch_shares_all_rows_among_the_warps(
    device: Device, row_bytes: int, sessions: int, block: int, grid: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    k = 40
    pool = rng.integers(0, 256, (300, row_bytes), dtype=np.uint8)
    arena = rng.integers(0, 256, (250, row_bytes), dtype=np.uint8)
    plan = Plan.empty(sessions, k)
    plan.sessions = sessions
    plan.fetch_counts[:] = rng.integers(0, k + 1, sessions)
    plan.fetch_host_rows[:] = rng.integers(0, 300, (sessions, k))
    plan.fetch_device_rows[:] = rng.permutation(250)[: sessions * k].reshape(sessions, k)
    expected = arena.copy()
    oracle.fetch_rows(pool, expected, plan)
    rows = plan.fetch_counts, plan.fetch_host_rows, plan.fetch_device_rows
    device.launch("dhs_fetch_rows", grid, block, seed, pool, arena, np.int64(row_bytes), *rows, sessions, k)
    np.testing.assert_array_equal(arena, expected)


@several(max_examples=15)
@given(st.sampled_from((1, 13, 656)), st.integers(0, 9), st.integers(1, 4), seeds)
def test_pages_are_shared_among_the_warps(device: Device, row_bytes: int, count: int, grid: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_rows = 8
    source = rng.integers(0, 256, (12 * page_rows, row_bytes), dtype=np.uint8)
    target = np.zeros((10 * page_rows, row_bytes), dtype=np.uint8)
    sources = rng.integers(0, 12, count).astype(np.int32)
    targets = rng.permutation(10)[:count].astype(np.int32)
    expected = target.copy()
    oracle.copy_pages(source, expected, sources, targets, page_rows)
    page_bytes = np.int64(page_rows * row_bytes)
    device.launch("dhs_copy_pages", grid, 64, seed, source, target, page_bytes, sources, targets, count)
    np.testing.assert_array_equal(target, expected)
