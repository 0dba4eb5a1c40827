"""Prompts coming in: complete pages, and the window of a prompt that the pool could not hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.kv.books import Books
from trt_backend.kv.budget import Use
from trt_backend.kv.lending import Lending
from trt_backend.kv.pages import PageState
from trt_backend.kv.session import Session
from trt_backend.kv.transfers import Fence

Int32 = npt.NDArray[np.int32]


class Imports:
    """Of sessions that are `importing`. Their pages are required memory until the import is over."""

    def __init__(self, books: Books, lending: Lending) -> None:
        self._books = books
        self._lending = lending

    def window_room(self, session: Session) -> int:
        """Positions of a windowed import that can be written now: the page begun, free ones, and then the tail."""
        page_tokens = self._books.layout.page_tokens
        complete = session.prompt_tokens // page_tokens * page_tokens
        begun = -session.length % page_tokens
        pages = len(session.window) * page_tokens
        if session.length + begun + pages >= complete:
            return session.prompt_tokens - session.length
        return begun + pages

    def open_window(self, session: Session, count: int) -> None:
        """Give pages of the window to the next `count` positions."""
        tables, layout = self._books.tables, self._books.layout
        first = layout.pages_for(session.length)
        last = min(layout.pages_for(session.length + count), session.prompt_tokens // layout.page_tokens)
        for index in range(first, last):
            tables.ready_map[session.slot, index] = session.window.pop()
        tables.changed[session.slot] = True

    def complete(self, session: Session, first: int, end: int, step: Fence) -> None:
        """Pages of the prompt are complete. They are copied at once where they are to leave; else that can wait."""
        if first >= end:
            return
        books, slot = self._books, session.slot
        index = np.arange(first, end, dtype=np.int32)
        pages = books.tables.ready_map[slot, first:end].copy()
        books.pages.index[pages] = index
        if books.policy.uses_host and (session.need.windowed or not books.policy.lends):
            books.back_up(np.full(len(pages), slot, dtype=np.int32), index, pages, Use.REQUIRED, step)
        else:
            books.pages.move(pages, PageState.READY, Use.REQUIRED)

    def finish(self, session: Session) -> None:
        """All rows of the prompt are written."""
        if self._books.policy.uses_host:
            self._books.let_go(np.array(session.window, dtype=np.int32))
            session.window = []
            self._lending.lend(session)

    def backed_up(self, session: Session, index: Int32) -> None:
        """Pages of a windowed import have their host copies: they are filled again, further on."""
        books, slot = self._books, session.slot
        pages = books.tables.ready_map[slot, index]
        books.tables.ready_map[slot, index] = -1
        books.pages.move(pages, PageState.FILLING, Use.REQUIRED)
        session.window.extend(pages.tolist())
