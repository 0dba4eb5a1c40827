"""`trt-backend serve` as a child process, and its metrics: what load tests, the demo and the server's tests share."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
"""prctl(2) option: the signal that a process gets when the thread that made it ends."""
SAMPLE = re.compile(r"(dhs_\w+)(?:\{(.*)\})? (\S+)")


class ServeCommand:
    """A server on free ports of loopback, stopped at the end of a `with` block and when this process dies.

    `options` go to `trt-backend serve`, `environment` on top of our own. The thread that makes it must live as long as
    the server is to live.
    """

    def __init__(self, state_dir: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.lines: list[str] = []
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trt_backend.cli", "serve", *options, f"--state-dir={state_dir}"]
            + [f"--{name}-port={port}" for name, port in ports.items()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> ServeCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready:"):
                self._settled.set()
        self._settled.set()

    @property
    def output(self) -> str:
        """All that it has printed."""
        return "\n".join(self.lines)

    def wait_ready(self, seconds: float = 300.0, progress: Callable[[str], None] = lambda _: None) -> None:
        """Return when the server has answered its first request; `progress` gets its latest line now and then.

        Raises:
            RuntimeError: it ended, or was not ready in time; the message is what it printed.
        """
        deadline = time.monotonic() + seconds
        while not self._settled.wait(0.1):
            progress(self.lines[-1].strip() if self.lines else "starting")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready after {seconds:g} s\n{self.output}")
        if not any(line.startswith("ready:") for line in self.lines):
            raise RuntimeError(self.output)

    def wait_line(self, beginning: str, count: int = 1, seconds: float = 60.0) -> None:
        """Return when it has printed `count` lines that begin so.

        Raises:
            RuntimeError: it has not in time, or has ended before.
        """
        deadline = time.monotonic() + seconds
        while sum(line.startswith(beginning) for line in self.lines) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {count} lines {beginning!r}\n{self.output}")
            time.sleep(0.05)

    def wait_exit(self, seconds: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(seconds)
        self._reader.join(5.0)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Ask it to stop and wait; kill it if that takes longer than `seconds`. Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.wait_exit(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait_exit()

    def metrics(self) -> dict[str, float]:
        """Our numbers on Triton's metrics port, as `dhs_pages{state="free"}` → 12."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=5.0) as response:
            samples = map(SAMPLE.fullmatch, response.read().decode().splitlines())
        return {(f"{m[1]}{{{m[2]}}}" if m[2] else m[1]): float(m[3]) for m in samples if m}


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


def _die_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before prctl could be told
            os._exit(1)

    return arm
