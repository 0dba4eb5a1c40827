"""Requests that wait for memory: first come, first served inside a priority class, and classes age."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from trt_backend.request import PRIORITIES
from trt_backend.scheduler.intake import Waiting

AGEING_SECONDS = 10.0
"""Waiting so long is worth one priority class. So no request waits for ever behind ever more urgent ones."""
MAX_OVERTAKES = 64
"""So many later requests may be admitted before one that waits; then it is next, whatever its class."""


class WaitingQueue:
    """Decides who is next. Only one thread uses it.

    A request of class p that has waited s seconds counts as class p - floor(s / AGEING_SECONDS); the lowest count is
    next, of equals the one that came first.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._classes: dict[int, deque[Waiting]] = {priority: deque() for priority in PRIORITIES}
        self.overtakes = 0
        """How often a request has been admitted before one that came earlier, in all."""

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Waiting]:
        for waiting in self._classes.values():
            yield from waiting

    def push(self, waiting: Waiting) -> None:
        """Put a request to the end of its class."""
        self._classes[waiting.request.priority].append(waiting)

    def head(self) -> Waiting | None:
        """Who is next; nobody may be admitted before it, however small."""
        heads = [waiting[0] for waiting in self._classes.values() if waiting]
        if not heads:
            return None
        passed_over = [head for head in heads if head.overtaken >= MAX_OVERTAKES]
        if passed_over:
            return min(passed_over, key=lambda head: head.times.arrival_ns)
        now = self._clock()
        return min(heads, key=lambda head: (self._aged(head, now), head.times.arrival_ns))

    def pop(self, head: Waiting) -> None:
        """Take the head out; those who came before it have been overtaken.

        Only the first of each class is counted: the others of its class wait behind it anyway.
        """
        self._classes[head.request.priority].popleft()
        for waiting in self._classes.values():
            if waiting and waiting[0].times.arrival_ns < head.times.arrival_ns:
                waiting[0].overtaken += 1
                self.overtakes += 1

    def remove(self, waiting: Waiting) -> None:
        """Take a request out that does not wait any more."""
        self._classes[waiting.request.priority].remove(waiting)

    @staticmethod
    def _aged(waiting: Waiting, now: int) -> int:
        return waiting.request.priority - int((now - waiting.times.arrival_ns) / 1e9 / AGEING_SECONDS)
