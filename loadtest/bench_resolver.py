"""How fast one core resolves, chooses and copies rows with the kernels' host twin; run with `make bench`.

Every case is timed `--repeats` times, and once or a few times with the NumPy oracle on the same input. The figure is
the median. What a case does is checked before it is timed: the counters must show the mix that its name promises.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from loadtest.console import results_console
from plugins import host, oracle
from plugins.host import HotState, Int32, Plan, ResolverTables, UInt8

K = 2048
B = 4096
PAGE_ROWS = 64
ROW_BYTES = 656
"""A row of GLM-5.3 in fp8: 512 B latent, 16 B scales, 128 B rotary part."""
HISTORY = 32_768
SESSIONS = 4
TOPK_LINES, TOPK_VISIBLE, TOPK_K = 512, 6000, 64

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Result:
    """One case. Rates are millions of `unit` a second on one core."""

    case: str
    unit: str
    twin: float
    oracle: float
    target: float | None

    @property
    def ratio(self) -> float:
        return self.twin / self.oracle

    @property
    def met(self) -> bool:
        return self.target is None or self.twin >= self.target


@dataclass(frozen=True, slots=True)
class Bench:
    """A batch of sessions with `HISTORY` positions each, and what a step of it needs."""

    tables: ResolverTables
    hot: HotState
    plan: Plan
    slots: Int32
    pool: UInt8
    arena: UInt8

    @classmethod
    def build(cls) -> Bench:
        """Every page has a device page and a host page; a case decides which pages are READY."""
        pages, hot_pages = HISTORY // PAGE_ROWS, B // PAGE_ROWS
        device = np.arange(SESSIONS * (pages + hot_pages), dtype=np.int32).reshape(SESSIONS, -1)
        tables = ResolverTables(
            ready_map=np.full((SESSIONS, pages), -1, dtype=np.int32),
            host_map=np.arange(SESSIONS * pages, dtype=np.int32).reshape(SESSIONS, pages),
            tail_first=np.full(SESSIONS, -1, dtype=np.int32),
            tail_pages=np.full((SESSIONS, 3), -1, dtype=np.int32),
            hot_pages=np.ascontiguousarray(device[:, pages:]),
            page_rows=PAGE_ROWS,
        )
        return cls(
            tables=tables,
            hot=HotState.empty(1, SESSIONS, B),
            plan=Plan.empty(SESSIONS, K),
            slots=np.arange(SESSIONS, dtype=np.int32),
            pool=np.ones((SESSIONS * HISTORY, ROW_BYTES), dtype=np.uint8),
            arena=np.zeros((device.size * PAGE_ROWS, ROW_BYTES), dtype=np.uint8),
        )

    def make_ready(self, share: float) -> None:
        """The first `share` of every history is READY on the device, the rest on the host only."""
        pages = self.tables.ready_map.shape[1]
        ready = round(share * pages)
        stride = pages + B // PAGE_ROWS
        self.tables.ready_map[:] = -1
        self.tables.ready_map[:, :ready] = np.arange(SESSIONS)[:, None] * stride + np.arange(ready)

    def select(self, rng: np.random.Generator, ready: float, missing: Int32) -> Int32:
        """[sessions, K] ascending positions: `missing` (the same of every session), the rest from the READY part."""
        limit = int(ready * HISTORY)
        selected = np.empty((SESSIONS, K), dtype=np.int32)
        for n in range(SESSIONS):
            direct = rng.choice(limit, K - len(missing), replace=False)
            selected[n] = np.sort(np.concatenate([direct, missing]))
        return selected


Steps = Callable[[int], object]
"""Runs step i of a case."""


def rate(step: Steps, units: int, repeats: int) -> float:
    """Millions of units a second: `units` by the median time of `repeats` steps, after one to warm up."""
    step(0)
    seconds = []
    for i in range(1, repeats + 1):
        start = time.perf_counter()
        step(i)
        seconds.append(time.perf_counter() - start)
    return units / statistics.median(seconds) / 1e6


def resolve_case(case: str, target: float | None, *, hot: float, host_share: float, repeats: int) -> Result:
    """Resolve (and fetch, if anything is missing) with shares `hot` and `host_share` of K found there."""
    rng = np.random.default_rng(0)
    bench = Bench.build()
    ready = 0.5 if hot else 1.0
    bench.make_ready(ready)
    n_hot, n_host = round(hot * K), round(host_share * K)
    on_host = rng.permutation(np.arange(int(ready * HISTORY), HISTORY, dtype=np.int32))
    kept, others = on_host[:n_hot], on_host[n_hot:]
    # Fresh positions each step; when they come round again, more than B others have been through the hot cache.
    rounds = len(others) // n_host if n_host else 1
    assert rounds == 1 or (rounds - 1) * n_host > B
    selections = [
        bench.select(rng, ready, np.concatenate([kept, others[i * n_host : (i + 1) * n_host]])) for i in range(rounds)
    ]

    def stepper(module: ModuleType, state: HotState, plan: Plan) -> Steps:
        def step(i: int) -> None:
            module.resolve(bench.tables, state, 0, selections[i % rounds], bench.slots, plan)
            if n_host:
                module.fetch_rows(bench.pool, bench.arena, plan)

        return step

    twin = stepper(host, bench.hot, bench.plan)
    slow_plan = Plan.empty(SESSIONS, K)
    slow = stepper(oracle, HotState.empty(1, SESSIONS, B), slow_plan)
    twin_rate = rate(twin, SESSIONS * K, repeats)
    for done, want in zip(bench.plan.totals(), (K - n_hot - n_host, n_hot, n_host, 0, 0), strict=True):
        assert done == SESSIONS * want, f"{case}: {bench.plan.totals()}"
    return Result(case, "selected rows", twin_rate, rate(slow, SESSIONS * K, 3), target)


def topk_case(repeats: int) -> Result:
    """Choose 64 of 6000 scores for a chunk of 512 tokens."""
    scores = np.random.default_rng(0).standard_normal((TOPK_LINES, TOPK_VISIBLE)).astype(np.float32)
    visible = np.full(TOPK_LINES, TOPK_VISIBLE, dtype=np.int32)
    out = np.empty((TOPK_LINES, TOPK_K), dtype=np.int32)
    twin_rate = rate(lambda _: host.topk(scores, visible, TOPK_K, out), scores.size, max(3, repeats // 10))
    slow_lines = 16
    few, few_visible = scores[:slow_lines], visible[:slow_lines]
    slow_rate = rate(lambda _: oracle.topk(few, few_visible, TOPK_K), few.size, 3)
    assert (oracle.topk(few, few_visible, TOPK_K) == out[:slow_lines]).all()
    return Result(f"top-{TOPK_K} of {TOPK_VISIBLE}", "scores", twin_rate, slow_rate, None)


@app.command()
def main(
    repeats: Annotated[int, typer.Option(min=3, help="Timed steps of each case; the median counts.")] = 201,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the resolver, its fetch and top-k on one core, beside the NumPy oracle."""
    results = [
        resolve_case("all direct", 30.0, hot=0.0, host_share=0.0, repeats=repeats),
        resolve_case("30% hot", 10.0, hot=0.3, host_share=0.0, repeats=repeats),
        resolve_case("30% hot, 5% host and fetched", None, hot=0.3, host_share=0.05, repeats=repeats),
        topk_case(repeats),
    ]
    if as_json:
        shape = {"k": K, "hot_rows": B, "history": HISTORY, "sessions": SESSIONS, "row_bytes": ROW_BYTES}
        cases = [asdict(result) | {"ratio": result.ratio, "met": result.met} for result in results]
        print(json.dumps({"shape": shape, "repeats": repeats, "cases": cases}, indent=2))
        return
    table = Table(title=f"One core: K = {K}, B = {B}, {SESSIONS} sessions of {HISTORY} positions")
    for column in ("case", "twin, M/s", "oracle, M/s", "ratio", "target, M/s"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for result in results:
        target = "" if result.target is None else f"≥ {result.target:g} {'met' if result.met else 'MISSED'}"
        table.add_row(
            f"{result.case} ({result.unit})",
            f"{result.twin:.1f}",
            f"{result.oracle:.3f}",
            f"{result.ratio:.0f}×",
            target,
        )
    results_console().print(table)


if __name__ == "__main__":
    app()
