"""What the kernels must do, in plain Python over NumPy arrays: written to be obviously right, not fast.

Each function has the contract of its namesake in `plugins.host` and works
on the same objects; the tests demand equal results, entry for entry. Nothing here follows the kernels' method: the
hot cache is an ordered dictionary, selections are sorted lists.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np

from plugins.host import Adoption, Float32, HotState, Int32, Plan, ResolverTables, UInt8


def direct_row(tables: ResolverTables, slot: int, position: int) -> int | None:
    """Arena row of a position whose page is in the tail or READY; None if it is neither, or no position."""
    page, offset = divmod(position, tables.page_rows)
    if position < 0 or page >= tables.ready_map.shape[1]:
        return None
    first = int(tables.tail_first[slot])
    if first >= 0 and page in (first, first + 1, first + 2) and tables.tail_pages[slot, page % 3] >= 0:
        return int(tables.tail_pages[slot, page % 3]) * tables.page_rows + offset
    if tables.ready_map[slot, page] >= 0:
        return int(tables.ready_map[slot, page]) * tables.page_rows + offset
    return None


def host_row(tables: ResolverTables, slot: int, position: int) -> int | None:
    """Row of a position in the host pool; None if the host has no copy, or it is no position."""
    page, offset = divmod(position, tables.page_rows)
    if position < 0 or page >= tables.host_map.shape[1] or tables.host_map[slot, page] < 0:
        return None
    return int(tables.host_map[slot, page]) * tables.page_rows + offset


def hot_row(tables: ResolverTables, slot: int, hot_slot: int) -> int:
    """Arena row of a slot of the hot cache."""
    page, offset = divmod(hot_slot, tables.page_rows)
    return int(tables.hot_pages[slot, page]) * tables.page_rows + offset


def resolve(tables: ResolverTables, hot: HotState, group: int, selected: Int32, slots: Int32, out: Plan) -> Plan:
    """`host.resolve`, one session after the other."""
    out.sessions = len(slots)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            out.locations[n] = out.fetch_host_rows[n] = out.fetch_device_rows[n] = -1
            out.fetch_counts[n] = out.counts[n] = 0
        else:
            _resolve_session(
                tables, hot.positions[group, slot], hot.lru[group, slot], selected[n].tolist(), slot, n, out
            )
    return out


def _resolve_session(
    tables: ResolverTables, positions: Int32, lru: Int32, selected: list[int], slot: int, n: int, out: Plan
) -> None:
    """Resolve one session. `positions` and `lru` are its lines [hot rows] of the hot state, updated in place."""
    usable = len(lru) > 0 and bool((tables.hot_pages[slot] >= 0).all())
    # Hot slot -> position, the least recently used first.
    cache: OrderedDict[int, int] = OrderedDict((hot_slot, int(positions[hot_slot])) for hot_slot in lru.tolist())
    hot_slot_of = {position: hot_slot for hot_slot, position in cache.items() if position >= 0} if usable else {}

    missing = [p for p in dict.fromkeys(selected) if p != -1 and direct_row(tables, slot, p) is None]
    used = {position: hot_slot_of[position] for position in missing if position in hot_slot_of}
    touched = set(used.values())
    victims = iter([hot_slot for hot_slot in cache if hot_slot not in touched])
    fetched: dict[int, int] = {}
    for position in missing:
        if usable and position not in used and host_row(tables, slot, position) is not None:
            fetched[position] = next(victims)

    found = used | fetched
    for position in missing:
        if position in found:
            cache[found[position]] = position
            cache.move_to_end(found[position])
    lru[:] = list(cache)
    for hot_slot, position in cache.items():
        positions[hot_slot] = position

    counts = [0, 0, 0, 0, 0]
    for i, position in enumerate(selected):
        direct = direct_row(tables, slot, position)
        if position == -1:
            kind, location = 3, -1
        elif direct is not None:
            kind, location = 0, direct
        elif position in used:
            kind, location = 1, hot_row(tables, slot, found[position])
        elif position in fetched:
            kind, location = 2, hot_row(tables, slot, found[position])
        else:
            kind, location = 4, -1
        counts[kind] += 1
        out.locations[n, i] = location
    out.counts[n] = counts
    out.fetch_counts[n] = len(fetched)
    out.fetch_host_rows[n] = out.fetch_device_rows[n] = -1
    for r, (position, hot_slot) in enumerate(fetched.items()):
        source = host_row(tables, slot, position)
        assert source is not None
        out.fetch_host_rows[n, r] = source
        out.fetch_device_rows[n, r] = hot_row(tables, slot, hot_slot)


def adopt(
    tables: ResolverTables,
    hot: HotState,
    group: int,
    latest: Int32,
    slots: Int32,
    index: Int32,
    pages: Int32,
    out: Adoption,
) -> Adoption:
    """`host.adopt`, page after page and row after row."""
    out.source_rows[:] = out.target_rows[:] = -1
    for n, (slot, number, page) in enumerate(zip(slots.tolist(), index.tolist(), pages.tolist(), strict=True)):
        copies = []
        if slot >= 0 and (tables.hot_pages[slot] >= 0).all():
            selected = {position for position in latest[slot].tolist() if position >= 0}
            for offset in range(tables.page_rows):
                position = number * tables.page_rows + offset
                hot_slot = _make_hot(hot.positions[group, slot], hot.lru[group, slot], selected, position)
                if hot_slot is not None:
                    copies.append((page * tables.page_rows + offset, hot_row(tables, slot, hot_slot)))
        out.counts[n] = len(copies)
        for r, (source, target) in enumerate(copies):
            out.source_rows[n, r], out.target_rows[n, r] = source, target
    return out


def _make_hot(positions: Int32, lru: Int32, selected: set[int], position: int) -> int | None:
    """The hot slot that a position takes, now the most recent; None if it is not selected, is hot, or none is free.

    `positions` and `lru` are one session's lines [hot rows] of the hot state, updated in place.
    """
    if position not in selected or position in positions:
        return None
    order: list[int] = lru.tolist()
    victim = next((hot_slot for hot_slot in order if int(positions[hot_slot]) not in selected), None)
    if victim is None:
        return None
    positions[victim] = position
    order.remove(victim)
    lru[:] = [*order, victim]
    return victim


def locate(tables: ResolverTables, selected: Int32, slots: Int32, out: Int32) -> int:
    """`host.locate`, entry by entry."""
    masked = 0
    for t, slot in enumerate(slots.tolist()):
        for i, position in enumerate(selected[t].tolist()):
            row = None if slot < 0 else direct_row(tables, slot, position)
            out[t, i] = -1 if row is None else row
            masked += row is None and slot >= 0 and position != -1
    return masked


def topk(scores: Float32, visible: Int32, k: int, out: Int32 | None = None) -> Int32:
    """`host.topk` by sorting (score descending, position ascending)."""
    selected = np.empty((len(visible), k), dtype=np.int32) if out is None else out
    for t, seen in enumerate(visible.tolist()):
        line = [-math.inf if math.isnan(score) else score for score in scores[t, :seen].tolist()]
        best = sorted(sorted(range(seen), key=lambda position: (-line[position], position))[:k])
        selected[t] = best + [-1] * (k - len(best))
    return selected


def fetch_rows(host: UInt8, device: UInt8, plan: Plan) -> None:
    """`host.fetch_rows`, row by row."""
    for n in range(plan.sessions):
        for r in range(int(plan.fetch_counts[n])):
            device[plan.fetch_device_rows[n, r]] = host[plan.fetch_host_rows[n, r]]


def copy_rows(arena: UInt8, adoption: Adoption) -> None:
    """`host.copy_rows`, row by row."""
    for n, count in enumerate(adoption.counts.tolist()):
        for r in range(count):
            arena[adoption.target_rows[n, r]] = arena[adoption.source_rows[n, r]]


def copy_pages(source: UInt8, target: UInt8, source_pages: Int32, target_pages: Int32, page_rows: int) -> None:
    """`host.copy_pages`, page by page."""
    for old, new in zip(source_pages.tolist(), target_pages.tolist(), strict=True):
        target[new * page_rows : (new + 1) * page_rows] = source[old * page_rows : (old + 1) * page_rows]
