"""The slot tables: what the control plane tells an engine about where every session's rows are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.kv.layout import TAIL_PAGES, KvLayout

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Device tables in their host form, one line a slot; −1 means "none" everywhere. All int32.

    The scheduler thread writes them between steps, an engine reads them during a step (and, where the device has
    its own memory, uploads the lines that `changed`, bool [slots], names).

    | table | shape | value |
    |---|---|---|
    | `ready_map` | [slots, pages] | device page of a complete, readable page of history |
    | `host_map` | [slots, pages] | host page of the same, once its bytes have landed |
    | `tail_first` | [slots] | page index of the oldest tail page |
    | `tail_pages` | [slots, 3] | device page of tail page index i at column i % 3 |
    | `hot_pages` | [slots, hot pages] | device pages of the hot cache |
    | `index_map` | [slots, pages] | page of index keys |
    """

    ready_map: Int32
    host_map: Int32
    tail_first: Int32
    tail_pages: Int32
    hot_pages: Int32
    index_map: Int32
    changed: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, layout: KvLayout, slots: int, max_tokens: int) -> SlotTables:
        """Tables of `slots` free slots for sessions of at most `max_tokens` tokens."""
        pages = layout.pages_for(max_tokens)

        def table(*shape: int) -> Int32:
            return np.full(shape, -1, dtype=np.int32)

        return cls(
            ready_map=table(slots, pages),
            host_map=table(slots, pages),
            tail_first=table(slots),
            tail_pages=table(slots, TAIL_PAGES),
            hot_pages=table(slots, layout.hot_pages),
            index_map=table(slots, pages),
            changed=np.zeros(slots, dtype=np.bool_),
        )

    def clear(self, slot: int) -> None:
        """Forget everything about a slot, before it has a new owner."""
        for table in (self.ready_map, self.host_map, self.tail_first, self.tail_pages, self.hot_pages, self.index_map):
            table[slot] = -1
        self.changed[slot] = True


@dataclass(frozen=True, slots=True)
class Recycled:
    """A sealed page that has left its tail to be filled again: until the session's next step, device page `page` still
    holds page `index` of the session in `slot`."""

    slot: int
    index: int
    page: int
