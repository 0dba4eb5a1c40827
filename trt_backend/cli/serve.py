"""`trt-backend serve`: a tritonserver from start to stop, restarts included."""

from __future__ import annotations

import logging
import signal
import threading

from rich.console import Console

from trt_backend.build import Deployment
from trt_backend.cli.config import print_settings
from trt_backend.cli.signals import on_signals
from trt_backend.config import ConfigError, ServerConfig
from trt_backend.logs import set_up_logging
from trt_backend.settings import Settings
from trt_backend.triton.launcher import ServerError, TritonServer
from trt_backend.triton.locate import find_server
from trt_backend.triton.ports import require_free_ports
from trt_backend.triton.repository import make_run_folder
from trt_backend.triton.supervisor import Event, EventKind, Supervisor

log = logging.getLogger("trt_backend.serve")
LEVELS = {EventKind.CANARY_FAILED: logging.WARNING, EventKind.RESTARTING: logging.ERROR}


def run_server(settings: Settings, console: Console, errors: Console) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code: 0 after a stop that was asked for.

    Raises:
        ConfigError: the deployment, a port or the server can't be used; nothing is left running.
    """
    stopping = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stopping.set)
    console.print("settings:")
    print_settings(settings, as_json=False, console=console)
    config = settings.server
    deployment = Deployment.of(settings.deployment)  # most wrong settings show here, before anything is started
    name = config.model_name or deployment.folder.resolve().name
    home = find_server(config.tritonserver)
    require_free_ports(config)  # before a run folder is made anew that a server on the same ports may be using
    folder = make_run_folder(config.state_dir.resolve() / f"{name}-{config.http_port}", name, settings.deployment)
    set_up_logging(config.log_format, config.log_level, folder.log)
    console.print(f"tritonserver: {home.binary} ({home.origin})", soft_wrap=True)
    console.print(f"log: {folder.log}", soft_wrap=True)
    console.print(f"admin key: {folder.admin_key}", soft_wrap=True)

    def warn(message: str) -> None:
        log.warning("%s", message)
        errors.print(message, style="yellow", markup=False, soft_wrap=True)

    server = TritonServer(home, folder, name, config)
    with console.status("starting") as status:

        def progress(message: str) -> None:
            status.update(message)
            if not console.is_terminal:
                console.print(f"  {message}", markup=False, soft_wrap=True)

        def tell(event: Event) -> None:
            log.log(
                LEVELS.get(event.kind, logging.INFO), event.message, extra={"event": event.kind.value} | event.fields
            )
            if event.kind is EventKind.READY:
                status.stop()
                _print_endpoints(console, name, config, deployment, event.fields["restarts"])
            elif event.kind is EventKind.RESTARTING:
                errors.print(f"crashed: {event.detail}", style="red", markup=False, soft_wrap=True)
                console.print(event.message, markup=False, soft_wrap=True)
                status.start()
            elif event.kind is EventKind.CANARY_FAILED:
                errors.print(event.message, style="yellow", markup=False, soft_wrap=True)

        try:
            Supervisor(server, tell, progress).run(stopping)
        except ServerError as error:
            log.error("giving up", extra={"event": "gave_up", "reason": error.reason})
            errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            return 1
        except ConfigError as error:
            log.error("giving up", extra={"event": "gave_up", "reason": str(error)})
            raise ConfigError(f"{error}\n(server log: {folder.log})") from error
        finally:
            try:  # whoever read what we print may be gone
                status.stop()
                if server.pid is not None:
                    log.info("stopping", extra={"event": "stopping", "pid": server.pid})
                    console.print("stopping tritonserver")
            finally:
                server.stop(warn)
    log.info("stopped", extra={"event": "stopped"})
    console.print("stopped")
    return 0


def _print_endpoints(console: Console, name: str, config: ServerConfig, deployment: Deployment, restarts: int) -> None:
    sizes, addresses = deployment.sizes, config.addresses()
    tls = ", TLS" if config.grpc_use_ssl or config.grpc_use_ssl_mutual else ""
    console.print(
        f"serving: model {name}, {deployment.config.residency.value}, up to {sizes.slots} sessions of "
        f"{deployment.max_model_len} tokens, {sizes.device_pages} device pages, {sizes.host_pages} host pages",
        soft_wrap=True,
    )
    console.print(f"  gRPC     {addresses['grpc']}:{config.grpc_port}{tls}")
    console.print(f"  HTTP     http://{addresses['http']}:{config.http_port}/v2/models/{name}/generate", soft_wrap=True)
    console.print(f"  metrics  http://{addresses['metrics']}:{config.metrics_port}/metrics", soft_wrap=True)
    after = f" (restarts so far: {restarts})" if restarts else ""
    console.print(f"ready: the model has answered a first request{after}; Ctrl-C stops it", soft_wrap=True)
