"""Random deployments for the resolver's tests: tables, hot caches, selections and stores that fit together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from plugins import oracle
from plugins.host import Adoption, HotState, Int32, Plan, ResolverTables, UInt8

KS = (1, 31, 32, 33, 64, 2048)
GROUPS = 2


@dataclass(frozen=True, slots=True)
class World:
    """A deployment of `slots` sessions, each with `lengths[slot]` positions spread over the tiers.

    Every page has a device page or a host page of its own, so a location or a fetch that is off by one page is seen.
    """

    tables: ResolverTables
    hot: HotState
    lengths: list[int]
    k: int
    batch: int
    steps: int
    seed: int


@st.composite
def worlds(draw: st.DrawFn, ks: tuple[int, ...] = KS, most_rows: int = 1_000_000) -> World:
    """A world with K among `ks`, B from K to 8192 (or 0), histories of up to `most_rows` positions."""
    k = draw(st.sampled_from(ks))
    page_rows = draw(st.sampled_from((1, 3, 16, 64)))
    fewest = -(-k // page_rows)
    hot_pages = draw(st.one_of(st.just(fewest), st.integers(fewest, 8192 // page_rows), st.just(0)))
    slots = draw(st.integers(1, 4))
    most_pages = most_rows // page_rows
    pages = draw(st.one_of(st.integers(1, 40), st.integers(1, most_pages))) if most_pages > 40 else most_pages
    return make_world(
        k=k,
        page_rows=page_rows,
        hot_pages=hot_pages,
        slots=slots,
        pages=pages,
        resident=draw(st.sampled_from((0.0, 0.3, 0.9, 1.0))),
        lost=draw(st.sampled_from((0.0, 0.0, 0.05))),
        batch=draw(st.integers(1, slots + 1)),
        steps=draw(st.integers(2, 5)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def make_world(
    *,
    k: int,
    page_rows: int,
    hot_pages: int,
    slots: int,
    pages: int,
    resident: float,
    lost: float,
    batch: int,
    steps: int,
    seed: int,
) -> World:
    """Spread pages over the tiers at random: a share `resident` of the complete ones is READY, `lost` are nowhere."""
    rng = np.random.default_rng(seed)
    ready = np.full((slots, pages), -1, dtype=np.int32)
    host = np.full((slots, pages), -1, dtype=np.int32)
    tail_first = np.full(slots, -1, dtype=np.int32)
    tail = np.full((slots, 3), -1, dtype=np.int32)
    hot = np.full((slots, hot_pages), -1, dtype=np.int32)
    device_ids = rng.permutation(slots * (pages + 3 + hot_pages)).astype(np.int32)
    host_ids = rng.permutation(slots * pages).astype(np.int32)
    next_device = 0

    def device(count: int) -> Int32:
        nonlocal next_device
        next_device += count
        return device_ids[next_device - count : next_device]

    lengths = []
    for slot in range(slots):
        # A third of the sessions end exactly at a page boundary.
        length = int(rng.integers(1, pages * page_rows + 1))
        if rng.random() < 0.34:
            length = -(-length // page_rows) * page_rows
        lengths.append(length)
        held = -(-length // page_rows)
        first = max(0, held - int(rng.integers(1, 4)))
        tail_first[slot] = first
        for page in range(first, held):
            tail[slot, page % 3] = device(1)[0]
        ready[slot, :first] = np.where(rng.random(first) < resident, device(first), -1)
        # A READY page may have a host copy too; one that is not READY has it, unless it is lost.
        backed = (ready[slot, :first] < 0) | (rng.random(first) < 0.5)
        host[slot, :first] = np.where(backed, host_ids[slot * pages : slot * pages + first], -1)
        gone = rng.random(first) < lost
        ready[slot, :first][gone] = -1
        host[slot, :first][gone] = -1
        hot[slot] = device(hot_pages)
        if hot_pages and rng.random() < 0.05:
            hot[slot, int(rng.integers(hot_pages))] = -1
    tables = ResolverTables(ready, host, tail_first, tail, hot, page_rows)
    return World(tables, HotState.empty(GROUPS, slots, hot_pages * page_rows), lengths, k, batch, steps, seed)


def copy_hot(hot: HotState) -> HotState:
    """The same hot caches in arrays of their own."""
    return HotState(hot.positions.copy(), hot.lru.copy())


def dirty_plan(rng: np.random.Generator, capacity: int, k: int) -> Plan:
    """A plan whose buffers are full of old values."""
    plan = Plan.empty(capacity, k)
    for lines in (plan.locations, plan.fetch_counts, plan.fetch_host_rows, plan.fetch_device_rows, plan.counts):
        lines[:] = rng.integers(-(2**31), 2**31, lines.shape)
    return plan


def batch_slots(rng: np.random.Generator, world: World) -> Int32:
    """Distinct slots in random order, some of them batch padding."""
    slots = np.full(world.batch, -1, dtype=np.int32)
    real = rng.permutation(len(world.lengths))[: world.batch]
    slots[: len(real)] = real
    slots[rng.random(world.batch) < 0.1] = -1
    return rng.permutation(slots).astype(np.int32)


def selections(rng: np.random.Generator, world: World, slots: Int32) -> Int32:
    """[len(slots), K] positions: mostly from a window that moves from step to step, so that steps share positions;
    with padding, repeats inside a line, and now and then what is no position at all."""
    selected = np.full((len(slots), world.k), -1, dtype=np.int32)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            selected[n] = rng.integers(0, 100, world.k)
            continue
        length = world.lengths[slot]
        window = min(length, int(rng.choice((world.k, 2 * world.k, length))))
        start = int(rng.integers(0, max(1, min(length - window, world.k // 4) + 1)))
        count = int(rng.integers(0, world.k + 1)) if rng.random() < 0.3 else world.k
        if rng.random() < 0.3:
            chosen = rng.integers(start, start + window, count)
        else:
            chosen = rng.permutation(np.arange(start, start + window))[:count]
        selected[n, : len(chosen)] = chosen
        selected[n, rng.random(world.k) < 0.05] = -1
        if rng.random() < 0.2:
            limit = world.tables.ready_map.shape[1] * world.tables.page_rows
            wrong = np.array([limit, limit + 5, 2**31 - 1, -2, -(2**31)], dtype=np.int32)
            where = rng.integers(0, world.k, 3)
            selected[n, where] = rng.choice(wrong, 3)
        if rng.random() < 0.5:
            selected[n] = rng.permutation(selected[n])
    return selected


def latest_selections(rng: np.random.Generator, world: World, hot: HotState, group: int, queries: int) -> Int32:
    """[slots, queries * K] what the latest resolve of every slot selected, a quarter of it from the newest pages; the
    last query has been resolved through `hot`. A fifth of the slots have resolved nothing since they were opened."""
    slots = np.arange(len(world.lengths), dtype=np.int32)
    blocks = [selections(rng, world, slots) for _ in range(queries)]
    for block in blocks:
        newest = [rng.integers(max(0, n - 3 * world.tables.page_rows), n, world.k) for n in world.lengths]
        np.copyto(block, np.array(newest), where=rng.random(block.shape) < 0.25, casting="same_kind")
    oracle.resolve(world.tables, hot, group, blocks[-1], slots, Plan.empty(len(slots), world.k))
    latest = np.concatenate(blocks, axis=1)
    latest[rng.random(len(slots)) < 0.2] = -1
    return latest


def recycled_pages(rng: np.random.Generator, world: World, latest: Int32) -> tuple[Int32, Int32, Int32]:
    """Slots, page indices and device pages, int32 [n] each, in no order, some of them batch padding: mostly pages of
    the tail, else pages of which something is selected, else any."""
    pages, page_rows = world.tables.ready_map.shape[1], world.tables.page_rows
    slots = rng.integers(-1, len(latest), int(rng.integers(0, 7))).astype(np.int32)
    index = rng.integers(0, pages, len(slots)).astype(np.int32)
    for n, slot in enumerate(slots.tolist()):
        selected = np.unique(latest[slot] // page_rows)
        selected = selected[(selected >= 0) & (selected < pages)]
        if rng.random() < 0.6:
            index[n] = rng.integers(max(0, world.tables.tail_first[slot]), -(-world.lengths[slot] // page_rows))
        elif len(selected):
            index[n] = rng.choice(selected)
    return slots, index, rng.permutation(1000)[: len(slots)].astype(np.int32)


def dirty_adoption(rng: np.random.Generator, recycled: int, page_rows: int) -> Adoption:
    """A plan of adoption whose buffers are full of old values."""
    plan = Adoption.empty(recycled, page_rows)
    for lines in (plan.counts, plan.source_rows, plan.target_rows):
        lines[:] = rng.integers(-(2**31), 2**31, lines.shape)
    return plan


def payload(slot: int, positions: Int32, row_bytes: int) -> UInt8:
    """[positions, row bytes] the row that a session has at each position: different for every slot and position."""
    column = np.arange(row_bytes, dtype=np.uint64)
    word = positions.astype(np.uint64)[:, None] * np.uint64(2654435761) + np.uint64(slot * 7919)
    return ((word >> (column % np.uint64(5) * np.uint64(7))) + column).astype(np.uint8)
