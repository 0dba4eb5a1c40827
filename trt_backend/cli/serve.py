"""`trt-backend serve`: a tritonserver from start to stop."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from rich.console import Console

from trt_backend.build import Deployment
from trt_backend.config import ConfigError, DeploymentConfig
from trt_backend.triton.launcher import (
    LOOPBACK,
    ServerError,
    ServerOptions,
    StartInterruptedError,
    TritonServer,
    require_free_ports,
)
from trt_backend.triton.locate import find_server
from trt_backend.triton.repository import make_run_folder

WATCH_SECONDS = 0.5
"""How often a running server is looked at."""


def run_server(
    config: DeploymentConfig,
    model_name: str | None,
    tritonserver: Path | None,
    state_dir: Path,
    options: ServerOptions,
    console: Console,
    errors: Console,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code: 0 after a stop that was asked for.

    Raises:
        ConfigError: the deployment, a port or the server can't be used; nothing is left running.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    deployment = Deployment.of(config)  # most wrong settings show here, before anything is started
    name = model_name or deployment.folder.resolve().name
    home = find_server(tritonserver)
    require_free_ports(options)  # before a run folder is made anew that a server on the same ports may be using
    folder = make_run_folder(state_dir.resolve() / f"{name}-{options.http_port}", name, config)
    server = TritonServer(home, folder, name, options)
    console.print(f"tritonserver: {home.binary} ({home.origin})", soft_wrap=True)
    console.print(f"log: {folder.log}", soft_wrap=True)
    try:
        server.start()
        with console.status("starting") as status:

            def progress(message: str) -> None:
                status.update(message)
                if not console.is_terminal:
                    console.print(f"  {message}", markup=False, soft_wrap=True)

            server.wait_ready(progress, stopping)
        _print_endpoints(console, name, options, deployment)
        while not stopping.wait(WATCH_SECONDS):
            server.check()
    except StartInterruptedError:
        pass
    except ServerError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except ConfigError as error:
        raise ConfigError(f"the model refused to start\n{error}\n(server log: {folder.log})") from error
    finally:
        if server.pid is not None:
            console.print("stopping tritonserver")
        server.stop(lambda message: errors.print(message, style="yellow", markup=False, soft_wrap=True))
    console.print("stopped")
    return 0


def _print_endpoints(console: Console, name: str, options: ServerOptions, deployment: Deployment) -> None:
    sizes = deployment.sizes
    console.print(
        f"serving: model {name}, {deployment.config.residency.value}, up to {sizes.slots} sessions of "
        f"{deployment.max_model_len} tokens, {sizes.device_pages} device pages, {sizes.host_pages} host pages",
        soft_wrap=True,
    )
    console.print(f"  gRPC     {LOOPBACK}:{options.grpc_port}")
    console.print(f"  HTTP     http://{LOOPBACK}:{options.http_port}/v2/models/{name}/generate", soft_wrap=True)
    console.print(f"  metrics  http://{LOOPBACK}:{options.metrics_port}/metrics", soft_wrap=True)
    console.print("ready: the model has answered a first request; Ctrl-C stops it")
