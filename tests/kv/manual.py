"""Transfers and steps under a test's control: fences pass when, and in the order that, the test wants."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trt_backend.kv.transfers import Fence

RUBBISH = -77
Int32 = npt.NDArray[np.int32]


@dataclass(eq=False)
class ManualFence:
    """Passed, or failed, when the test says so."""

    passed: bool = False
    error: str | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise OSError(self.error)
        return self.passed


@dataclass(eq=False)
class Pending:
    """A copy that has been asked for and not been done."""

    backup: bool
    device_pages: Int32
    host_pages: Int32
    after: Fence
    fence: ManualFence = field(default_factory=ManualFence)


class ManualTransfers:
    """Copies between two stores, int64 [pages, page_tokens], each done when the test asks for it."""

    def __init__(self, device: npt.NDArray[np.int64], pool: npt.NDArray[np.int64]) -> None:
        self.device = device
        self.pool = pool
        self.waiting: list[Pending] = []

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        return self._ask(Pending(True, device_pages.copy(), host_pages.copy(), after))

    def refill(self, host_pages: Int32, device_pages: Int32, after: Fence) -> Fence:
        return self._ask(Pending(False, device_pages.copy(), host_pages.copy(), after))

    def _ask(self, copy: Pending) -> Fence:
        self.waiting.append(copy)
        return copy.fence

    def ready(self) -> list[Pending]:
        """Copies whose step is done, so that a stream might do them now."""
        return [copy for copy in self.waiting if copy.after.done()]

    def do(self, copy: Pending) -> None:
        """Do one of `ready`, whichever."""
        self.waiting.remove(copy)
        if copy.backup:
            self.pool[copy.host_pages] = self.device[copy.device_pages]
        else:
            self.device[copy.device_pages] = self.pool[copy.host_pages]
        copy.fence.passed = True

    def fail(self, copy: Pending) -> None:
        """Let one fail, leaving rubbish where it was to write."""
        self.waiting.remove(copy)
        if copy.backup:
            self.pool[copy.host_pages] = RUBBISH
        else:
            self.device[copy.device_pages] = RUBBISH
        copy.fence.error = "the test wants it to fail"
