"""The commands of `trt-backend` and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trt_backend.cli.options import errors, readable_errors, takes_settings
from trt_backend.config import LOOPBACK, RowFormat, ServerConfig
from trt_backend.settings import Settings

app = typer.Typer(
    help="Adaptive DHiSparse on Triton: sparse-attention models whose KV rows live in two tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)

DEFAULT_METRICS_URL = f"http://{LOOPBACK}:{ServerConfig().metrics_port}/metrics"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
@takes_settings(server=True)
def serve(settings: Settings) -> None:
    """Serve a model through a Triton Inference Server, on this machine's loopback unless told otherwise."""
    from trt_backend.cli.serve import run_server

    raise typer.Exit(run_server(settings, console, errors))


@app.command()
@takes_settings(server=True)
def config(settings: Settings, as_json: AsJson = False) -> None:
    """Show what `serve` would run with the same options, environment and file, and where each value comes from."""
    from trt_backend.build import Deployment
    from trt_backend.cli.config import print_settings

    Deployment.of(settings.deployment)  # most settings that do not fit the model show here
    print_settings(settings, as_json, console)


@app.command()
@takes_settings(preset={"max_sessions": 1})
def generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate text in this process: the server's own parts, without Triton."""
    from trt_backend.cli.generate import run_generate
    from trt_backend.triton.inputs import Fields

    code = run_generate(
        config=settings.deployment,
        fields=Fields(
            text=sys.stdin.read() if prompt == "-" else prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stream=stream,
        ),
        as_json=as_json,
        errors=errors,
    )
    raise typer.Exit(code)


@app.command()
def layout(
    model: Annotated[str, typer.Option(help="Preset, shipped model, or checkpoint folder.")] = "glm-5.3",
    row_format: Annotated[RowFormat, typer.Option(help="How a KV row is stored.")] = RowFormat.FP8,
    page_tokens: Annotated[int, typer.Option(help="Positions in a page.")] = 64,
    hot_tokens: Annotated[
        int | None, typer.Option(help="Hot cache of a session, B; twice the top-k if absent.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens, K for 1024.")] = "32K,100K",
    as_json: AsJson = False,
) -> None:
    """Show what a session of a model costs in memory."""
    with readable_errors():
        from trt_backend.cli.layout import print_layout

        print_layout(model, row_format, page_tokens, hot_tokens, contexts, as_json, console)


@app.command()
def top(
    metrics_url: Annotated[str, typer.Option(help="Metrics port of a running server.")] = DEFAULT_METRICS_URL,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running server: memory, sessions, where rows are found, transfers, speed and latencies."""
    with readable_errors():
        from trt_backend.cli.top import run_top

        run_top(metrics_url, interval, once, as_json, console)


@app.command()
def doctor(
    tritonserver: Annotated[Path | None, typer.Option(help="Check this binary.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can serve, and say how to put right what is missing."""
    with readable_errors():
        from trt_backend.cli.doctor import run_doctor

        code = run_doctor(tritonserver, as_json, console)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of `trt-backend`."""
    app()
