"""A thread that does small jobs again and again: looking for cancelled clients, publishing metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watch:
    """Calls each job every so many seconds. A job that fails is logged and called again next time."""

    def __init__(self, jobs: dict[Callable[[], None], float]) -> None:
        self._jobs = jobs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Call every job once more, then end the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due = dict.fromkeys(self._jobs, 0.0)
        while not self._stopping.wait(max(0.0, min(due.values()) - time.monotonic())):
            for job, period in self._jobs.items():
                if time.monotonic() >= due[job]:
                    self._call(job)
                    due[job] = time.monotonic() + period
        for job in self._jobs:
            self._call(job)

    @staticmethod
    def _call(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            log.exception("%s failed", getattr(job, "__name__", job))
