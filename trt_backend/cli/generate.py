"""`trt-backend generate`: one request, in this process."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from trt_backend.cli.signals import on_signals
from trt_backend.config import DeploymentConfig
from trt_backend.request import RequestError
from trt_backend.triton.inputs import Fields
from trt_backend.triton.outputs import Array, Ended
from trt_backend.triton.service import Service

ROW_SOURCES = ("direct", "hot", "host")


class TextSink:
    """Implements `stream.Sink` over standard output, or keeps the text for later."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self.text = ""
        self.error: RequestError | None = None

    def send(self, tensors: Mapping[str, Array], final: bool) -> None:
        """Take a piece of text."""
        text = tensors["text_output"][0].decode()
        self.text += text
        if self._show:
            sys.stdout.write(text + ("\n" if final else ""))
            sys.stdout.flush()

    def fail(self, error: RequestError) -> None:
        """Take the error that ended the request."""
        self.error = error

    def is_cancelled(self) -> bool:
        """Never: Ctrl-C cancels through the service."""
        return False


def run_generate(config: DeploymentConfig, fields: Fields, as_json: bool, errors: Console) -> int:
    """Print the answer, then what it took; returns the exit code: 1 if the request failed.

    Raises:
        ConfigError: the deployment can't be used.
    """
    over = threading.Event()
    endings: list[Ended] = []

    def on_end(ended: Ended) -> None:
        endings.append(ended)
        over.set()

    with errors.status("loading") as status:
        service = Service(config, progress=status.update, on_end=on_end)
    service.start()
    sink = TextSink(show=not as_json)
    try:
        on_signals((signal.SIGINT,), service.cancel_all)
        service.submit("generate", lambda _: fields, sink)
        over.wait()
    finally:
        service.stop(drain_seconds=0.0)
    ended = endings[0]
    if as_json:
        print(json.dumps({"text": sink.text, **measures(ended)}, indent=2))
    elif sink.error is None:
        errors.print(describe(measures(ended)), style="dim", soft_wrap=True)
    if sink.error is not None:
        errors.print(f"error: {sink.error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def measures(ended: Ended) -> dict[str, Any]:
    """What a request took. Times in milliseconds; a time is None where there were too few tokens to have one."""
    times = ended.times
    started = times.first_token_ns > 0
    decode_ms = (times.last_token_ns - times.first_token_ns) / 1e6
    return {
        "finish": ended.finish.value,
        "error": str(ended.error) if ended.error else None,
        "tokens": ended.generated,
        "ttft_ms": (times.first_token_ns - times.arrival_ns) / 1e6 if started else None,
        "tpot_ms": decode_ms / (ended.generated - 1) if ended.generated > 1 else None,
        "tokens_per_second": ended.generated / ((times.last_token_ns - times.arrival_ns) / 1e9) if started else None,
        "rows": {source: getattr(ended.rows, source) for source in (*ROW_SOURCES, "padding", "masked")},
    }


def describe(measured: dict[str, Any]) -> str:
    """The measures in one line."""

    def number(key: str, unit: str) -> str:
        return "-" if measured[key] is None else f"{measured[key]:.1f}{unit}"

    rows = measured["rows"]
    found = sum(rows[source] for source in ROW_SOURCES)
    shares = ", ".join(f"{source} {rows[source] / found:.1%}" for source in ROW_SOURCES) if found else "none selected"
    return (
        f"{measured['tokens']} tokens ({measured['finish']}), TTFT {number('ttft_ms', ' ms')}, "
        f"TPOT {number('tpot_ms', ' ms')}, {number('tokens_per_second', ' tokens/s')}; rows: {shares}"
    )
