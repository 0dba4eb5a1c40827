"""Copies between CPU stores: in order, behind fences, every source from and to its own rows."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.kv.manual import ManualFence
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource
from trt_backend.kv.transfers import PassedFence
from trt_backend.memory.arena import IndexKeyStore, RowStore
from trt_backend.memory.cpu import CpuTransfers, WorkerStream


def wait(fence: object) -> None:
    """Until a fence has passed; its failure is raised."""
    deadline = threading.Event()
    for _ in range(20_000):
        if fence.done():  # type: ignore[attr-defined]
            return
        deadline.wait(0.001)
    raise TimeoutError("the fence has not passed in 20 s")


def layout_of_three() -> KvLayout:
    """Sources of different row sizes; the last has one row for two tokens."""
    sources = (KvSource("a", 24), KvSource("b", 8), KvSource("c", 40, ratio=2))
    return KvLayout(sources, (IndexGroup((0, 1), 4, 6), IndexGroup((2,), 4, 10, ratio=2)), page_tokens=8, hot_tokens=8)


def fill(store: RowStore) -> None:
    """Bytes that tell every row of every source apart."""
    rng = np.random.default_rng(1)
    for rows in store.sources:
        rows[:] = rng.integers(0, 256, rows.shape, dtype=np.uint8)


def test_a_backup_copies_each_source_s_own_rows_and_nothing_else() -> None:
    layout = layout_of_three()
    device, pool = RowStore(layout, 6), RowStore(layout, 9)
    fill(device)
    before = [rows.copy() for rows in pool.sources]
    transfers = CpuTransfers(device, pool)
    device_pages, host_pages = np.array([4, 0, 5], np.int32), np.array([7, 2, 3], np.int32)
    wait(transfers.backup(device_pages, host_pages, PassedFence()))
    transfers.close()
    for s in range(3):
        rows = layout.page_rows(s)
        pages = [part.reshape(-1, rows, part.shape[1]) for part in (device.sources[s], pool.sources[s], before[s])]
        assert (pages[1][host_pages] == pages[0][device_pages]).all()
        others = np.setdiff1d(np.arange(9), host_pages)
        assert (pages[1][others] == pages[2][others]).all()


def test_stores_have_the_sizes_of_their_layout() -> None:
    layout = layout_of_three()
    assert [rows.shape for rows in RowStore(layout, 5).sources] == [(40, 24), (40, 8), (20, 40)]
    assert [keys.shape for keys in IndexKeyStore(layout, 3).groups] == [(24, 6), (12, 10)]
    assert sum(rows.nbytes for rows in RowStore(layout, 5).sources) == 5 * layout.page_bytes


def test_a_copy_waits_for_the_step_that_writes_its_page() -> None:
    layout = layout_of_three()
    device, pool = RowStore(layout, 2), RowStore(layout, 2)
    transfers = CpuTransfers(device, pool)
    step = ManualFence()
    fence = transfers.backup(np.array([1], np.int32), np.array([0], np.int32), after=step)
    assert not fence.done()
    fill(device)
    step.passed = True
    wait(fence)
    transfers.close()
    assert (pool.sources[0][:8] == device.sources[0][8:]).all()


def test_work_is_done_in_order_and_a_failure_reaches_whoever_asks() -> None:
    stream = WorkerStream("test")
    done: list[int] = []
    fences = [stream.submit(lambda i=i: done.append(i), PassedFence()) for i in range(50)]  # type: ignore[misc]
    broken = stream.submit(lambda: done[99], PassedFence())  # type: ignore[arg-type,return-value]
    after = stream.submit(lambda: done.append(50), PassedFence())
    wait(fences[-1])
    wait(after)
    with pytest.raises(RuntimeError, match="a copy failed: list index out of range"):
        broken.done()
    stream.close()
    assert done == list(range(51))
