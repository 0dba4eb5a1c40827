"""Runs a tritonserver as a child process: starts it on loopback, waits for a real inference, watches it, stops it."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trt_backend.config import ConfigError
from trt_backend.triton.locate import STUB, ServerHome
from trt_backend.triton.process import children_of, command_of, die_with_parent, sweep_regions
from trt_backend.triton.repository import DEPLOYMENT_VARIABLE, RECORD_VARIABLE, RunFolder, read_events

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.05
KILL_GRACE_SECONDS = 5.0
"""How much longer than its own drain time the server may take before it is killed."""
LOG_TAIL_LINES = 15
CHATTER = re.compile(r"[|+]|[IW]\d{4} |\s*<frozen importlib|Error: Failed to initialize NVML")
"""Lines of tables, of log levels I and W, of Python's import machinery, and what a machine without a GPU says."""
CANARY = {"text_input": "def main(", "max_tokens": 1, "stream": False}


class ServerError(Exception):
    """The server can't serve (any more). The message is for the operator."""


class StartInterruptedError(Exception):
    """Someone asked us to stop while the server was still starting."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Ports, and how long things may take in seconds."""

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    startup_seconds: float = 600.0
    drain_seconds: float = 10.0

    def ports(self) -> dict[str, int]:
        """Option name → port."""
        return {"http-port": self.http_port, "grpc-port": self.grpc_port, "metrics-port": self.metrics_port}

    @property
    def region_prefix(self) -> str:
        """How names of this server's shared-memory files begin: no other server of ours holds the same port."""
        return f"dhs_{os.getuid()}_{self.http_port}_"


class TritonServer:
    """One tritonserver child process, from start to stop. Not thread-safe: one thread uses it."""

    def __init__(self, home: ServerHome, folder: RunFolder, model_name: str, options: ServerOptions) -> None:
        self._home = home
        self._folder = folder
        self._model_name = model_name
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._seen_events = 0

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: a port is taken, or the binary can't be run.
        """
        require_free_ports(self.options)
        sweep_regions(self.options.region_prefix)
        environment = self._home.environment()
        environment[DEPLOYMENT_VARIABLE] = str(self._folder.deployment)
        environment[RECORD_VARIABLE] = str(self._folder.record)
        with self._folder.log.open("wb") as log:
            try:
                # A session of its own: Ctrl-C reaches us alone, and we pass it on in order.
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
            except OSError as error:
                raise ConfigError(f"{self._home.binary}: can't be started: {error}") from error

    def _command(self) -> list[str]:
        options = self.options
        # Nobody knows this value, so nobody can use these protocols. (It is visible to this machine's users in the
        # process list; they are not who it is for.)
        nobody = f"shared-memory,trace,logging:dhs-admin={secrets.token_hex(16)}"
        backend_settings = {
            "shm-region-prefix-name": options.region_prefix,
            "stub-timeout-seconds": str(round(options.startup_seconds)),
        }
        return [
            str(self._home.binary),
            f"--model-repository={self._folder.models}",
            f"--backend-directory={self._home.backends}",
            *(f"--backend-config=python,{key}={value}" for key, value in backend_settings.items()),
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            "--strict-readiness=true",
            f"--exit-timeout-secs={max(1, round(options.drain_seconds))}",
            "--log-verbose=0",
            *(f"--{protocol}-address={LOOPBACK}" for protocol in ("http", "grpc", "metrics")),
            *(f"--{option}={port}" for option, port in options.ports().items()),
            f"--http-restricted-api={nobody}",
            f"--grpc-restricted-protocol={nobody}",
        ]

    def wait_ready(self, progress: Callable[[str], None], stopping: threading.Event) -> None:
        """Return when the model has answered a request. `progress` gets each step of the start-up as one line.

        Raises:
            ConfigError: the model refused its deployment; the message is the model's own.
            ServerError: the server ended, gave a wrong answer, or was not ready in time.
            StartInterruptedError: `stopping` was set.
        """
        deadline = time.monotonic() + self.options.startup_seconds
        progress("starting tritonserver")
        while not self._is_ready():
            self._read_record(progress)
            self._require_running()
            if stopping.wait(POLL_SECONDS):
                raise StartInterruptedError
            if time.monotonic() > deadline:
                raise ServerError(
                    f"startup-seconds={self.options.startup_seconds:g}: the server was not ready in that time"
                    + self._log_tail()
                )
        progress("waiting for a first inference")
        self._run_canary(deadline - time.monotonic())

    def check(self) -> None:
        """Look whether the server and the model's process still live.

        Triton goes on calling itself ready after the model's process has died, and does not restart it.

        Raises:
            ServerError: one of them has ended, or the model has recorded that it can't serve any more.
        """
        self._require_running()
        assert self._process is not None
        try:
            self._read_record(lambda _: None)
        except ConfigError as error:
            raise ServerError(str(error)) from error
        if not any(STUB in command_of(child) for child in children_of(self._process.pid)):
            raise ServerError("the model's process has ended; Triton does not restart it" + self._log_tail())

    def stop(self, report: Callable[[str], None]) -> bool:
        """Let streams that are running finish (up to the drain time), then end the server; True if it ended by itself.

        Shared-memory files are gone afterwards in either case.
        """
        process = self._process
        if process is None:
            return True
        by_itself = True
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            patience = self.options.drain_seconds + KILL_GRACE_SECONDS
            try:
                if process.wait(patience) != 0:
                    # Seen in 2.51 after clients were refused by its core or cancelled at the very end: it then waits
                    # for requests that do not exist any more.
                    report(f"tritonserver gave up on a clean stop after {self.options.drain_seconds:g} s")
            except subprocess.TimeoutExpired:
                report(f"tritonserver did not end within {patience:g} s of SIGTERM; killing it")
                by_itself = False
        self._kill_group(process)
        process.wait()
        sweep_regions(self.options.region_prefix)
        self._process = None
        return by_itself

    @staticmethod
    def _kill_group(process: subprocess.Popen[bytes]) -> None:
        """End whatever is left of the server's session: the model's process outlives a killed server for a second."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + KILL_GRACE_SECONDS
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(POLL_SECONDS)

    def _read_record(self, progress: Callable[[str], None]) -> None:
        events = read_events(self._folder.record)
        for event in events[self._seen_events :]:
            if event.failed:
                raise ConfigError(event.message)
            progress(event.message)
        self._seen_events = len(events)

    def _require_running(self) -> None:
        if self._process is None or self._process.poll() is None:
            return
        self._read_record(lambda _: None)  # the model's own reason is better than the server's
        raise ServerError(f"tritonserver ended with code {self._process.returncode}" + self._log_tail())

    def _log_tail(self) -> str:
        """The end of the log, without Triton's tables and other chatter."""
        lines = self._folder.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line.strip() and not CHATTER.match(line)][-LOG_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in telling) + f"\n  (all of it: {self._folder.log})"

    def _is_ready(self) -> bool:
        try:
            return ask(self.options.http_port, "GET", "/v2/health/ready", None, 5.0)[0] == http.client.OK
        except OSError:
            return False

    def _run_canary(self, seconds: float) -> None:
        path = f"/v2/models/{self._model_name}/generate"
        try:
            status, answer = ask(self.options.http_port, "POST", path, CANARY, max(seconds, 1.0))
        except OSError as error:
            raise ServerError(f"the first inference got no answer: {error}" + self._log_tail()) from error
        if status != http.client.OK or "text_output" not in answer:
            raise ServerError(f"the first inference failed: {answer}" + self._log_tail())


def ask(port: int, method: str, path: str, body: object | None, seconds: float) -> tuple[int, str]:
    """One HTTP exchange with our own server; never through a proxy. Returns status and body.

    Raises:
        OSError: nobody listens, or no answer came in time.
    """
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=seconds)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def require_free_ports(options: ServerOptions) -> None:
    """Refuse to start where Triton would fail half-way.

    Raises:
        ConfigError: a port is out of range, named twice, or somebody listens on it.
    """
    seen: dict[int, str] = {}
    for option, port in options.ports().items():
        if not 1 <= port <= 65535:
            raise ConfigError(f"command line: {option}={port}: legal range: 1 to 65535")
        if port in seen:
            raise ConfigError(f"command line: {option}={port}: already used by --{seen[port]}; name another port")
        seen[port] = option
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise ConfigError(
                    f"command line: {option}={port}: can't listen on {LOOPBACK}:{port} ({error.strerror}); "
                    f"name another port with --{option}"
                ) from error


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def server_version(home: ServerHome, scratch: Path) -> str:
    """Start the server with nothing to serve and ask its version: proof that its libraries are all there.

    Raises:
        ServerError: it does not start; the message has what it printed.
    """
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(http_port, grpc_port, metrics_port, startup_seconds=30.0, drain_seconds=1.0)
    folder = RunFolder(scratch)
    folder.models.mkdir(parents=True)
    server = TritonServer(home, folder, "none", options)
    try:
        server.start()
        server_answers = time.monotonic() + options.startup_seconds
        while not server._is_ready():
            server._require_running()
            if time.monotonic() > server_answers:
                raise ServerError("it does not answer" + server._log_tail())
            time.sleep(POLL_SECONDS)
        return str(json.loads(ask(http_port, "GET", "/v2", None, 5.0)[1])["version"])
    finally:
        server.stop(lambda _: None)
