"""The commands of `trt-backend` and their options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trt_backend.config import ConfigError, DeploymentConfig, Residency, RowFormat, load_deployment, parse_deployment

app = typer.Typer(
    help="Adaptive DHiSparse on Triton: sparse-attention models whose KV rows live in two tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

DEPLOYMENT = "Deployment"
SERVER = "Server"

Model = Annotated[str | None, typer.Option(help="Shipped model, or checkpoint folder.", rich_help_panel=DEPLOYMENT)]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="JSON file with these settings; options go over it.", rich_help_panel=DEPLOYMENT),
]
ResidencyOption = Annotated[
    Residency | None, typer.Option("--residency", help="Where histories live.", rich_help_panel=DEPLOYMENT)
]
RowFormatOption = Annotated[
    RowFormat | None, typer.Option("--row-format", help="How a KV row is stored.", rich_help_panel=DEPLOYMENT)
]
PageTokens = Annotated[int | None, typer.Option(help="Positions in a page.", rich_help_panel=DEPLOYMENT)]
HotTokens = Annotated[int | None, typer.Option(help="Hot cache of a session, B.", rich_help_panel=DEPLOYMENT)]
DevicePages = Annotated[int | None, typer.Option(help="Pages in the device pool.", rich_help_panel=DEPLOYMENT)]
HostPages = Annotated[int | None, typer.Option(help="Pages in the host pool.", rich_help_panel=DEPLOYMENT)]
MaxSessions = Annotated[int | None, typer.Option(help="Sessions at once.", rich_help_panel=DEPLOYMENT)]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt + answer.", rich_help_panel=DEPLOYMENT)]
ChunkTokens = Annotated[int | None, typer.Option(help="Prompt tokens in a step.", rich_help_panel=DEPLOYMENT)]
QueueLimit = Annotated[int | None, typer.Option(help="Requests that may wait.", rich_help_panel=DEPLOYMENT)]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the engine.", rich_help_panel=DEPLOYMENT)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def readable_errors() -> Iterator[None]:
    """What an operator can put right is one message and exit code 1, never a traceback."""
    try:
        yield
    except ConfigError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def deployment_of(file: Path | None, options: dict[str, Any]) -> DeploymentConfig:
    """Settings of `file`, if any, with the given options over them.

    Raises:
        ConfigError: naming file or command line, key, value and what is legal.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if file is None:
        return parse_deployment(given, "command line")
    return parse_deployment(load_deployment(file).model_dump() | given, "command line")


@app.command()
def serve(
    model: Model = None,
    config: ConfigFile = None,
    residency: ResidencyOption = None,
    row_format: RowFormatOption = None,
    page_tokens: PageTokens = None,
    hot_tokens: HotTokens = None,
    device_pages: DevicePages = None,
    host_pages: HostPages = None,
    max_sessions: MaxSessions = None,
    max_model_len: MaxModelLen = None,
    prefill_chunk_tokens: ChunkTokens = None,
    queue_limit: QueueLimit = None,
    threads: Threads = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name to serve under; the model's by default.", rich_help_panel=SERVER)
    ] = None,
    http_port: Annotated[int, typer.Option(rich_help_panel=SERVER)] = 8000,
    grpc_port: Annotated[int, typer.Option(rich_help_panel=SERVER)] = 8001,
    metrics_port: Annotated[int, typer.Option(rich_help_panel=SERVER)] = 8002,
    tritonserver: Annotated[
        Path | None, typer.Option(help="Binary to run; else TRITONSERVER, PATH, the wheel's.", rich_help_panel=SERVER)
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Where logs and the run's model repository go.", rich_help_panel=SERVER)
    ] = Path(".server"),
    startup_seconds: Annotated[float, typer.Option(help="Time to get ready.", rich_help_panel=SERVER)] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for running streams to finish after a stop.", rich_help_panel=SERVER)
    ] = 10.0,
) -> None:
    """Serve a model through a Triton Inference Server on this machine's loopback."""
    options = dict(locals())
    with readable_errors():
        from trt_backend.cli.serve import run_server
        from trt_backend.triton.launcher import ServerOptions

        code = run_server(
            config=deployment_of(config, _settings(options)),
            model_name=model_name,
            tritonserver=tritonserver,
            state_dir=state_dir,
            options=ServerOptions(http_port, grpc_port, metrics_port, startup_seconds, drain_seconds),
            console=console,
            errors=errors,
        )
    raise typer.Exit(code)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    as_json: AsJson = False,
    model: Model = None,
    config: ConfigFile = None,
    residency: ResidencyOption = None,
    row_format: RowFormatOption = None,
    page_tokens: PageTokens = None,
    hot_tokens: HotTokens = None,
    device_pages: DevicePages = None,
    host_pages: HostPages = None,
    max_sessions: MaxSessions = None,
    max_model_len: MaxModelLen = None,
    prefill_chunk_tokens: ChunkTokens = None,
    queue_limit: QueueLimit = None,
    threads: Threads = None,
) -> None:
    """Generate text in this process: the server's own parts, without Triton."""
    options = dict(locals())
    with readable_errors():
        from trt_backend.cli.generate import run_generate
        from trt_backend.triton.inputs import Fields

        code = run_generate(
            config=deployment_of(config, {"max_sessions": 1} | _settings(options)),
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
def doctor(
    tritonserver: Annotated[Path | None, typer.Option(help="Check this binary.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can serve, and say how to put right what is missing."""
    with readable_errors():
        from trt_backend.cli.doctor import run_doctor

        code = run_doctor(tritonserver, as_json, console)
    raise typer.Exit(code)


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in DeploymentConfig.model_fields if options.get(key) is not None}


def main() -> None:
    """Entry point of `trt-backend`."""
    app()
