"""The kernels on the CPU: the very sources that CUDA runs, compiled by the C++ compiler into `plugins._host`.

Arrays are passed without a copy, outputs are written in place, and the GIL is released while a kernel runs.
A wrong dtype, shape or layout raises ValueError with the numbers, before anything is written.

"Position" means an entry of a source: a token when its ratio is 1, a group of tokens otherwise. Device rows are
rows of the arena (`device page × page_rows + offset`), host rows are rows of the host pool, alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plugins import _host

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ResolverTables:
    """Where the pages of every slot are; −1 means "none". Views of the owner's int32 tables, never copies.

    | table | shape | value |
    |---|---|---|
    | `ready_map` | [slots, pages] | device page of a page of history |
    | `host_map` | [slots, pages] | host page of the same |
    | `tail_first` | [slots] | page index of the oldest tail page |
    | `tail_pages` | [slots, 3] | device page of tail page index i at column i % 3 |
    | `hot_pages` | [slots, hot pages] | device pages of the hot cache |

    `page_rows` is the number of rows (positions) of one page in the source at hand: `page_tokens / ratio`.
    A slot of which any hot page is −1 has no hot cache.
    """

    ready_map: Int32
    host_map: Int32
    tail_first: Int32
    tail_pages: Int32
    hot_pages: Int32
    page_rows: int


@dataclass(frozen=True, slots=True)
class HotState:
    """What the hot cache of every index group and slot holds. Both arrays int32 [groups, slots, hot rows].

    `positions[g, s, h]` is the position in hot slot h, or −1. `lru[g, s]` lists the hot slots, the least recently
    used first; it is always a permutation. Hot slot h is row `h % page_rows` of the slot's hot page
    `h // page_rows`.
    """

    positions: Int32
    lru: Int32

    @classmethod
    def empty(cls, groups: int, slots: int, hot_rows: int) -> HotState:
        """Empty hot caches of `hot_rows` rows: B of the group, 0 where the deployment has no hot cache."""
        positions = np.full((groups, slots, hot_rows), -1, dtype=np.int32)
        lru = np.empty_like(positions)
        lru[:] = np.arange(hot_rows, dtype=np.int32)
        return cls(positions, lru)

    def clear(self, slot: int) -> None:
        """Forget everything in a slot, in all groups, before it has a new owner."""
        self.positions[:, slot] = -1
        self.lru[:, slot] = np.arange(self.lru.shape[2], dtype=np.int32)


class Counts(NamedTuple):
    """Where selected entries were found at the start of a step; the sum is the number of entries."""

    direct: int
    hot: int
    host: int
    padding: int
    masked: int


@dataclass(slots=True)
class Plan:
    """What `resolve` found out; allocated once and reused. Lines `[0, sessions)` are those of the last resolve.

    | array | shape | value |
    |---|---|---|
    | `locations` | int32 [capacity, K] | arena row of each selected entry, −1 for padding and masked entries |
    | `fetch_counts` | int32 [capacity] | rows to copy from the host pool |
    | `fetch_host_rows` | int32 [capacity, K] | their rows in the host pool; −1 beyond the count |
    | `fetch_device_rows` | int32 [capacity, K] | their rows in the arena; −1 beyond the count |
    | `counts` | int32 [capacity, 5] | entries found direct, hot, host; padding; masked |

    Every entry is counted by where its position was at the start of the step: a repeated missing position counts as
    host each time, and is fetched once. The line of a batch-padding slot is −1 throughout, its counts are zero.
    """

    locations: Int32
    fetch_counts: Int32
    fetch_host_rows: Int32
    fetch_device_rows: Int32
    counts: Int32
    sessions: int = field(default=0)

    @classmethod
    def empty(cls, capacity: int, k: int) -> Plan:
        """Room for `capacity` sessions with K = `k` selected entries each."""

        def lines(*shape: int) -> Int32:
            return np.zeros(shape, dtype=np.int32)

        return cls(
            locations=lines(capacity, k),
            fetch_counts=lines(capacity),
            fetch_host_rows=lines(capacity, k),
            fetch_device_rows=lines(capacity, k),
            counts=lines(capacity, len(Counts._fields)),
        )

    def totals(self) -> Counts:
        """Counters of the last resolve, summed over its sessions."""
        return Counts(*(int(total) for total in self.counts[: self.sessions].sum(axis=0, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class Adoption:
    """What `adopt` took into the hot cache: copies within an arena, a line for each recycled page.

    | array | shape | value |
    |---|---|---|
    | `counts` | int32 [recycled] | rows to copy |
    | `source_rows` | int32 [recycled, page rows] | their rows in the recycled page; −1 beyond the count |
    | `target_rows` | int32 [recycled, page rows] | their rows in the hot cache; −1 beyond the count |

    No row is the target of two copies, and none is a source and a target.
    """

    counts: Int32
    source_rows: Int32
    target_rows: Int32

    @classmethod
    def empty(cls, recycled: int, page_rows: int) -> Adoption:
        """Room for `recycled` pages of `page_rows` rows each."""
        source_rows = np.zeros((recycled, page_rows), dtype=np.int32)
        return cls(np.zeros(recycled, dtype=np.int32), source_rows, np.zeros_like(source_rows))


@dataclass(frozen=True, slots=True)
class Threads:
    """How the twin runs a phase. `count` 0 is production: one thread, in order.

    With a count, phases run as that many emulated threads in an order shuffled by `seed`, and what CUDA may delay
    past the next chunk of a compaction is delayed at random. A kernel whose result depends on either has a race.
    """

    count: int = 0
    seed: int = 0


IN_ORDER = Threads()


def resolve(
    tables: ResolverTables,
    hot: HotState,
    group: int,
    selected: Int32,
    slots: Int32,
    out: Plan,
    threads: Threads = IN_ORDER,
) -> Plan:
    """Find the arena rows of selected positions: direct, else hot, else to be fetched from the host into the
    least recently used hot slots that this step has not used.

    Args:
        tables: where the pages are.
        hot: hot caches; those of `group` and the slots of the batch are updated.
        group: index group, `0 <= group < groups`.
        selected: int32 [n, K] positions in any order, −1 for padding; a position may be repeated.
        slots: int32 [n], each slot at most once; −1 for batch padding.
        out: lines [0, n) are written in full; `out.sessions` becomes n.
        threads: see `Threads`.

    Returns:
        `out`. A position that is nowhere (or is not one) has location −1, counts as masked and takes no hot slot.

    Raises:
        ValueError: dtype, shape or layout; a slot or group out of range or given twice; 0 < B < K.
    """
    _host.resolve(
        tables.ready_map,
        tables.host_map,
        tables.tail_first,
        tables.tail_pages,
        tables.hot_pages,
        tables.page_rows,
        hot.positions,
        hot.lru,
        group,
        selected,
        slots,
        out.locations,
        out.fetch_counts,
        out.fetch_host_rows,
        out.fetch_device_rows,
        out.counts,
        threads.count,
        threads.seed,
    )
    out.sessions = len(slots)
    return out


def adopt(
    tables: ResolverTables,
    hot: HotState,
    group: int,
    latest: Int32,
    slots: Int32,
    index: Int32,
    pages: Int32,
    out: Adoption,
    threads: Threads = IN_ORDER,
) -> Adoption:
    """Take rows of pages that have left a tail into the hot cache, as if the latest resolve had missed them.

    Of each page the rows that the slot's latest resolve selected and that are not hot take, in order of position, the
    least recently used hot slots that hold nothing of that selection, and become the most recent. `copy_rows` must
    follow, for every source of the group, before the pages are written again.

    Args:
        tables: where the hot caches are; only `hot_pages` and `page_rows` are read.
        hot: hot caches; those of `group` and the slots of the pages are updated.
        group: index group, `0 <= group < groups`.
        latest: int32 [slots, K] positions that the latest resolve of each slot selected, in any order, perhaps
            repeated; −1 for padding, and throughout where there was none. K may exceed B: rows for which no hot slot
            is left are not taken.
        slots: int32 [n], the slot of each recycled page (repeats are adopted in order); −1 for batch padding.
        index: int32 [n], which page of its session each of them holds.
        pages: int32 [n], the device page that holds it.
        out: a plan of n lines, written in full.
        threads: see `Threads`.

    Returns:
        `out`. A slot that lacks a hot page adopts nothing.

    Raises:
        ValueError: dtype, shape or layout; a slot, page or group out of range.
    """
    _host.adopt(
        tables.hot_pages,
        tables.page_rows,
        hot.positions,
        hot.lru,
        group,
        latest,
        slots,
        index,
        pages,
        out.counts,
        out.source_rows,
        out.target_rows,
        threads.count,
        threads.seed,
    )
    return out


def locate(tables: ResolverTables, selected: Int32, slots: Int32, out: Int32, threads: Threads = IN_ORDER) -> int:
    """Find the arena rows of selected positions by the direct rule alone, for the tokens of prompt chunks.

    Args:
        tables: where the pages are; `host_map` and `hot_pages` are not read.
        selected: int32 [T, K] positions, −1 for padding.
        slots: int32 [T], the slot of each token (repeats are usual); −1 for batch padding.
        out: int32 [T, K], written in full: arena rows, −1 for padding and for what is not found.
        threads: see `Threads`.

    Returns:
        The number of masked entries: neither padding nor found. Anything but 0 is a fault of the caller.

    Raises:
        ValueError: dtype, shape or layout; a slot out of range.
    """
    return _host.locate(
        tables.ready_map,
        tables.tail_first,
        tables.tail_pages,
        tables.page_rows,
        selected,
        slots,
        out,
        threads.count,
        threads.seed,
    )


def topk(scores: Float32, visible: Int32, k: int, out: Int32 | None = None, threads: Threads = IN_ORDER) -> Int32:
    """Choose the `k` largest scores of each line, ties to the lower position, in ascending order of position.

    Args:
        scores: float32 [T, stride]; the last axis is contiguous, lines may be strided. −0 equals +0; NaN is −inf.
        visible: int32 [T]; only the first `visible[t]` scores of line t are candidates. Where `visible[t] <= k`
            all are chosen and no score is read.
        k: K, positive.
        out: int32 [T, K]; allocated if not given.
        threads: see `Threads`.

    Returns:
        `out`: positions, padded with −1.

    Raises:
        ValueError: dtype, shape or layout; `visible` outside [0, stride].
    """
    selected = np.empty((len(visible), k), dtype=np.int32) if out is None else out
    _host.topk(scores, visible, k, selected, threads.count, threads.seed)
    return selected


def fetch_rows(host: UInt8, device: UInt8, plan: Plan) -> None:
    """Copy the rows of a plan from the host pool of one source to its arena.

    Layers that share a selection have the same plan: call once for each source, with that source's stores.

    Args:
        host: uint8 [host rows, row bytes].
        device: uint8 [arena rows, row bytes].
        plan: as `resolve` left it; `plan.sessions` lines are replayed.

    Raises:
        ValueError: dtype, shape or layout; a row of the plan outside its store.
    """
    _host.fetch_rows(host, device, plan.fetch_counts, plan.fetch_host_rows, plan.fetch_device_rows, plan.sessions)


def copy_rows(arena: UInt8, adoption: Adoption) -> None:
    """Copy the adopted rows within the arena of one source.

    Layers that share a selection have the same plan: call once for each source, with that source's arena.

    Args:
        arena: uint8 [arena rows, row bytes].
        adoption: as `adopt` left it.

    Raises:
        ValueError: dtype, shape or layout; a row of the plan outside the arena.
    """
    _host.copy_rows(arena, adoption.counts, adoption.source_rows, adoption.target_rows)


def copy_pages(source: UInt8, target: UInt8, source_pages: Int32, target_pages: Int32, page_rows: int) -> None:
    """Copy whole pages of one source between two stores: a backup (arena to host pool) or its way back.

    Args:
        source: uint8 [rows, row bytes]; page p is rows `[p × page_rows, (p + 1) × page_rows)`.
        target: uint8 [rows, row bytes], another store with rows of the same size.
        source_pages: int32 [n] page ids.
        target_pages: int32 [n] page ids, distinct.
        page_rows: rows of a page.

    Raises:
        ValueError: dtype, shape or layout; a page outside its store.
    """
    _host.copy_pages(source, target, source_pages, target_pages, page_rows)
