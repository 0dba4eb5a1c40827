"""Faults that others reported of this kind of system, each with a test that would show it here.

What concerns CUDA graphs, device aliases of host memory and registered memory has no counterpart on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest

from plugins import host, oracle
from plugins.host import HotState
from tests.arithmetic_engine import expected
from tests.kv.test_hierarchy import CHUNK, admit, land, run_to, small_hierarchy
from tests.memory.test_cpu import fill, layout_of_three, wait
from tests.plugins.test_resolve import dirty_plan
from tests.plugins.worlds import batch_slots, make_world, selections
from tests.test_scheduler import MAX_LEN, House, build, prompt
from trt_backend.config import Residency
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import PoolSizes
from trt_backend.kv.pages import PageState
from trt_backend.kv.residency import ResidencyTuning
from trt_backend.kv.transfers import PassedFence
from trt_backend.memory.arena import RowStore
from trt_backend.memory.cpu import CpuTransfers
from trt_backend.request import FinishReason, Request


def serve_all(house: House, requests: list[Request]) -> None:
    """Everybody gets the whole of its own answer, and everything comes back."""
    for request in requests:
        house.submit(request)
    house.scheduler.start()
    for request in requests:
        assert house.wait(request.id).finish is FinishReason.LENGTH
        assert house.tokens(request.id) == expected(request.prompt, request.max_tokens)
    house.scheduler.stop(5)
    house.transfers.close()
    house.assert_empty()


def test_every_layer_gets_its_own_bytes_back_vllm_57019() -> None:
    """There, packed layers were all bound at one offset."""
    layout = layout_of_three()
    device, pool = RowStore(layout, 6), RowStore(layout, 9)
    fill(device)
    before = [rows.copy() for rows in device.sources]
    transfers = CpuTransfers(device, pool)
    pages, host_pages = np.array([4, 0, 5], np.int32), np.array([7, 2, 3], np.int32)
    wait(transfers.backup(pages, host_pages, PassedFence()))
    for source, rows in enumerate(device.sources):
        rows.reshape(-1, layout.page_rows(source), rows.shape[1])[pages] = 0
    wait(transfers.refill(host_pages, pages, PassedFence()))
    transfers.close()
    for rows, own in zip(device.sources, before, strict=True):
        assert (rows == own).all()


def test_no_page_is_clean_or_published_before_its_bytes_have_landed_vllm_56158() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, PoolSizes(2, 26, 60, 60, CHUNK), ResidencyTuning())
    session = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, session, 20)
    hierarchy.lending.take_back(np.array([session.slot], dtype=np.int32))
    hierarchy.poll()
    pages = hierarchy.tables.ready_map[session.slot, :10]
    assert (hierarchy.pages.state[pages] == PageState.BACKING_UP).all()
    assert (hierarchy.tables.host_map[session.slot] == -1).all()
    land(hierarchy, transfers)
    assert (hierarchy.tables.host_map[session.slot, :10] >= 0).all()


@pytest.mark.parametrize("k", [31, 32, 33, 65])
@pytest.mark.parametrize("resident", [0.0, 0.5])
def test_minus_one_lru_order_and_stale_outputs_sglang_32771_23970_32483(k: int, resident: float) -> None:
    """-1 was used as an index; a scan window corrupted the order; outputs depended on what was there before."""
    sizes = {"page_rows": 16, "hot_pages": -(-k // 16), "slots": 3, "pages": 40, "batch": 3, "steps": 1}
    world = make_world(k=k, resident=resident, lost=0.0, seed=k, **sizes)
    rng = np.random.default_rng(k)
    ours = world.hot
    theirs = HotState(ours.positions.copy(), ours.lru.copy())
    plan, wanted = dirty_plan(rng, 4, k), dirty_plan(rng, 4, k)
    for _ in range(20):
        slots = batch_slots(rng, world)
        selected = selections(rng, world, slots)
        selected[:, rng.integers(0, k, 3)] = -1
        host.resolve(world.tables, ours, 0, selected, slots, plan)
        oracle.resolve(world.tables, theirs, 0, selected, slots, wanted)
        n = len(slots)
        assert (plan.locations[:n][selected == -1] == -1).all()
        for name in ("locations", "fetch_counts", "fetch_host_rows", "fetch_device_rows", "counts"):
            assert (getattr(plan, name)[:n] == getattr(wanted, name)[:n]).all(), name
        assert (ours.lru == theirs.lru).all()


def test_every_admission_starts_with_an_empty_hot_cache_sglang_27258() -> None:
    """There, one path to decoding skipped it. Here there is one path."""
    house = build(Residency.ADAPTIVE, device_pages=60, slots=2)
    opened: list[int] = []
    house.engine.open_slot = opened.append  # type: ignore[method-assign]
    serve_all(house, [Request(f"r{i}", prompt(30 + i, i), 20) for i in range(20)])
    assert len(opened) == 20 == house.scheduler.snapshot().totals.admitted


def test_growth_is_paid_for_at_admission_sglang_23704() -> None:
    """There, 38 requests were served and then all timed out: host memory for what they generate was not counted."""
    house = build(Residency.HISPARSE, device_pages=60, host_pages=2 * (MAX_LEN // 8))
    serve_all(house, [Request(f"r{i}", prompt(20, i), MAX_LEN - 20) for i in range(6)])


@pytest.mark.parametrize("short", ["slots", "device", "host", "index"])
def test_admission_is_gated_by_every_pool_sglang_22453(short: str) -> None:
    sizes = {"slots": 4, "device": 60, "host": 60, "index": 60} | {short: {"slots": 1, "device": 14}.get(short, 15)}
    pools = PoolSizes(sizes["slots"], sizes["device"], sizes["host"], sizes["index"], CHUNK)
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, pools)
    first = admit(hierarchy, 8, 20)
    assert hierarchy.admit(8, 20) is None
    hierarchy.end(first)
    land(hierarchy, transfers)
    admit(hierarchy, 8, 20)


def test_pages_on_loan_do_not_keep_a_request_out_vllm_51323() -> None:
    """There, a check of the whole prompt refused it before anything was reclaimed."""
    house = build(Residency.ADAPTIVE, device_pages=40, slots=4)
    house.scheduler.start()
    house.submit(Request("lends", prompt(200), 150))
    house.wait_for("decoding")
    house.submit(Request("needs", prompt(200, 1), 10))
    assert house.wait("needs").finish is FinishReason.LENGTH
    assert house.hierarchy.moved.reclaimed >= 15
    house.wait("lends")
    assert house.tokens("lends") == expected(prompt(200), 150)
    house.scheduler.stop(5)
    house.transfers.close()
    house.assert_empty()


def test_what_is_on_its_way_back_is_not_taken_again_vllm_ascend_16315() -> None:
    """There, freed blocks that waited for a fence were not counted, and more and more was preempted."""
    tuning = ResidencyTuning(backup_pages_per_tick=0)
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, PoolSizes(4, 45, 90, 90, CHUNK), tuning)
    for _ in range(3):
        run_to(hierarchy, transfers, admit(hierarchy, 18, 24), 18)
    lent = hierarchy.pages.budget.counts[Use.OPTIONAL]
    for _ in range(50):
        assert hierarchy.admit(4, 10) is None
        hierarchy.poll()
    assert lent - hierarchy.pages.budget.counts[Use.OPTIONAL] == 9, "more than one session lost its pages"
    land(hierarchy, transfers)
    admit(hierarchy, 4, 10)


def test_pages_are_copied_before_they_are_freed_sglang_40729() -> None:
    hierarchy, transfers = small_hierarchy(Residency.ADAPTIVE, PoolSizes(2, 26, 60, 60, CHUNK), ResidencyTuning())
    session = admit(hierarchy, 20, 30)
    run_to(hierarchy, transfers, session, 20)
    rows = transfers.device[hierarchy.tables.ready_map[session.slot, :10]].copy()
    assert hierarchy.admit(20, 30) is None
    assert hierarchy.pages.budget.free == 11, "a page was freed before its copy landed"
    land(hierarchy, transfers)
    assert (transfers.pool[session.host_pages[:10]] == rows).all()


def test_many_imports_at_once_all_arrive_vllm_56699() -> None:
    """There, 16 at once left 23 of 32 failed and the engine dead."""
    house = build(Residency.ADAPTIVE, device_pages=100, slots=16)
    serve_all(house, [Request(f"r{i}", prompt(150 + i, i), 5) for i in range(48)])


def test_several_sessions_of_the_greatest_length_run_together_sglang_26427() -> None:
    house = build(Residency.ADAPTIVE, device_pages=70, slots=4)
    serve_all(house, [Request(f"r{i}", prompt(MAX_LEN - 60, i), 60) for i in range(8)])


def test_stores_of_another_geometry_are_refused_sglang_27563() -> None:
    rows = np.zeros((6, 16), dtype=np.uint8)
    pages = np.array([0], dtype=np.int32)
    with pytest.raises(ValueError, match="expected \\[any, 16\\]"):
        host.copy_pages(rows, np.zeros((6, 24), dtype=np.uint8), pages, pages, 2)


def test_a_page_that_is_lost_is_noticed_at_once_vllm_54914() -> None:
    """There, a block that was nowhere killed the engine after days. The books are checked after every change."""
    hierarchy, transfers = small_hierarchy(Residency.HISPARSE, PoolSizes(1, 20, 60, 60, CHUNK))
    session = admit(hierarchy, 10, 20)
    run_to(hierarchy, transfers, session, 12)
    hierarchy.check()
    hierarchy.tables.host_map[session.slot, 2] = -1
    with pytest.raises(AssertionError, match=r"pages \[2\] are nowhere"):
        hierarchy.check()
