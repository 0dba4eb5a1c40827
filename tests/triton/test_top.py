"""`trt-backend top`: reading a metrics port, and what is made of it."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadtest.server import LOOPBACK, ServeCommand, free_ports
from tests.triton.clients import Stream, make_inputs, wait_until
from trt_backend.cli.app import app
from trt_backend.cli.readings import Frame, Latency, Reading, fetch, frame_of, latency, parse, quantile
from trt_backend.cli.top import USE_STYLES, bar, render
from trt_backend.config import ConfigError

MODEL = "glm53-tiny"
URL = "http://127.0.0.1:8002/metrics"
runner = CliRunner()


def url_of(server: ServeCommand) -> str:
    return f"http://{LOOPBACK}:{server.metrics_port}/metrics"


def reading(seconds: float, text: str) -> Reading:
    """What a server would have said at some time."""
    return Reading(seconds, parse(f'dhs_pages{{state="free"}} 1\n{text}', URL).samples)


def test_one_snapshot_of_a_real_server_adds_up(server: ServeCommand) -> None:
    shown = runner.invoke(app, ["top", "--metrics-url", url_of(server), "--json", "--interval", "0.1"])
    assert shown.exit_code == 0, shown.output
    frame = json.loads(shown.stdout)
    metrics = server.metrics()
    assert set(frame["pages"]) == {"required", "optional", "in_transit", "free"}
    capacity = next(value for name, value in metrics.items() if name.startswith('dhs_pages{state="free"'))
    assert sum(frame["pages"].values()) == capacity, "nobody is served now: all pages are free"
    assert sum(frame["host_pages"].values()) == sum(
        value for name, value in metrics.items() if name.startswith("dhs_host_pages")
    )
    assert frame["sessions"] == {"waiting": 0, "importing": 0, "decoding": 0}
    assert frame["max_sessions"] == 4
    assert frame["reserve_pages"] == metrics["dhs_reserve_pages"]
    assert frame["seconds"] >= 0.1


def test_one_frame_of_a_real_server_is_readable(server: ServeCommand) -> None:
    shown = runner.invoke(app, ["top", "--metrics-url", url_of(server), "--once", "--interval", "0.1"])
    assert shown.exit_code == 0, shown.output
    for word in ("device pages", "required 0", "host pages", "selected rows", "tokens/s", "TTFT", "reserve"):
        assert word in shown.stdout, word


def test_what_a_request_did_is_in_the_readings_around_it(server: ServeCommand) -> None:
    before = fetch(url_of(server))
    answer = Stream(server.grpc_port, MODEL, make_inputs(b"import os\n" * 40, max_tokens=24, stream=True)).rest()
    assert answer.error is None
    wait_until(lambda: frame_of([before, fetch(url_of(server))]).latencies["ttft"] is not None)
    frame = frame_of([before, fetch(url_of(server))])
    assert frame.generated_tokens_per_second * frame.seconds == pytest.approx(24)
    assert frame.prompt_tokens_per_second * frame.seconds >= 40
    assert frame.row_shares is not None
    assert sum(frame.row_shares.values()) == pytest.approx(1.0)
    assert frame.rows["masked"] == 0
    for kind in ("queue", "ttft", "tpot", "e2e"):
        found = frame.latencies[kind]
        assert found is not None
        assert found.requests == 1
        assert found.mean_ms > 0
    assert frame.outcomes["length"] >= 1


def test_a_port_that_nobody_listens_on_is_named_with_what_to_check() -> None:
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}/metrics"
    shown = runner.invoke(app, ["top", "--metrics-url", url, "--once"])
    assert shown.exit_code == 1
    assert url in shown.output
    assert "Connection refused" in shown.output
    assert "server.metrics_port" in shown.output
    assert "Traceback" not in shown.output


def test_the_wrong_port_of_a_server_is_told_from_the_right_one(server: ServeCommand) -> None:
    with pytest.raises(ConfigError, match=r"no answer: HTTP Error 404"):
        fetch(f"http://{LOOPBACK}:{server.http_port}/metrics")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<html>\n", "not in Prometheus' text format"),
        ("nv_gpu_utilization 0.5\n", "no dhs_pages"),
    ],
)
def test_answers_of_something_else_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse(text, URL)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ConfigError, match="legal: http://HOST:PORT/metrics"):
        fetch("file:///etc/passwd")


def test_rates_are_of_the_last_interval_and_latencies_of_the_whole_time() -> None:
    buckets = (
        'dhs_ttft_seconds_bucket{{le="0.1"}} {0}\ndhs_ttft_seconds_bucket{{le="+Inf"}} {0}\ndhs_ttft_seconds_sum {1}\n'
    )
    readings = [
        reading(0.0, "dhs_steps_total 5\ndhs_step_seconds_total 1\n" + buckets.format(1, 0.05)),
        reading(10.0, "dhs_steps_total 15\ndhs_step_seconds_total 2\n" + buckets.format(3, 0.15)),
        reading(12.0, "dhs_steps_total 35\ndhs_step_seconds_total 3\n" + buckets.format(3, 0.15)),
    ]
    frame = frame_of(readings)
    assert frame.seconds == 2.0
    assert frame.steps_per_second == 10.0
    assert frame.step_ms == pytest.approx(50.0)
    assert frame.latency_seconds == 12.0
    assert frame.latencies["ttft"] == Latency(2, pytest.approx(50.0), pytest.approx(50.0), pytest.approx(99.0))
    assert frame.latencies["tpot"] is None
    assert frame.row_shares is None


def test_a_restarted_server_counts_from_nothing_again() -> None:
    frame = frame_of([reading(0.0, "dhs_steps_total 500\n"), reading(2.0, "dhs_steps_total 20\n")])
    assert frame.steps_per_second == 10.0


def test_quantiles_are_linear_within_a_bucket_as_prometheus_has_them() -> None:
    buckets = [(0.1, 0.0), (0.2, 8.0), (0.5, 10.0), (math.inf, 10.0)]
    assert quantile(buckets, 0.5) == pytest.approx(0.1 + 0.1 * 5 / 8)
    assert quantile(buckets, 0.9) == pytest.approx(0.35)
    assert quantile([(0.1, 1.0), (math.inf, 4.0)], 0.99) == 0.1, "of the last bucket only the lower end is known"


def test_a_histogram_that_has_counted_nothing_gives_nothing() -> None:
    same = reading(0.0, 'dhs_e2e_seconds_bucket{le="+Inf"} 3\ndhs_e2e_seconds_sum 1\n')
    assert latency(same, same, "dhs_e2e_seconds") is None


def test_a_bar_is_as_wide_as_it_should_be_and_shows_what_is_there_at_all() -> None:
    strip = bar({"required": 1, "optional": 500, "in_transit": 0, "free": 499}, USE_STYLES, mark=900, width=20)
    assert strip.plain == "█▓▓▓▓▓▓▓▓▓······" + "··┃·"
    assert bar(dict.fromkeys(USE_STYLES, 0), USE_STYLES, width=5).plain == " " * 5


def test_a_frame_shows_each_number_where_it_belongs() -> None:
    frame = Frame(
        seconds=1.0,
        pages={"required": 45, "optional": 132, "in_transit": 4, "free": 19},
        reserve_pages=6,
        copying_pages=9,
        host_pages={"used": 900, "free": 1100},
        sessions={"waiting": 2, "importing": 1, "decoding": 3},
        max_sessions=32,
        rows={"direct": 600, "hot": 300, "host": 100, "padding": 7, "masked": 1},
        row_shares={"direct": 0.6, "hot": 0.3, "host": 0.1},
        generated_tokens_per_second=123.4,
        prompt_tokens_per_second=512.0,
        steps_per_second=41.1,
        step_ms=24.3,
        pages_per_second={"backed_up": 1.0, "refilled": 2.0, "reclaimed": 3.0, "promoted": 4.0, "recycled": 5.0},
        failed_copies=2,
        latency_seconds=60.0,
        latencies={"queue": None, "ttft": Latency(5, 101.0, 90.0, 250.0), "tpot": None, "e2e": None},
        outcomes={"length": 7, "cancelled": 1},
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(frame, URL))
    lines = console.export_text().splitlines()
    expected = [
        "█ required 45   ▓ optional 132   ▒ in transit 4   · free 19   ┃ reserve 6",
        "█ used 900   · free 1100",
        "█ direct 60.0%   ▓ hot 30.0%   ▒ host 10.0%",
        "1 masked: the server has a fault",
        "123.4 tokens/s   512.0 prompt tokens/s   41.1 steps/s, 24.3 ms each",
        "backed up 1.0   refilled 2.0   reclaimed 3.0   promoted 4.0   recycled 5.0",
        "9 pages under way   2 failed",
        "waiting 2   importing 1   decoding 3   (at most 32 sessions)",
        "cancelled 1   length 7",
    ]
    for text in expected:
        assert any(text in line for line in lines), text
    assert [line.split()[1:6] for line in lines if "TTFT" in line] == [["TTFT", "5", "101.0", "90.0", "250.0"]]
