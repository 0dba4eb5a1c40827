"""How long a tick of the control plane takes: fences, admission, reclaim, refill, seals, tables; no model, no bytes.

`python -m loadtest.bench_tick`: sessions of 500K tokens, each writing 4 tokens a tick (a block of a drafter), 64 pages
refilled a tick, a request arriving and one leaving every tenth tick. A prompt comes in within a few ticks, as from a
prefill instance. Copies land after a few ticks.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.table import Table

from loadtest.console import results_console
from trt_backend.config import ReclaimOrder, Residency
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource
from trt_backend.kv.residency import POLICIES, ResidencyTuning
from trt_backend.kv.session import Session
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import Fence, PassedFence

Int32 = npt.NDArray[np.int32]

TOKENS = 500 * 1024
PAGE_TOKENS = 64
HOT_TOKENS = 4096
TOKENS_A_TICK = 4
REFILLS_A_TICK = 64
PROMPT_TOKENS_A_TICK = 64 * 1024
"""Twice what arrives, so that prompts don't pile up."""
TICKS_A_REQUEST = 10
LANDING_TICKS = 3
"""Ticks until a copy has landed."""
ON_DEVICE = 0.25
"""Share of the histories that has room on the device."""
WARM_TICKS = 50


class TickFence:
    """Passed some ticks after it was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due = clock.tick + LANDING_TICKS

    def done(self) -> bool:
        """Whether its tick has come."""
        return self._clock.tick >= self._due


@dataclass
class Clock:
    """Counts ticks."""

    tick: int = 0


@dataclass
class NoBytes:
    """Implements `kv.transfers.Transfers` without moving anything; counts pages."""

    clock: Clock
    pages: int = 0

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:  # noqa: ARG002
        """A copy to the host, over some ticks later."""
        self.pages += len(device_pages)
        return TickFence(self.clock)

    def refill(self, host_pages: Int32, device_pages: Int32, after: Fence) -> Fence:  # noqa: ARG002
        """A copy from the host, over some ticks later."""
        self.pages += len(device_pages)
        return TickFence(self.clock)


@dataclass
class World:
    """A deployment with `sessions` sessions in the middle of their answers."""

    sessions: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        layout = KvLayout(
            (KvSource("rows", 656),), (IndexGroup((0,), 2048, 132),), page_tokens=PAGE_TOKENS, hot_tokens=HOT_TOKENS
        )
        slots = self.sessions + 8
        pages = layout.pages_for(TOKENS)
        required = layout.hot_pages + 3
        device = slots * required + int(self.sessions * pages * ON_DEVICE) + 2 * pages
        sizes = PoolSizes(slots, device, host_pages=slots * pages, index_pages=slots * pages, chunk_tokens=8192)
        tuning = ResidencyTuning(
            ReclaimOrder.OLDEST, required, required, REFILLS_A_TICK, backup_pages_per_tick=4, promote_decode_pages=True
        )
        tables = SlotTables.empty(layout, slots, TOKENS)
        self.transfers = NoBytes(self.clock)
        self.hierarchy = Hierarchy(layout, POLICIES[Residency.ADAPTIVE], tables, self.transfers, sizes, tuning)
        self.rng = np.random.default_rng(0)
        self.live: list[Session] = []
        self.waiting = 0
        self.next_prompt = self._draw_prompt()
        while len(self.live) < self.sessions or self.hierarchy.columns.importing.any():
            if len(self.live) < self.sessions and not self.hierarchy.columns.importing.any():
                self._arrive()
            self._write()
            self._pass_time()

    def _arrive(self) -> bool:
        """A request with half of its tokens or more in the prompt; whether there is room for it by now."""
        session = self.hierarchy.admit(self.next_prompt, TOKENS)
        self.hierarchy.contend(session is None)
        if session is not None:
            self.live.append(session)
            self.next_prompt = self._draw_prompt()
        return session is not None

    def _draw_prompt(self) -> int:
        return int(self.rng.integers(TOKENS // 2, TOKENS * 3 // 4))

    def _write(self) -> None:
        """Some tokens of every answer, and whole pages of prompts: a prefill instance's pages need no places for single
        rows."""
        slots = self.hierarchy.columns.active.nonzero()[0].astype(np.int32)
        rooms = self.hierarchy.rooms(slots)
        importing = self.hierarchy.columns.importing[slots]
        decoding = slots[(rooms >= TOKENS_A_TICK) & ~importing]
        prompt_rooms = rooms[importing]
        before = prompt_rooms.cumsum() - prompt_rooms
        chunks = np.minimum(prompt_rooms, np.maximum(0, PROMPT_TOKENS_A_TICK - before))
        writing = np.concatenate([decoding, slots[importing][chunks > 0]])
        counts = np.concatenate([np.full(len(decoding), TOKENS_A_TICK), chunks[chunks > 0]]).astype(np.int32)
        self.hierarchy.place(decoding, counts[: len(decoding)])
        self.hierarchy.take_recycled()
        self.hierarchy.wrote(writing, counts, PassedFence())

    def _pass_time(self) -> None:
        self.clock.tick += 1
        self.hierarchy.poll()

    def tick(self) -> tuple[float, float]:
        """One tick; its seconds on the clock and on the processor. Where other programs share the machine, only the
        second says what the tick costs."""
        self.clock.tick += 1
        leaves = self.clock.tick % TICKS_A_REQUEST == 0
        self.waiting += self.clock.tick % TICKS_A_REQUEST == TICKS_A_REQUEST // 2
        processor, clock = time.thread_time(), time.perf_counter()
        if leaves:
            self.hierarchy.end(self.live.pop(int(self.rng.integers(len(self.live)))))
        self.hierarchy.poll()
        if self.waiting:
            self.waiting -= self._arrive()
        self.hierarchy.tend()
        self._write()
        return time.perf_counter() - clock, time.thread_time() - processor


def measure(sessions: int, ticks: int) -> dict[str, float]:
    """Milliseconds a tick, and what the ticks did."""
    world = World(sessions)
    for _ in range(WARM_TICKS):
        world.tick()
    gc.collect()
    gc.freeze()
    before = world.hierarchy.moved.refilled, world.transfers.pages, world.hierarchy.moved.reclaimed
    clock, processor = np.array([world.tick() for _ in range(ticks)]).T * 1e3
    gc.unfreeze()
    moved = world.hierarchy.moved
    return {
        "sessions": sessions,
        "ticks": ticks,
        "mean_ms": float(clock.mean()),
        "p50_ms": float(np.median(clock)),
        "p99_ms": float(np.percentile(clock, 99)),
        "max_ms": float(clock.max()),
        "cpu_mean_ms": float(processor.mean()),
        "cpu_p99_ms": float(np.percentile(processor, 99)),
        "refilled_pages_a_tick": (moved.refilled - before[0]) / ticks,
        "copied_pages_a_tick": (world.transfers.pages - before[1]) / ticks,
        "reclaimed_pages_a_tick": (moved.reclaimed - before[2]) / ticks,
    }


def main(
    sessions: Annotated[str, typer.Option(help="Numbers of sessions.")] = "64,128,256,512",
    ticks: Annotated[int, typer.Option(help="Ticks that are timed.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Runs of each; the one with the median mean is shown.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Time the control plane's tick."""
    results = []
    for count in map(int, sessions.split(",")):
        runs = sorted((measure(count, ticks) for _ in range(repeats)), key=lambda run: run["mean_ms"])
        results.append(runs[len(runs) // 2])
    times_shown = ("mean", "p50", "p99", "max", "cpu_mean", "cpu_p99")
    pages_shown = ("refilled", "copied", "reclaimed")
    table = Table("sessions", *(f"{name} ms" for name in times_shown), *(f"{name} pages" for name in pages_shown))
    for run in results:
        times = (f"{run[f'{name}_ms']:.3f}" for name in times_shown)
        pages = (f"{run[f'{kind}_pages_a_tick']:.1f}" for kind in pages_shown)
        table.add_row(str(run["sessions"]), *times, *pages)
    results_console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
