"""The service's numbers on Triton's own metrics port. Importable only inside tritonserver's Python backend."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from trt_backend.scheduler import Snapshot


class TritonMetrics:
    """Implements `service.Gauges`. One thread calls it: each change is a round trip to the server process."""

    def __init__(self) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily
        self._families = {
            "rows": family("dhs_resolver_rows_total", "Selected KV rows by where they were found", counter),
            "tokens": family("dhs_generated_tokens_total", "Tokens generated", counter),
            "prompt_tokens": family("dhs_prompt_tokens_total", "Prompt tokens computed", counter),
            "steps": family("dhs_steps_total", "Engine steps", counter),
            "backed_up": family("dhs_backed_up_pages_total", "Pages copied to the host", counter),
            "requests": family("dhs_requests_total", "Requests that have ended, by outcome", counter),
            "pages": family("dhs_pages", "Device pages by use", gauge),
            "host_pages": family("dhs_host_pages", "Host pages by state", gauge),
            "sessions": family("dhs_sessions", "Requests by state", gauge),
        }
        self._metrics: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], float] = {}

    def publish(self, snapshot: Snapshot, outcomes: dict[str, int]) -> None:
        """Show a snapshot; what has not changed costs nothing."""
        rows = snapshot.rows
        for source in ("direct", "hot", "host", "padding", "masked"):
            self._count("rows", "source", source, getattr(rows, source))
        for outcome, requests in outcomes.items():
            self._count("requests", "outcome", outcome, requests)
        self._count("tokens", "", "", snapshot.generated_tokens)
        self._count("prompt_tokens", "", "", snapshot.prompt_tokens)
        self._count("steps", "", "", snapshot.steps)
        self._count("backed_up", "", "", snapshot.backed_up_pages)
        for use, pages in snapshot.pages.items():
            self._set("pages", "state", use, pages)
        self._set("host_pages", "state", "used", snapshot.host_pages_used)
        self._set("host_pages", "state", "free", snapshot.host_pages - snapshot.host_pages_used)
        for state in ("waiting", "importing", "decoding"):
            self._set("sessions", "state", state, getattr(snapshot, state))

    def _count(self, family: str, label: str, value: str, total: float) -> None:
        metric = self._metric(family, label, value)
        before = self._shown.get((family, value), 0)
        if total > before:
            metric.increment(total - before)
            self._shown[family, value] = total

    def _set(self, family: str, label: str, value: str, now: float) -> None:
        metric = self._metric(family, label, value)
        if self._shown.get((family, value)) != now:
            metric.set(now)
            self._shown[family, value] = now

    def _metric(self, family: str, label: str, value: str) -> Any:
        key = (family, value)
        if key not in self._metrics:
            self._metrics[key] = self._families[family].Metric(labels={label: value} if label else {})
        return self._metrics[key]
