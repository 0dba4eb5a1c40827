"""The service's numbers on Triton's own metrics port. Importable only inside tritonserver's Python backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from trt_backend.scheduler import Snapshot
from trt_backend.triton.outputs import Ended

LATENCY_BUCKETS = [0.001 * step * 10**power for power in range(5) for step in (1, 2, 5)]
"""Seconds: 1 ms to 50 s, three a decade."""
TOKEN_BUCKETS = [0.001 * step * 10**power for power in range(3) for step in (1, 1.5, 2, 3, 5, 7)]
"""Seconds between tokens: 1 ms to 700 ms, finer, for this is what objectives are about."""

COUNTERS = {
    "dhs_requests_total": "Requests that have ended, by outcome",
    "dhs_generated_tokens_total": "Tokens generated",
    "dhs_prompt_tokens_total": "Prompt tokens computed",
    "dhs_resolver_rows_total": "Selected KV rows by where they were found",
    "dhs_steps_total": "Engine steps",
    "dhs_step_seconds_total": "Seconds spent in steps",
    "dhs_admissions_total": "Requests that were given a session",
    "dhs_overtakes_total": "Admissions before a request that had come earlier",
    "dhs_backed_up_pages_total": "Pages copied to the host",
    "dhs_refilled_pages_total": "Pages brought back to the device",
    "dhs_reclaimed_pages_total": "Optional pages taken from sessions for an admission",
    "dhs_reclaims_total": "Sessions that lost their optional pages to an admission",
    "dhs_promoted_pages_total": "Pages filled by decoding that stayed on the device",
    "dhs_recycled_pages_total": "Pages filled by decoding that left it",
    "dhs_failed_copies_total": "Copies between the tiers that failed",
}
GAUGES = {
    "dhs_pages": "Device pages by use",
    "dhs_reserve_pages": "Free pages that only admissions may use",
    "dhs_copying_pages": "Pages of copies under way",
    "dhs_host_pages": "Host pages by state",
    "dhs_sessions": "Requests by state",
    # Names that operators of TensorRT-LLM have on their dashboards, where they mean the same here.
    "nv_trt_llm_request_metrics": "Requests by state",
    "nv_trt_llm_kv_cache_block_metrics": "Device pages",
    "nv_trt_llm_general_metrics": "Steps",
}
HISTOGRAMS = {
    "dhs_queue_seconds": ("From arrival to admission", LATENCY_BUCKETS),
    "dhs_ttft_seconds": ("From arrival to the first token", LATENCY_BUCKETS),
    "dhs_tpot_seconds": ("Mean time between the tokens of a request after its first", TOKEN_BUCKETS),
    "dhs_e2e_seconds": ("From arrival to the last token", LATENCY_BUCKETS),
}

Labels = Mapping[str, str]


class TritonMetrics:
    """Implements `service.Metrics`. One thread calls it: each change is a round trip to the server process."""

    def __init__(self, model: str, version: str) -> None:
        family = pb_utils.MetricFamily
        self._families = (
            {name: family(name, text, family.COUNTER) for name, text in COUNTERS.items()}
            | {name: family(name, text, family.GAUGE) for name, text in GAUGES.items()}
            | {name: family(name, text, family.HISTOGRAM) for name, (text, _) in HISTOGRAMS.items()}
        )
        self._served: Labels = {"model": model, "version": version}
        self._metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._shown: dict[Any, float] = {}
        self._outcomes: dict[str, int] = {}

    def publish(self, snapshot: Snapshot, ended: Sequence[Ended]) -> None:
        """Show a snapshot and count what has ended; what has not changed costs nothing."""
        for one in ended:
            self._observe(one)
        self._publish_totals(snapshot)
        self._publish_state(snapshot)
        self._publish_familiar(snapshot)

    def _observe(self, ended: Ended) -> None:
        outcome = ended.error.code.value.lower() if ended.error else ended.finish.value
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._count("dhs_requests_total", self._outcomes[outcome], outcome=outcome)
        times = ended.times
        if times.admitted_ns:
            self._time("dhs_queue_seconds", times.admitted_ns - times.arrival_ns)
        if times.first_token_ns:
            self._time("dhs_ttft_seconds", times.first_token_ns - times.arrival_ns)
            self._time("dhs_e2e_seconds", times.last_token_ns - times.arrival_ns)
        if ended.generated > 1:
            self._time("dhs_tpot_seconds", (times.last_token_ns - times.first_token_ns) / (ended.generated - 1))

    def _publish_totals(self, snapshot: Snapshot) -> None:
        totals = snapshot.totals
        for source in ("direct", "hot", "host", "padding", "masked"):
            self._count("dhs_resolver_rows_total", getattr(totals.rows, source), source=source)
        self._count("dhs_generated_tokens_total", totals.generated_tokens)
        self._count("dhs_prompt_tokens_total", totals.prompt_tokens)
        self._count("dhs_steps_total", totals.steps)
        self._count("dhs_step_seconds_total", totals.step_seconds)
        self._count("dhs_admissions_total", totals.admitted)
        self._count("dhs_overtakes_total", totals.overtakes)
        moved = snapshot.moved
        self._count("dhs_backed_up_pages_total", moved.backed_up)
        self._count("dhs_refilled_pages_total", moved.refilled)
        self._count("dhs_reclaimed_pages_total", moved.reclaimed)
        self._count("dhs_reclaims_total", moved.reclaims)
        self._count("dhs_promoted_pages_total", moved.promoted)
        self._count("dhs_recycled_pages_total", moved.recycled)
        self._count("dhs_failed_copies_total", moved.failures)

    def _publish_state(self, snapshot: Snapshot) -> None:
        for use, pages in snapshot.pages.items():
            self._set("dhs_pages", pages, state=use)
        self._set("dhs_reserve_pages", snapshot.reserve)
        self._set("dhs_copying_pages", snapshot.copying)
        self._set("dhs_host_pages", snapshot.host_pages_used, state="used")
        self._set("dhs_host_pages", snapshot.host_pages - snapshot.host_pages_used, state="free")
        for state in ("waiting", "importing", "decoding"):
            self._set("dhs_sessions", getattr(snapshot, state), state=state)

    def _publish_familiar(self, snapshot: Snapshot) -> None:
        running = snapshot.importing + snapshot.decoding
        requests = {
            "waiting": snapshot.waiting,
            "context": snapshot.importing,
            "scheduled": running,
            "active": running + snapshot.waiting,
            "max": snapshot.slots,
        }
        for kind, count in requests.items():
            self._set("nv_trt_llm_request_metrics", count, request_type=kind, **self._served)
        pages = sum(snapshot.pages.values())
        free = snapshot.pages["free"]
        blocks: dict[str, float] = {
            "max": pages,
            "free": free,
            "used": pages - free,
            "fraction": (pages - free) / pages,
            "tokens_per": snapshot.page_tokens,
        }
        for kind, blocks_now in blocks.items():
            self._set("nv_trt_llm_kv_cache_block_metrics", blocks_now, kv_cache_block_type=kind, **self._served)
        self._set("nv_trt_llm_general_metrics", snapshot.totals.steps, general_type="iteration_counter", **self._served)

    def _count(self, name: str, total: float, **labels: str) -> None:
        key = (name, tuple(labels.values()))
        before = self._shown.get(key, 0)
        metric = self._metric(name, labels)
        if total > before:
            metric.increment(total - before)
            self._shown[key] = total

    def _set(self, name: str, now: float, **labels: str) -> None:
        key = (name, tuple(labels.values()))
        if self._shown.get(key) != now:
            self._metric(name, labels).set(now)
            self._shown[key] = now

    def _time(self, name: str, ns: float) -> None:
        self._metric(name, {}).observe(ns / 1e9)

    def _metric(self, name: str, labels: Labels) -> Any:
        key = (name, tuple(labels.values()))
        if key not in self._metrics:
            buckets = {"buckets": HISTOGRAMS[name][1]} if name in HISTOGRAMS else {}
            self._metrics[key] = self._families[name].Metric(labels=dict(labels), **buckets)
        return self._metrics[key]
