"""What to do on a signal, done where it is safe."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable


def on_signals(numbers: tuple[signal.Signals, ...], action: Callable[[], None]) -> None:
    """Call `action` after each of these signals, from a thread of its own that lives as long as the process.

    A handler in Python runs between any two steps of the main thread, which may hold the very lock that the action
    needs; even `threading.Event.set` hangs for ever when a second signal comes in the middle of it. All that a handler
    may do is to put into a SimpleQueue, which is made for that.
    """
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()

    def act() -> None:
        while True:
            seen.get()
            action()

    for number in numbers:
        signal.signal(number, lambda number, _: seen.put(number))
    threading.Thread(target=act, name="signals", daemon=True).start()
