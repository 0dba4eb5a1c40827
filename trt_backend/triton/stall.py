"""Notices a scheduler that has work and makes no step."""

from __future__ import annotations

import time
from collections.abc import Callable


class StallWatch:
    """A job for `watch.Watch`.

    `progress` is a counter that grows with every step, `load` how many requests (run, wait). After `stall_seconds`
    in which there was work all the time and the counter stood still, `on_stall` is called with the numbers: once,
    until there is progress again.
    """

    def __init__(
        self,
        progress: Callable[[], int],
        load: Callable[[], tuple[int, int]],
        stall_seconds: float,
        on_stall: Callable[[str], None],
    ) -> None:
        self._progress = progress
        self._load = load
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._seen = progress()
        self._since = time.monotonic()
        self._told = False

    def look(self) -> None:
        """Compare with the last look; to be called every second or so."""
        now = time.monotonic()
        steps = self._progress()
        running, waiting = self._load()
        if steps != self._seen or running + waiting == 0:
            self._seen, self._since, self._told = steps, now, False
        elif now - self._since > self._stall_seconds and not self._told:
            self._told = True
            self._on_stall(
                f"no step for {now - self._since:.0f} s with {running} running, {waiting} waiting "
                f"(stall_seconds={self._stall_seconds:g})"
            )
