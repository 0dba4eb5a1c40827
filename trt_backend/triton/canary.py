"""Our own HTTP exchanges with a server, among them the inference that proves now and then that its model answers."""

from __future__ import annotations

import http.client
import json
import select
import time
from typing import Any

from trt_backend.config import LOOPBACK, ServerConfig

ADMIN_HEADER = "dhs-admin"
"""Header that carries the admin key; in gRPC metadata Triton puts `triton-grpc-protocol-` before it."""
CANARY_ID = "dhs-canary"
CANARY_INPUTS: dict[str, Any] = {"text_input": "def main(", "max_tokens": 1, "stream": False, "priority": 0}
"""One token, before everybody else."""
BUSY = ("OVERLOADED", "DEADLINE_EXCEEDED")
"""How an error begins that only a live model gives."""
NO_ANSWER = "no answer"
TRIES = 10
"""How many canaries at least may get a bad answer before the model counts as dead."""
ALL_ADDRESSES = "0.0.0.0"
CLOSING_SECONDS = 2.0
"""How long a canary under way is waited for when the server is to stop."""


class HttpDoor:
    """The HTTP port of our server, never through a proxy, with the admin key."""

    def __init__(self, config: ServerConfig, admin_key: str) -> None:
        address = str(config.http_address)
        self._host = str(LOOPBACK) if address == ALL_ADDRESSES else address
        self._port = config.http_port
        self._headers = {ADMIN_HEADER: admin_key}

    def send(self, method: str, path: str, body: object | None, seconds: float) -> http.client.HTTPConnection:
        """Begin an exchange: returns the connection on which the response will come. `seconds` bound each wait on it.

        Raises:
            OSError: nobody listens.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, self._headers)
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(self, method: str, path: str, body: object | None, seconds: float) -> tuple[int, str]:
        """One exchange; returns status and body.

        Raises:
            OSError: nobody listens, or no answer came in time.
        """
        return receive(self.send(method, path, body, seconds))


def receive(connection: http.client.HTTPConnection) -> tuple[int, str]:
    """The response, status and body; the connection is closed.

    Raises:
        OSError: none came in time, or not a whole one.
    """
    try:
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


class Canary:
    """Sends one small inference every `canary_seconds`, and never waits for it: `look` is called again and again."""

    def __init__(self, door: HttpDoor, model_name: str, config: ServerConfig) -> None:
        self._door = door
        self._model = f"/v2/models/{model_name}"
        self._config = config
        self._body: dict[str, Any] = {}
        self._connection: http.client.HTTPConnection | None = None
        self._sent = 0.0
        self._failing_since: float | None = None
        self._last_fault = NO_ANSWER

    def first(self, seconds: float) -> str | None:
        """Learn which inputs the model has and wait for a whole inference: None if it is good, else what was wrong."""
        try:
            status, answer = self._door.ask("GET", self._model, None, seconds)
            if status != http.client.OK:
                return f"the model's metadata: {status} {answer}"
            names = {tensor["name"] for tensor in json.loads(answer)["inputs"]}
            deadline = {"deadline_ms": round(500 * self._config.canary_timeout_seconds)}
            inputs = {name: value for name, value in (CANARY_INPUTS | deadline).items() if name in names}
            self._body = {"id": CANARY_ID} | inputs
            without_deadline = {name: value for name, value in self._body.items() if name != "deadline_ms"}
            status, answer = self._door.ask("POST", f"{self._model}/generate", without_deadline, seconds)
        except OSError as error:
            return f"no answer: {error}"
        self._sent, self._failing_since, self._last_fault = time.monotonic(), None, NO_ANSWER
        return None if status == http.client.OK and "text_output" in answer else answer

    def look(self) -> str | None:
        """Take an answer that has come, or send the next canary if it is time. Returns what is wrong with an answer.

        Raises:
            TimeoutError: no good answer has come for `canary_timeout_seconds`.
        """
        now = time.monotonic()
        fault = None
        if self._connection is not None:
            if select.select([self._connection.sock], [], [], 0.0)[0]:
                fault = self._take()
                if fault is None:
                    self._failing_since, self._last_fault = None, NO_ANSWER
        elif now - self._sent >= self._period():
            self._sent = now
            self._failing_since = now if self._failing_since is None else self._failing_since
            try:
                self._connection = self._door.send("POST", f"{self._model}/generate", self._body, 1.0)
            except OSError as error:
                fault = f"nobody listens: {error}"
        if fault is not None:
            self._last_fault = fault
        if self._failing_since is not None and now - self._failing_since > self._config.canary_timeout_seconds:
            raise TimeoutError(
                f"no canary has had a good answer for {now - self._failing_since:.1f} s "
                f"(canary_timeout_seconds={self._config.canary_timeout_seconds:g}); "
                f"the last one: {self._last_fault}"
            )
        return fault

    def close(self) -> None:
        """Wait a moment for the canary under way: tritonserver 2.51 may lose count of one whose client goes away."""
        if self._connection is not None:
            select.select([self._connection.sock], [], [], CLOSING_SECONDS)
            self.drop()

    def drop(self) -> None:
        """Forget the canary under way."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _period(self) -> float:
        if self._failing_since is None:
            return self._config.canary_seconds
        return min(self._config.canary_seconds, self._config.canary_timeout_seconds / TRIES)

    def _take(self) -> str | None:
        assert self._connection is not None
        connection, self._connection = self._connection, None
        try:
            status, answer = receive(connection)
        except OSError as error:
            return f"no whole answer: {error}"
        if status == http.client.OK:
            return None
        try:
            message = str(json.loads(answer)["error"])
        except (ValueError, KeyError, TypeError):
            return f"{status} {answer}"
        return None if message.startswith(BUSY) else message
