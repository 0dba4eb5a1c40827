"""A running server's numbers, as its metrics port gives them, and what two readings say about the time between."""

from __future__ import annotations

import itertools
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from trt_backend.config import ConfigError

ANSWER_SECONDS = 5.0
USES = ("required", "optional", "in_transit", "free")
SOURCES = ("direct", "hot", "host")
MOVES = ("backed_up", "refilled", "reclaimed", "promoted", "recycled")
LATENCIES = ("queue", "ttft", "tpot", "e2e")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples by name, each with its labels, at `seconds` of `time.monotonic()`."""

    seconds: float
    samples: Mapping[str, Sequence[tuple[Labels, float]]]

    def value(self, name: str) -> float:
        """A metric without labels, or the sum over all of them; 0 if there is none."""
        return sum(value for _, value in self.samples.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """The metric by the values of one of its labels."""
        return {labels[label]: value for labels, value in self.samples.get(name, ())}


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the `requests` that ended in some time, in milliseconds; quantiles are taken from a histogram's buckets."""

    requests: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Frame:
    """What there is to see. Pages and sessions are those of now; rows, rates and the step's time are those of the last
    `seconds`, latencies of the last `latency_seconds`; outcomes are counted from the server's start."""

    seconds: float
    pages: dict[str, int]
    reserve_pages: int
    copying_pages: int
    host_pages: dict[str, int]
    sessions: dict[str, int]
    max_sessions: int
    rows: dict[str, int]
    row_shares: dict[str, float] | None
    generated_tokens_per_second: float
    prompt_tokens_per_second: float
    steps_per_second: float
    step_ms: float | None
    pages_per_second: dict[str, float]
    failed_copies: int
    latency_seconds: float
    latencies: dict[str, Latency | None]
    outcomes: dict[str, int]


def fetch(url: str) -> Reading:
    """Ask a metrics port.

    Raises:
        ConfigError: it can't be reached, or it is not one of our servers'.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"metrics_url={url!r}: legal: http://HOST:PORT/metrics")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        # An HTTPError says more than its reason, a bare URLError less.
        reason = error.reason if type(error) is urllib.error.URLError else error
        raise ConfigError(
            f"metrics_url={url}: no answer: {reason}\n"
            "Check that the server runs and that this is its metrics port: `serve` prints the address (settings "
            "server.metrics_address and server.metrics_port)"
        ) from error
    return parse(text, url)


def parse(text: str, url: str) -> Reading:
    """Read Prometheus' text format.

    Raises:
        ConfigError: it is something else, or not from one of our servers.
    """
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"metrics_url={url}: the answer is not in Prometheus' text format: {error}") from error
    if "dhs_pages" not in samples:
        raise ConfigError(
            f"metrics_url={url}: the answer has no dhs_pages\n"
            "Check that this is the metrics port of `trt-backend serve`, and that it has printed `ready`"
        )
    return Reading(time.monotonic(), samples)


def frame_of(readings: Sequence[Reading]) -> Frame:
    """What two readings or more, the latest last, say: latencies since the first, everything else since the last but
    one."""
    first, before, now = readings[0], readings[-2], readings[-1]
    seconds = now.seconds - before.seconds

    def grown(name: str) -> float:
        return _grown(now.value(name), before.value(name))

    earlier_rows = before.by("dhs_resolver_rows_total", "source")
    rows = {
        source: int(_grown(total, earlier_rows.get(source, 0.0)))
        for source, total in now.by("dhs_resolver_rows_total", "source").items()
    }
    found = sum(rows.get(source, 0) for source in SOURCES)
    steps = grown("dhs_steps_total")
    return Frame(
        seconds=seconds,
        pages=_whole(now.by("dhs_pages", "state")),
        reserve_pages=int(now.value("dhs_reserve_pages")),
        copying_pages=int(now.value("dhs_copying_pages")),
        host_pages=_whole(now.by("dhs_host_pages", "state")),
        sessions=_whole(now.by("dhs_sessions", "state")),
        max_sessions=int(now.by("nv_trt_llm_request_metrics", "request_type").get("max", 0)),
        rows=rows,
        row_shares={source: rows.get(source, 0) / found for source in SOURCES} if found else None,
        generated_tokens_per_second=grown("dhs_generated_tokens_total") / seconds,
        prompt_tokens_per_second=grown("dhs_prompt_tokens_total") / seconds,
        steps_per_second=steps / seconds,
        step_ms=1e3 * grown("dhs_step_seconds_total") / steps if steps else None,
        pages_per_second={kind: grown(f"dhs_{kind}_pages_total") / seconds for kind in MOVES},
        failed_copies=int(now.value("dhs_failed_copies_total")),
        latency_seconds=now.seconds - first.seconds,
        latencies={kind: latency(first, now, f"dhs_{kind}_seconds") for kind in LATENCIES},
        outcomes=_whole(now.by("dhs_requests_total", "outcome")),
    )


def latency(before: Reading, now: Reading, histogram: str) -> Latency | None:
    """What a histogram has counted between two readings; None if nothing."""
    earlier = before.by(f"{histogram}_bucket", "le")
    buckets = sorted(
        (float(bound), _grown(count, earlier.get(bound, 0.0)))
        for bound, count in now.by(f"{histogram}_bucket", "le").items()
    )
    count = buckets[-1][1] if buckets else 0.0
    if not count:
        return None
    total = _grown(now.value(f"{histogram}_sum"), before.value(f"{histogram}_sum"))
    return Latency(int(count), 1e3 * total / count, 1e3 * quantile(buckets, 0.5), 1e3 * quantile(buckets, 0.99))


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """As Prometheus' `histogram_quantile`: linear within a bucket, of the last one its lower end.

    `buckets` are upper bounds, ascending to infinity, and how many observations were at most that.
    """
    rank = share * buckets[-1][1]
    for (low, below), (high, upto) in itertools.pairwise([(0.0, 0.0), *buckets]):
        if upto >= rank and upto > below:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
    return buckets[-2][0]


def _grown(now: float, before: float) -> float:
    """How far a counter has come; one that has fallen began anew when the server was restarted."""
    return now - before if now >= before else now


def _whole(values: Mapping[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}
