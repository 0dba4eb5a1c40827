"""A session: one admitted request and everything it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trt_backend.kv.residency import Need
from trt_backend.kv.transfers import Backup

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Session:
    """One admitted request. Its device pages stand in the page table and the slot tables, under `slot`.

    `length` counts the positions whose rows are written. `backups` are the copies under way, oldest first;
    `backed_up` counts the pages, from the first, whose host copies have landed. `growth` are pages taken at admission
    that decoding has not reached yet.
    """

    slot: int
    prompt_tokens: int
    max_length: int
    need: Need
    host_pages: Int32
    index_pages: Int32
    growth: list[int]
    length: int = 0
    backed_up: int = 0
    released: int = 0
    """History pages, from the first, that the device has given up."""
    backups: deque[Backup] = field(default_factory=deque)
    ending: bool = False

    @property
    def importing(self) -> bool:
        """Whether rows of the prompt are still missing."""
        return self.length < self.prompt_tokens
