"""Responses a second through a real tritonserver: an empty decoupled model, and our whole path over an engine that
costs nothing, in turn on one server, with one client.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import streaming
from loadtest.console import results_console
from loadtest.streaming.client import responses_per_second
from trt_backend.config import LOOPBACK, DeploymentConfig, ServerConfig
from trt_backend.triton.launcher import TritonServer
from trt_backend.triton.locate import find_server
from trt_backend.triton.ports import on_free_ports
from trt_backend.triton.repository import default_template, make_run_folder

WHOLE_PATH, EMPTY = "whole_path", "empty"
TARGET = 0.8
WARM_SECONDS = 0.5
TOKENS = 512
"""Responses of a request, if each token has one of its own."""
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over repeats at one number of streams, in responses a second; the ratio is taken within a repeat."""

    streams: int
    empty: float
    whole_path: float
    ratio: float

    @property
    def met(self) -> bool:
        """Whether the target is."""
        return self.ratio >= TARGET


@contextmanager
def serve_both(max_sessions: int) -> Iterator[str]:
    """One tritonserver with both models, of one signature; gives its gRPC address."""
    config = DeploymentConfig(model="glm53-tiny", max_sessions=max_sessions, max_model_len=2 * TOKENS)
    with tempfile.TemporaryDirectory(prefix="bench-streaming-") as root:
        folder = make_run_folder(Path(root) / "run", WHOLE_PATH, config)
        shutil.copytree(default_template(), folder.models / EMPTY, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (WHOLE_PATH, EMPTY):
            code = Path(next(iter(streaming.__path__))) / f"{name}_model.py"
            shutil.copyfile(code, folder.models / name / "1" / "model.py")
        options = on_free_ports(ServerConfig(drain_seconds=2.0))
        server = TritonServer(find_server(None), folder, WHOLE_PATH, options)
        try:
            server.start()
            server.wait_ready(lambda _: None, threading.Event())
            yield f"{LOOPBACK}:{options.grpc_port}"
        finally:
            server.stop(console.print)


def measure(url: str, streams: int, seconds: float, repeats: int, progress: Progress) -> Result:
    """Both models in turn, `repeats` times; who begins changes every time."""
    rates: dict[str, list[float]] = {EMPTY: [], WHOLE_PATH: []}
    for repeat in progress.track(range(repeats), description=f"{streams} streams"):
        order = (EMPTY, WHOLE_PATH) if repeat % 2 == 0 else (WHOLE_PATH, EMPTY)
        for model in order:
            rates[model].append(responses_per_second(url, model, streams, TOKENS, WARM_SECONDS, seconds))
    return Result(
        streams=streams,
        empty=statistics.median(rates[EMPTY]),
        whole_path=statistics.median(rates[WHOLE_PATH]),
        ratio=statistics.median(ours / empty for ours, empty in zip(rates[WHOLE_PATH], rates[EMPTY], strict=True)),
    )


def main(
    streams: Annotated[str, typer.Option(help="Numbers of concurrent gRPC streams.")] = "1,16,64",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each model is measured in a repeat.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure how much of an empty model's response rate is left behind our scheduler and streamer."""
    numbers = [int(number) for number in streams.split(",")]
    with serve_both(max(numbers)) as url, Progress(console=console) as progress:
        results = [measure(url, number, seconds, repeats, progress) for number in numbers]
    if as_json:
        print(json.dumps([asdict(result) | {"met": result.met} for result in results], indent=2))
        return
    table = Table(title="responses a second")
    for column in ("streams", "empty model", "whole path", "ratio", f"at least {TARGET:g}"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r.streams), f"{r.empty:.0f}", f"{r.whole_path:.0f}", f"{r.ratio:.2f}", "yes" if r.met else "no"
        )
    results_console().print(table)


if __name__ == "__main__":
    typer.run(main)
