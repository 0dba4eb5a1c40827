"""Transfers and steps under a test's control: fences pass when, and in the order that, the test wants."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trt_backend.kv.transfers import Fence

Int32 = npt.NDArray[np.int32]


@dataclass(eq=False)
class ManualFence:
    """Passed when the test says so."""

    passed: bool = False

    def done(self) -> bool:
        return self.passed


@dataclass(eq=False)
class Copy:
    """A backup that has been asked for and not been done."""

    device_pages: Int32
    host_pages: Int32
    after: Fence
    fence: ManualFence = field(default_factory=ManualFence)


class ManualTransfers:
    """Backups between two stores, int64 [pages, page_tokens], each done when the test asks for it."""

    def __init__(self, device: npt.NDArray[np.int64], pool: npt.NDArray[np.int64]) -> None:
        self.device = device
        self.pool = pool
        self.waiting: list[Copy] = []

    def backup(self, device_pages: Int32, host_pages: Int32, after: Fence) -> Fence:
        copy = Copy(device_pages.copy(), host_pages.copy(), after)
        self.waiting.append(copy)
        return copy.fence

    def ready(self) -> list[Copy]:
        """Copies whose step is done, so that a stream might do them now."""
        return [copy for copy in self.waiting if copy.after.done()]

    def do(self, copy: Copy) -> None:
        """Do one of `ready`, whichever."""
        self.waiting.remove(copy)
        self.pool[copy.host_pages] = self.device[copy.device_pages]
        copy.fence.passed = True
