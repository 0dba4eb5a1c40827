"""Sizes of everything a session holds. Nothing else in the code multiplies row sizes."""

from __future__ import annotations

from dataclasses import dataclass

TAIL_PAGES = 3
"""The newest pages of a session: one filling, one for the overflow of a block, one sealed and in backup."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """One physical stream of KV rows.

    `row_bytes` is the size of one row; a row stands for `ratio` consecutive tokens.
    """

    name: str
    row_bytes: int
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class IndexGroup:
    """Consecutive attention layers that use one top-k selection.

    `sources` are indices into `KvLayout.sources`, the leader's first. `top_k` is K. One index key of `key_bytes`
    is kept on the device for every `ratio` tokens, however the rows themselves reside.
    """

    sources: tuple[int, ...]
    top_k: int
    key_bytes: int
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What one session of a model costs, in bytes and pages.

    A page is `page_tokens` consecutive positions of one session in all sources at once. `hot_tokens` is B, the room
    of the hot cache in tokens; 0 means that the deployment has no hot cache.

    Raises:
        ValueError: a size is not positive, `hot_tokens` is not a whole number of pages, or a hot cache is smaller
            than the largest K.
    """

    sources: tuple[KvSource, ...]
    groups: tuple[IndexGroup, ...]
    page_tokens: int
    hot_tokens: int

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or any(self.page_tokens % source.ratio for source in self.sources):
            raise ValueError(f"page_tokens={self.page_tokens} must be a positive multiple of every source's ratio")
        if self.hot_tokens % self.page_tokens:
            raise ValueError(
                f"hot_tokens={self.hot_tokens} is not a multiple of page_tokens={self.page_tokens}; "
                f"nearest legal values: {self.hot_tokens // self.page_tokens * self.page_tokens} and "
                f"{self.pages_for(self.hot_tokens) * self.page_tokens}"
            )
        needed = max(group.top_k * group.ratio for group in self.groups)
        if 0 < self.hot_tokens < needed:
            raise ValueError(
                f"hot_tokens={self.hot_tokens} is smaller than the largest top-k, {needed} tokens; "
                f"legal range: {needed} and up (0 in resident mode)"
            )

    @property
    def top_k(self) -> int:
        """K: the largest selection of any group, in rows."""
        return max(group.top_k for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """One page over all sources."""
        return sum(source.row_bytes * (self.page_tokens // source.ratio) for source in self.sources)

    @property
    def hot_pages(self) -> int:
        """Pages of one session's hot cache."""
        return self.hot_tokens // self.page_tokens

    @property
    def hot_bytes(self) -> int:
        """One session's hot cache over all sources."""
        return self.hot_pages * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def page_rows(self, source: int) -> int:
        """Rows of one page in one source."""
        return self.page_tokens // self.sources[source].ratio

    def history_bytes(self, tokens: int) -> int:
        """All rows of `tokens` positions over all sources."""
        return sum(source.row_bytes * (tokens // source.ratio) for source in self.sources)

    def index_key_bytes(self, tokens: int) -> int:
        """All index keys of `tokens` positions: always on the device."""
        return sum(group.key_bytes * (tokens // group.ratio) for group in self.groups)
