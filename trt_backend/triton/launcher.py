"""Runs a tritonserver as a child process: starts it, waits for a real inference, looks after it, stops it."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trt_backend.config import ConfigError, ServerConfig
from trt_backend.logs import model_variables
from trt_backend.settings import ENVIRONMENT_PREFIX
from trt_backend.triton.canary import ADMIN_HEADER, Canary, HttpDoor
from trt_backend.triton.locate import STUB, ServerHome
from trt_backend.triton.ports import on_free_ports, require_free_ports
from trt_backend.triton.process import children_of, command_of, die_with_parent, sweep_regions
from trt_backend.triton.repository import DEPLOYMENT_VARIABLE, RECORD_VARIABLE, RunFolder, read_events, write_secret

POLL_SECONDS = 0.05
KILL_GRACE_SECONDS = 5.0
"""How much longer than its own drain time the server may take before it is killed."""
LOG_TAIL_LINES = 15
CHATTER = re.compile(
    r"[|+]|[IW]\d{4} |\S+ (DEBUG|INFO) |\{.*\"level\": \"(DEBUG|INFO)\"|\s*<frozen importlib"
    r"|Error: Failed to initialize NVML|.*CudaDriverHelper has not been initialized"
)
"""Lines of tables, of low levels in Triton's log and in ours, of Python's import machinery, and what a machine without
a GPU says."""


class ServerError(Exception):
    """The server can't serve (any more). The message is for the operator; its first line is the reason."""

    @property
    def reason(self) -> str:
        """Without the end of the log."""
        return str(self).partition("\n")[0]


class StartInterruptedError(Exception):
    """Someone asked us to stop while the server was still starting."""


class TritonServer:
    """One tritonserver child process at a time, from start to stop. Not thread-safe: one thread uses it."""

    def __init__(self, home: ServerHome, folder: RunFolder, model_name: str, config: ServerConfig) -> None:
        self._home = home
        self._folder = folder
        self._model_name = model_name
        self._process: subprocess.Popen[bytes] | None = None
        self._seen_events = 0
        self._log_start = 0
        self.config = config
        key = config.admin_key
        self._admin_key = key.get_secret_value() if key is not None else secrets.token_hex(16)
        self._door = HttpDoor(config, self._admin_key)
        self._canary = Canary(self._door, model_name, config)

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver, while there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def region_prefix(self) -> str:
        """How names of this server's shared-memory files begin: no other server of ours holds the same port."""
        return f"dhs_{os.getuid()}_{self.config.http_port}_"

    def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: a port is taken, or the binary can't be run.
        """
        require_free_ports(self.config)
        sweep_regions(self.region_prefix)
        self._folder.record.write_text("")
        self._seen_events = 0
        write_secret(self._folder.admin_key, self._admin_key)
        # The operator's variables are settled by now, and the admin key among them is not for the model to see.
        environment = {
            name: value for name, value in self._home.environment().items() if not name.startswith(ENVIRONMENT_PREFIX)
        }
        environment[DEPLOYMENT_VARIABLE] = str(self._folder.deployment)
        environment[RECORD_VARIABLE] = str(self._folder.record)
        environment |= model_variables(self.config.log_format, self.config.log_level)
        with self._folder.log.open("ab") as log:
            self._log_start = log.tell()
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
        config = self.config
        backend_settings = {
            "shm-region-prefix-name": self.region_prefix,
            "stub-timeout-seconds": str(round(config.startup_seconds)),
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
            f"--exit-timeout-secs={max(1, round(config.drain_seconds))}",
            "--log-verbose=0",
            *(f"--{protocol}-address={address}" for protocol, address in config.addresses().items()),
            *(f"--{key.replace('_', '-')}={port}" for key, port in config.ports().items()),
            *self._tls_options(),
            *self._restrictions(),
        ]

    def _tls_options(self) -> list[str]:
        """Those of Triton's gRPC. Its HTTP has none."""
        config = self.config
        if not (config.grpc_use_ssl or config.grpc_use_ssl_mutual):
            return []
        files = {"server-cert": config.grpc_server_cert, "server-key": config.grpc_server_key}
        files["root-cert"] = config.grpc_root_cert
        switch = "--grpc-use-ssl-mutual=true" if config.grpc_use_ssl_mutual else "--grpc-use-ssl=true"
        return [switch, *(f"--grpc-{name}={file}" for name, file in files.items() if file is not None)]

    def _restrictions(self) -> list[str]:
        """Triton takes the key from nowhere but its command line, so this machine's users can see it there."""
        protocols = ",".join(self.config.restricted_protocols)
        if not protocols:
            return []
        restricted = f"{protocols}:{ADMIN_HEADER}={self._admin_key}"
        return [f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}"]

    def wait_ready(self, progress: Callable[[str], None], stopping: threading.Event) -> None:
        """Return when the model has answered a request. `progress` gets each step of the start-up as one line.

        Raises:
            ConfigError: the model refused its deployment; the message is the model's own.
            ServerError: the server ended, gave a wrong answer, or was not ready in time.
            StartInterruptedError: `stopping` was set.
        """
        deadline = time.monotonic() + self.config.startup_seconds
        progress("starting tritonserver")
        while not self._is_ready():
            self._read_record(progress)
            self._require_running()
            if stopping.wait(POLL_SECONDS):
                raise StartInterruptedError
            if time.monotonic() > deadline:
                raise ServerError(
                    f"startup_seconds={self.config.startup_seconds:g}: the server was not ready in that time"
                    + self._log_tail()
                )
        progress("waiting for a first inference")
        fault = self._canary.first(max(1.0, deadline - time.monotonic()))
        if fault is not None:
            raise ServerError(f"the first inference failed: {fault}" + self._log_tail())

    def check(self) -> str | None:
        """Look whether the server and the model's process still live and the model answers; never waits.

        Triton goes on calling itself ready after the model's process has died or hangs, and does not restart it.
        Returns what was wrong with a canary's answer, where that is no reason yet to give the server up.

        Raises:
            ServerError: one of them has ended or does not answer, or the model has recorded that it can't serve.
        """
        self._require_running()
        assert self._process is not None
        try:
            self._read_record(lambda _: None)
        except ConfigError as error:
            raise ServerError(str(error)) from error
        if not any(STUB in command_of(child) for child in children_of(self._process.pid)):
            raise ServerError("the model's process has ended; Triton does not restart it" + self._log_tail())
        try:
            return self._canary.look()
        except TimeoutError as error:
            raise ServerError(str(error) + self._log_tail()) from error

    def stop(self, report: Callable[[str], None]) -> bool:
        """Let streams that are running finish (up to the drain time), then end the server; True if it ended by itself.

        Shared-memory files are gone afterwards in either case.
        """
        process = self._process
        if process is None:
            return True
        try:
            self._canary.close()
            return process.poll() is not None or self._drain(process, report)
        finally:
            self.kill()

    def _drain(self, process: subprocess.Popen[bytes], report: Callable[[str], None]) -> bool:
        """Ask the server to stop; whether it has ended in time."""
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        patience = self.config.drain_seconds + KILL_GRACE_SECONDS
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            report(f"tritonserver did not end within {patience:g} s of SIGTERM; killing it")
            return False
        if code != 0:
            # Seen in 2.51 when it was still starting, and after clients were refused by its core or cancelled at the
            # very end: it then waits for requests that do not exist any more.
            waited = time.monotonic() - asked
            report(f"tritonserver ended with code {code}, {waited:.1f} s after it was asked to stop")
        return True

    def kill(self) -> None:
        """End the server and the model's process at once; their clients see their streams broken off."""
        if self._process is None:
            return
        self._kill_group(self._process)
        self._process.wait()
        self._canary.drop()
        sweep_regions(self.region_prefix)
        self._process = None

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
        """The end of this start's log, without Triton's tables and other chatter."""
        with self._folder.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        telling = [line for line in lines if line.strip() and not CHATTER.match(line)][-LOG_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in telling) + f"\n  (all of it: {self._folder.log})"

    def _is_ready(self) -> bool:
        try:
            return self._door.ask("GET", "/v2/health/ready", None, 5.0)[0] == http.client.OK
        except OSError:
            return False


def server_version(home: ServerHome, scratch: Path) -> str:
    """Start the server with nothing to serve and ask its version: proof that its libraries are all there.

    Raises:
        ServerError: it does not start; the message has what it printed.
    """
    config = on_free_ports(ServerConfig(startup_seconds=30.0, drain_seconds=1.0))
    folder = RunFolder(scratch)
    folder.models.mkdir(parents=True)
    server = TritonServer(home, folder, "none", config)
    try:
        server.start()
        server_answers = time.monotonic() + config.startup_seconds
        while not server._is_ready():
            server._require_running()
            if time.monotonic() > server_answers:
                raise ServerError("it does not answer" + server._log_tail())
            time.sleep(POLL_SECONDS)
        return str(json.loads(server._door.ask("GET", "/v2", None, 5.0)[1])["version"])
    finally:
        server.stop(lambda _: None)
