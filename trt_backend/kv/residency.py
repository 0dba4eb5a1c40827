"""Residency policies: what of a session stays on the device, as choices over one mechanism."""

from __future__ import annotations

from dataclasses import dataclass

from trt_backend.config import ReclaimOrder, Residency
from trt_backend.kv.layout import TAIL_PAGES, KvLayout

WINDOW_CHUNKS = 2
"""A prompt that does not fit is imported through so many chunks' pages: one being computed, one being backed up."""


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """What happens to complete pages.

    Without `uses_host` they all stay on the device, and a session takes all it may ever need at admission. With it a
    session has a hot cache and room on the host, and its history may leave the device: at once when the import is
    over, or (`lends`) only when others need the room.
    """

    uses_host: bool
    lends: bool


POLICIES = {
    Residency.RESIDENT: ResidencyPolicy(uses_host=False, lends=False),
    Residency.HISPARSE: ResidencyPolicy(uses_host=True, lends=False),
    Residency.ADAPTIVE: ResidencyPolicy(uses_host=True, lends=True),
}


@dataclass(frozen=True, slots=True)
class ResidencyTuning:
    """How optional memory is lent and taken back. In pages, and pages a tick.

    Admissions may use the last `reserve_pages`, refills and promotions not. Refills leave `hysteresis_pages` more, so
    that the next small request does not take back what has just been brought. `backup_pages_per_tick` dirty pages
    are copied to the host in the background, so that taking them back is quick. With `promote_decode_pages` pages that
    decoding has filled stay on the device while there is room.
    """

    reclaim_order: ReclaimOrder = ReclaimOrder.OLDEST
    reserve_pages: int = 0
    hysteresis_pages: int = 0
    refill_pages_per_tick: int = 64
    backup_pages_per_tick: int = 4
    promote_decode_pages: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """Pages that a session takes at admission.

    `hot` and `tail` last as long as the session. `history` is what its import fills: all complete pages of the prompt
    (of the longest answer too, where nothing ever leaves the device), or, if it is `windowed`, a few that are backed
    up and filled again behind the chunk being computed. `host` and `index` are host pages and pages of index keys.
    """

    hot: int
    tail: int
    history: int
    windowed: bool
    host: int
    index: int

    @property
    def device(self) -> int:
        """All device pages."""
        return self.hot + self.tail + self.history


def need_of(
    layout: KvLayout, policy: ResidencyPolicy, prompt_tokens: int, max_length: int, device_pages: int, chunk_tokens: int
) -> Need:
    """What a session of `prompt_tokens` that may become `max_length` tokens takes, in a pool of `device_pages`.

    A prompt is windowed if the whole pool could not hold it; `chunk_tokens` of it are computed in a step at most.
    """
    total = layout.pages_for(max_length)
    if not policy.uses_host:
        return Need(hot=0, tail=0, history=total, windowed=False, host=0, index=total)
    history = prompt_tokens // layout.page_tokens
    tail = min(TAIL_PAGES, total - history)
    windowed = layout.hot_pages + tail + history > device_pages
    if windowed:
        history = min(history, WINDOW_CHUNKS * layout.pages_for(chunk_tokens))
    return Need(hot=layout.hot_pages, tail=tail, history=history, windowed=windowed, host=total, index=total)
