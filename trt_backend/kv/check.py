"""The invariants of the memory model that hold between any two calls, as assertions. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trt_backend.kv.budget import Use
from trt_backend.kv.layout import TAIL_PAGES
from trt_backend.kv.pages import PageState

if TYPE_CHECKING:
    from trt_backend.kv.hierarchy import Hierarchy


def check(hierarchy: Hierarchy) -> None:
    """Assert that the books are true: budget, owners, tables, host pages, columns."""
    hierarchy.pages.check()
    _check_owners(hierarchy)
    _check_host(hierarchy)
    for slot, session in hierarchy.sessions.items():
        assert session.slot == slot
        if hierarchy.columns.active[slot]:
            _check_session(hierarchy, slot)


def _check_owners(hierarchy: Hierarchy) -> None:
    """A page has one owner, and a table names only pages of its slot."""
    tables, pages = hierarchy.tables, hierarchy.pages
    named = []
    for table in (tables.ready_map, tables.tail_pages, tables.hot_pages):
        slots, _ = np.nonzero(table >= 0)
        listed = table[table >= 0]
        assert (pages.owner[listed] == slots).all(), "a table names a page of another slot, or on its way back"
        named.append(listed)
    together = np.concatenate(named)
    assert len(np.unique(together)) == len(together), "a page is named twice"


def _check_host(hierarchy: Hierarchy) -> None:
    """Host pages are reserved for the longest a session may become, each for one."""
    held = [session.host_pages for session in hierarchy.sessions.values()]
    together = np.concatenate([np.empty(0, dtype=np.int32), *held])
    assert len(np.unique(together)) == len(together), "a host page is reserved twice"
    published = hierarchy.tables.host_map >= 0
    assert (hierarchy.tables.host_map[published] == hierarchy.books.reserved[published]).all()


def _check_session(hierarchy: Hierarchy, slot: int) -> None:
    tables, pages, columns = hierarchy.tables, hierarchy.pages, hierarchy.columns
    index = np.arange(columns.length[slot] // hierarchy.layout.page_tokens, dtype=np.int32)
    tail = index - tables.tail_first[slot]
    readable = (
        (tables.ready_map[slot, index] >= 0)
        | (tables.host_map[slot, index] >= 0)
        | ((tail >= 0) & (tail < TAIL_PAGES) & (tables.tail_pages[slot, index % TAIL_PAGES] >= 0))
    )
    assert readable.all(), f"slot {slot}: pages {index[~readable].tolist()} are nowhere"
    mapped = np.flatnonzero(tables.ready_map[slot] >= 0)
    on_device = tables.ready_map[slot, mapped]
    complete = mapped < len(index)
    assert (pages.index[on_device[complete]] == mapped[complete]).all(), "a page says it is another"
    owned = pages.owned_by(slot)
    optional = owned[pages.use[owned] == Use.OPTIONAL]
    states = pages.state[optional]
    assert columns.refilling[slot] == (states == PageState.REFILLING).sum() == hierarchy.lending._coming[slot].sum()
    assert columns.optional[slot] == len(optional) - columns.refilling[slot] == hierarchy.lending._lent[slot].sum()
    assert columns.dirty[slot] == (states == PageState.READY).sum()
    clean = on_device[pages.state[on_device] == PageState.CLEAN]
    assert (tables.host_map[slot, pages.index[clean]] >= 0).all(), "a clean page has no host copy"
