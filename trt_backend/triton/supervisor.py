"""Keeps a server answering: restarts it when it has crashed or hangs, and knows when to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trt_backend.config import ConfigError
from trt_backend.triton.launcher import ServerError, StartInterruptedError, TritonServer

WATCH_SECONDS = 0.5
"""How often a running server is looked at."""
LONGEST_BACKOFF_SECONDS = 60.0


class EventKind(StrEnum):
    """What an operator is told of."""

    STARTED = "started"
    READY = "ready"
    CANARY_FAILED = "canary_failed"
    RESTARTING = "restarting"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the server; `fields` have its numbers, `detail` what is too long for a line."""

    kind: EventKind
    message: str
    fields: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


class Supervisor:
    """Runs one server until it is to stop, over as many restarts as it may have."""

    def __init__(
        self, server: TritonServer, tell: Callable[[Event], None], progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._server = server
        self._config = server.config
        self._tell = tell
        self._progress = progress
        self._restarts = 0
        self._crashes: list[float] = []
        self._served = 0.0
        """Seconds in which the server was ready. Crashes are timed on this clock: on the wall's, a model that takes
        minutes to load could crash and restart for ever, and never three times within a minute."""

    def run(self, stopping: threading.Event) -> None:
        """Serve until `stopping` is set. The server is left running then, or as far as it has come.

        Raises:
            ConfigError: the deployment, a port or the server can't be used.
            ServerError: the first start failed, or there were more crashes than `max_restarts` within the window.
        """
        while not stopping.is_set():
            try:
                self._start(stopping)
                self._watch(stopping)
            except StartInterruptedError:
                return
            except ServerError as error:
                self._server.kill()  # at once, so that clients know
                if self._served == 0.0:
                    raise
                stopping.wait(self._account(error))

    def _start(self, stopping: threading.Event) -> None:
        self._server.start()
        self._tell(Event(EventKind.STARTED, "tritonserver started", self._fields()))
        try:
            self._server.wait_ready(self._progress, stopping)
        except ConfigError as error:
            raise ConfigError(f"the model refused to start\n{error}") from error
        self._tell(Event(EventKind.READY, "the model has answered a first request", self._fields()))

    def _watch(self, stopping: threading.Event) -> None:
        looked = time.monotonic()
        while not stopping.wait(WATCH_SECONDS):
            now = time.monotonic()
            self._served += now - looked
            looked = now
            fault = self._server.check()
            if fault is not None:
                self._tell(Event(EventKind.CANARY_FAILED, f"a canary got a bad answer: {fault}", self._fields()))

    def _account(self, error: ServerError) -> float:
        """How long to wait before the restart.

        Raises:
            ServerError: this was one crash too many.
        """
        window = self._config.restart_window_seconds
        self._crashes = [at for at in self._crashes if self._served - at <= window] + [self._served]
        count = len(self._crashes)
        if count > self._config.max_restarts:
            raise ServerError(
                f"crash {count} within {window:g} s of serving (max_restarts={self._config.max_restarts}, "
                f"restart_window_seconds={window:g}): giving up; the reason: {error}"
            ) from error
        self._restarts += 1
        backoff = min(LONGEST_BACKOFF_SECONDS, self._config.restart_backoff_seconds * 2.0 ** (count - 1))
        fields = self._fields() | {"reason": error.reason, "backoff_seconds": backoff}
        message = (
            f"restart {self._restarts} in {backoff:g} s ({count} of {self._config.max_restarts} within {window:g} s)"
        )
        self._tell(Event(EventKind.RESTARTING, message, fields, detail=str(error)))
        return backoff

    def _fields(self) -> dict[str, Any]:
        return {"restarts": self._restarts, "pid": self._server.pid}
