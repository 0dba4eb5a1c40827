"""What the parts of the hierarchy share: the tables, who owns which page, and what is being moved."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trt_backend.kv.budget import Use
from trt_backend.kv.layout import KvLayout
from trt_backend.kv.movement import Movement
from trt_backend.kv.pages import PageState, PageTable
from trt_backend.kv.residency import ResidencyPolicy, ResidencyTuning
from trt_backend.kv.session import Session, SessionColumns
from trt_backend.kv.tables import SlotTables
from trt_backend.kv.transfers import Fence, PassedFence, Release

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Moved:
    """Pages moved since the start. `reclaimed` were taken for an admission, in `reclaims` sessions; `failures` are
    copies that failed."""

    backed_up: int = 0
    refilled: int = 0
    reclaimed: int = 0
    reclaims: int = 0
    promoted: int = 0
    recycled: int = 0
    failures: int = 0


@dataclass(slots=True)
class Books:
    """One per hierarchy. `reserved` has the host page of every page of every session, int32 [slots, pages], −1 where
    there is none; `latest_step` is the fence of the step that was planned last."""

    layout: KvLayout
    policy: ResidencyPolicy
    tuning: ResidencyTuning
    tables: SlotTables
    pages: PageTable
    columns: SessionColumns
    movement: Movement
    reserved: Int32
    sessions: dict[int, Session] = field(default_factory=dict)
    moved: Moved = field(default_factory=Moved)
    latest_step: Fence = field(default_factory=PassedFence)
    contended: bool = False
    """Somebody waits for memory: nothing of it is spare."""

    def spare(self) -> int:
        """Free pages that may be lent now: none of the reserve, and none at all while somebody waits."""
        return 0 if self.contended else max(0, self.pages.budget.free - self.tuning.reserve_pages)

    def back_up(self, slots: Int32, index: Int32, pages: Int32, use: Use, after: Fence) -> None:
        """Start copying pages to the host, int32 [n] each, and count them under `use` from now on."""
        if len(pages):
            self.pages.move_each(pages, PageState.BACKING_UP, use)
            self.movement.back_up(slots, index, pages, self.reserved[slots, index], after)

    def publish(self, slots: Int32, index: Int32) -> None:
        """Host copies are complete: from the next step on they may be read."""
        self.tables.host_map[slots, index] = self.reserved[slots, index]
        self.tables.changed[slots] = True

    def let_go(self, pages: Int32) -> None:
        """Pages that the tables no longer name are free once the steps that saw the old tables are done."""
        if len(pages):
            self.pages.move_each(pages, PageState.RELEASING, Use.IN_TRANSIT)
            self.movement.release(Release(pages, self.latest_step))
