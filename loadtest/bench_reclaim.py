"""How much optional memory admissions take back, against the least they could; and whether refills fight them.

`python -m loadtest bench reclaim`: the control plane alone, as in `loadtest.bench_tick`. Sessions of mixed lengths come
and go; how many there are to be goes up and down, from what the pool could hold to far more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest.bench_tick import Clock, NoBytes
from loadtest.console import results_console
from trt_backend.config import ReclaimOrder, Residency
from trt_backend.kv.budget import Use
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource
from trt_backend.kv.reclaim import reclaim_order
from trt_backend.kv.residency import POLICIES, ResidencyTuning, need_of
from trt_backend.kv.session import Session
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import Fence, PassedFence

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

PAGE_TOKENS = 64
HOT_TOKENS = 4096
TOP_K = 2048
SHORTEST, LONGEST = 2 * 1024, 128 * 1024
"""Prompts, in tokens; every power of two as likely as the others."""
ANSWER_TOKENS = 4096
TOKENS_A_TICK = 4
FEWEST_SESSIONS, MOST_SESSIONS = 16, 64
ON_DEVICE = 0.5
"""Share of the histories at the highest load that has room on the device."""
BACKUP, BACKUPS = 4, (0, 4, 16, 64)
"""Dirty pages that are copied a tick in the background: what a deployment does, and what is compared."""
PERIOD = 400
"""Ticks from one peak of the load to the next."""
SOON = 64
"""Pages that are taken so many ticks after they were refilled, or fewer, have been refilled in vain."""


@dataclass
class RefillClock:
    """`NoBytes`, noting for each device page the tick in which its refill began; −1 for pages that came otherwise."""

    clock: Clock
    since: Int64

    def __post_init__(self) -> None:
        self._copies = NoBytes(self.clock)

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        """A copy to the host, over some ticks later."""
        return self._copies.backup(device_pages, host_pages, after)

    def refill(self, host_pages: Int32, device_pages: Int32, after: Fence) -> Fence:
        """A copy from the host, over some ticks later."""
        self.since[device_pages] = self.clock.tick
        return self._copies.refill(host_pages, device_pages, after)

    def forget(self, pages: Int32) -> Int64:
        """These pages leave their session; since when each had been refilled, or −1."""
        since = self.since[pages]
        self.since[pages] = -1
        return since


@dataclass(frozen=True, slots=True)
class Reclaim:
    """What one admission took. `deficit` pages were short; `least` is the smallest total of whole sessions that covers
    them, `fewest` how few sessions could. `enough` sessions of the order would have done, `touched` lost pages.
    `dirty` of the `taken` pages had no host copy yet; `in_vain` had been refilled just before."""

    deficit: int
    taken: int
    least: int
    touched: int
    enough: int
    fewest: int
    dirty: int
    in_vain: int


def least_cover(sizes: Sequence[int], deficit: int) -> int:
    """The smallest sum of some of `sizes` that is at least `deficit`; all together are enough.

    Bit n of the number is set if some of the sizes add up to n.
    """
    sums = 1
    for size in sizes:
        sums |= sums << size
    above = sums >> deficit
    return deficit + (above & -above).bit_length() - 1


def fewest_cover(sizes: Sequence[int], deficit: int) -> int:
    """How many of the largest add up to `deficit`."""
    return int(np.searchsorted(np.cumsum(sorted(sizes, reverse=True)), deficit)) + 1


@dataclass
class World:
    """A deployment whose load goes up and down; the same requests in the same order whatever the tuning."""

    order: ReclaimOrder
    hysteresis: int | None = None
    backup: int = BACKUP
    seed: int = 0
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        layout = KvLayout(
            (KvSource("rows", 656),), (IndexGroup((0,), TOP_K, 132),), page_tokens=PAGE_TOKENS, hot_tokens=HOT_TOKENS
        )
        longest = LONGEST + ANSWER_TOKENS
        slots, pages = MOST_SESSIONS + 8, layout.pages_for(longest)
        mean_tokens = (LONGEST - SHORTEST) / math.log(LONGEST / SHORTEST)
        histories = int(MOST_SESSIONS * layout.pages_for(int(mean_tokens)) * ON_DEVICE)
        device = slots * (layout.hot_pages + 3) + histories
        sizes = PoolSizes(slots, device, host_pages=slots * pages, index_pages=slots * pages, chunk_tokens=8192)
        policy = POLICIES[Residency.ADAPTIVE]
        # As `trt_backend.build` sets them where a deployment does not.
        reserve = need_of(layout, policy, PAGE_TOKENS, 2 * PAGE_TOKENS, device, sizes.chunk_tokens).device
        self.tuning = ResidencyTuning(
            self.order, reserve, device // 50 if self.hysteresis is None else self.hysteresis, 64, self.backup, True
        )
        self.device_pages = device
        self.refills = RefillClock(self.clock, np.full(device, -1, dtype=np.int64))
        tables = SlotTables.empty(layout, slots, longest)
        self.hierarchy = Hierarchy(layout, policy, tables, self.refills, sizes, self.tuning)
        self.lengths, self.leaving, self.heats = np.random.default_rng(self.seed).spawn(3)
        self.live: list[Session] = []
        self.waiting: int | None = None
        self.heat = np.zeros(slots)
        self.reclaims: list[Reclaim] = []
        self.admitted = 0
        self.lent: list[int] = []

    def tick(self) -> None:
        """One round, in the scheduler's order."""
        self.clock.tick += 1
        hierarchy = self.hierarchy
        self._change_load()
        hierarchy.contend(self.waiting is not None)
        hierarchy.poll()
        if self.waiting is not None:
            self._admit(self.waiting)
        hierarchy.tend()
        if self.live:
            self._decode()
        self.lent.append(hierarchy.pages.budget.counts[Use.OPTIONAL])

    def _change_load(self) -> None:
        swing = (1 - math.cos(2 * math.pi * self.clock.tick / PERIOD)) / 2
        wanted = FEWEST_SESSIONS + round((MOST_SESSIONS - FEWEST_SESSIONS) * swing)
        full = [session for session in self.live if session.length + TOKENS_A_TICK > session.max_length]
        for session in full:
            self._leave(session)
        if len(self.live) > wanted:
            self._leave(self.live[int(self.leaving.integers(len(self.live)))])
        elif len(self.live) < wanted and self.waiting is None:
            self.waiting = round(SHORTEST * (LONGEST / SHORTEST) ** self.lengths.random())

    def _leave(self, session: Session) -> None:
        self.refills.forget(self.hierarchy.pages.owned_by(session.slot))
        self.live.remove(session)
        self.hierarchy.end(session)

    def _admit(self, prompt_tokens: int) -> None:
        hierarchy, columns, pages = self.hierarchy, self.hierarchy.columns, self.hierarchy.pages
        max_length = prompt_tokens + ANSWER_TOKENS
        counts = pages.budget.counts
        need = hierarchy.need_of(prompt_tokens, max_length).device
        deficit = need - counts[Use.FREE] - counts[Use.IN_TRANSIT]
        lent = columns.optional + columns.refilling
        sizes = lent[reclaim_order(columns, self.order)]
        use, owner, dirty = pages.use.copy(), pages.owner.copy(), int(columns.dirty.sum())
        session = hierarchy.admit(prompt_tokens, max_length)
        taken = np.flatnonzero((use == Use.OPTIONAL) & (pages.use == Use.IN_TRANSIT)).astype(np.int32)
        since = self.refills.forget(taken)
        if len(taken):
            self.reclaims.append(
                Reclaim(
                    deficit=deficit,
                    taken=len(taken),
                    least=least_cover(sizes.tolist(), deficit),
                    touched=len(np.unique(owner[taken])),
                    enough=int(np.searchsorted(np.cumsum(sizes), deficit)) + 1,
                    fewest=fewest_cover(sizes.tolist(), deficit),
                    dirty=dirty - int(columns.dirty.sum()),
                    in_vain=int(((since >= 0) & (since >= self.clock.tick - SOON)).sum()),
                )
            )
        if session is None:
            return
        self.waiting = None
        self.admitted += 1
        self.live.append(session)
        self.heat[session.slot] = self.heats.random()
        # Its import is over at once.
        hierarchy.wrote(
            np.array([session.slot], dtype=np.int32), np.array([prompt_tokens], dtype=np.int32), PassedFence()
        )

    def _decode(self) -> None:
        hierarchy, columns = self.hierarchy, self.hierarchy.columns
        slots = np.array([session.slot for session in self.live], dtype=np.int32)
        slots = slots[hierarchy.rooms(slots) >= TOKENS_A_TICK]
        counts = np.full(len(slots), TOKENS_A_TICK, dtype=np.int32)
        hierarchy.place(slots, counts)
        hierarchy.take_recycled()
        hierarchy.wrote(slots, counts, PassedFence())
        # Some sessions look at what lies on the device more than others do: what makes one cold.
        resident = columns.optional[slots] * PAGE_TOKENS / np.maximum(1, columns.length[slots])
        hierarchy.note_hits(slots, (TOP_K * self.heat[slots] * resident).astype(np.int64))


def run(order: ReclaimOrder, hysteresis: int | None, backup: int, ticks: int) -> dict[str, Any]:
    """One world for so many ticks, in numbers."""
    world = World(order, hysteresis, backup)
    for _ in range(ticks):
        world.tick()
    world.hierarchy.check()
    reclaims, moved = world.reclaims, world.hierarchy.moved
    total = {key: sum(asdict(one)[key] for one in reclaims) for key in Reclaim.__dataclass_fields__}
    return {
        "order": order.value,
        "device_pages": world.device_pages,
        "reserve_pages": world.tuning.reserve_pages,
        "hysteresis_pages": world.tuning.hysteresis_pages,
        "backup_pages_per_tick": backup,
        "ticks": ticks,
        "admissions": world.admitted,
        "reclaims": len(reclaims),
        "pages_a_reclaim": {key: total[key] / len(reclaims) for key in ("deficit", "least", "taken", "dirty")},
        "pages_an_admission": {key: total[key] / world.admitted for key in ("deficit", "least", "taken", "dirty")}
        | {"refilled": moved.refilled / world.admitted},
        "taken_over_least": total["taken"] / total["least"],
        "sessions_a_reclaim": {key: total[key] / len(reclaims) for key in ("touched", "enough", "fewest")},
        "superfluous_sessions": total["touched"] - total["enough"],
        "refilled_pages": moved.refilled,
        "in_vain_pages": total["in_vain"],
        "in_vain_share": total["in_vain"] / max(1, moved.refilled),
        "optional_pages_mean": float(np.mean(world.lent)),
    }


def order_table(results: Sequence[dict[str, Any]]) -> Table:
    """Pages and sessions that admissions took, by order."""
    table = Table(box=SIMPLE, title="pages an admission, and sessions a reclaim")
    table.add_column("order")
    for column in ("reclaims", "least", "taken", "÷ least", "dirty", "refilled", "sessions", "needed", "fewest"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in results:
        pages, sessions = one["pages_an_admission"], one["sessions_a_reclaim"]
        table.add_row(
            one["order"],
            f"{one['reclaims']}/{one['admissions']}",
            *(f"{pages[key]:.0f}" for key in ("least", "taken")),
            f"{one['taken_over_least']:.2f}",
            *(f"{pages[key]:.0f}" for key in ("dirty", "refilled")),
            *(f"{sessions[key]:.2f}" for key in ("touched", "enough", "fewest")),
        )
    return table


def hysteresis_table(results: Sequence[dict[str, Any]]) -> Table:
    """Refills that were in vain, by hysteresis."""
    table = Table(box=SIMPLE, title=f"refilled pages; in vain: taken within {SOON} ticks")
    table.add_column("order")
    for column in ("hysteresis", "refilled", "in vain", "share", "on loan, mean"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in sorted(results, key=lambda one: (one["order"], one["hysteresis_pages"])):
        table.add_row(
            one["order"],
            str(one["hysteresis_pages"]),
            str(one["refilled_pages"]),
            str(one["in_vain_pages"]),
            f"{one['in_vain_share']:.1%}",
            f"{one['optional_pages_mean']:.0f}",
        )
    return table


def backup_table(results: Sequence[dict[str, Any]]) -> Table:
    """What reclaims had to copy before pages came back, by how much was copied in the background."""
    table = Table(box=SIMPLE, title="background backup: dirty pages that reclaims wait for")
    table.add_column("order")
    for column in ("pages a tick", "taken a reclaim", "of them dirty", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in results:
        pages = one["pages_a_reclaim"]
        table.add_row(
            one["order"],
            str(one["backup_pages_per_tick"]),
            *(f"{pages[key]:.0f}" for key in ("taken", "dirty")),
            f"{pages['dirty'] / pages['taken']:.0%}",
        )
    return table


def main(
    ticks: Annotated[int, typer.Option(min=PERIOD, help="Ticks of each run.")] = 10 * PERIOD,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Measure what admissions take back, for each reclaim order; refills in vain, with and without hysteresis; and what
    background backup leaves for reclaims to copy."""
    runs: list[tuple[ReclaimOrder, int | None, int]]
    runs = [(order, hysteresis, BACKUP) for order in ReclaimOrder for hysteresis in (None, 0)]
    orders = len(runs)
    runs += [(ReclaimOrder.OLDEST, None, backup) for backup in BACKUPS]
    with Progress(console=Console(stderr=True)) as progress:
        results = [run(*which, ticks) for which in progress.track(runs, description="worlds")]
    console = results_console()
    console.print(order_table(results[:orders:2]))
    console.print(hysteresis_table(results[:orders]))
    console.print(backup_table(results[orders:]))
    superfluous, reclaims = (sum(one[key] for one in results) for key in ("superfluous_sessions", "reclaims"))
    console.print(f"{superfluous} sessions lost pages without need, in {reclaims} reclaims")
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
