"""Residency policies: what of a session stays on the device, as choices over one mechanism."""

from __future__ import annotations

from dataclasses import dataclass

from trt_backend.config import Residency
from trt_backend.kv.layout import TAIL_PAGES, KvLayout


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """What happens to complete pages.

    `keeps_history`: imported and sealed pages stay on the device, and no hot cache or host copy is needed.
    Otherwise they are backed up as they complete; history leaves the device when the import is over, sealed pages
    as soon as their copy has landed.
    """

    keeps_history: bool

    @property
    def uses_host(self) -> bool:
        """Whether sessions need host pages and a hot cache."""
        return not self.keeps_history


POLICIES = {
    Residency.RESIDENT: ResidencyPolicy(keeps_history=True),
    Residency.HISPARSE: ResidencyPolicy(keeps_history=False),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Pages that a session takes at admission.

    `hot`, `tail` and `growth` last as long as the session; `history` is what its import fills. `growth` are the pages
    that decoding will fill beyond the tail where history stays on the device: taken now, so that a running session
    never has to wait for memory. `host` and `index` count host pages and pages of index keys.
    """

    hot: int
    tail: int
    history: int
    growth: int
    host: int
    index: int

    @property
    def device(self) -> int:
        """All device pages."""
        return self.hot + self.tail + self.history + self.growth


def need_of(layout: KvLayout, policy: ResidencyPolicy, prompt_tokens: int, max_length: int) -> Need:
    """What a session of `prompt_tokens` that may become `max_length` tokens takes under a policy."""
    total = layout.pages_for(max_length)
    history = prompt_tokens // layout.page_tokens
    tail = min(TAIL_PAGES, total - history)
    return Need(
        hot=layout.hot_pages if policy.uses_host else 0,
        tail=tail,
        history=history,
        growth=total - history - tail if policy.keeps_history else 0,
        host=total if policy.uses_host else 0,
        index=total,
    )
