"""The embedded engine: a PyTorch model over the host twin of the kernels, on any CPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from plugins import host
from trt_backend.config import RowFormat
from trt_backend.engines.base import StepBatch, StepResult
from trt_backend.kv.layout import KvLayout
from trt_backend.kv.tables import Recycled, SlotTables
from trt_backend.memory.arena import IndexKeyStore, RowStore
from trt_backend.models.indexer import TOKEN_BLOCK, index_scores, prompt_scores
from trt_backend.models.rows import KeyCodec
from trt_backend.models.state import Model

Int32 = npt.NDArray[np.int32]


PARALLEL_TOKENS = 64
"""Steps of fewer tokens run on one thread: their operations are too short to be shared. With two threads a step of 1
or 8 tokens of the tiny model took 1.3 times as long, most of it waiting. Results do not depend on it."""

SPARE_PAGES = 1.25
"""Pages of index keys are scored where they lie if that takes up to so many times as many; else they are copied
together first. For 264 pages in fp32, copying takes a quarter of the time that scoring takes."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Everything an engine reads and writes: row arenas, the host pool, index keys and the hot caches' state."""

    arenas: RowStore
    pool: RowStore
    keys: IndexKeyStore
    hot: host.HotState


class TorchEngine:
    """Runs steps on the CPU (`engines.base.Engine`). Steps are synchronous: over when `step` returns."""

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        row_format: RowFormat,
        tables: SlotTables,
        memory: DeviceMemory,
        threads: int,
    ) -> None:
        self.model = model
        self.layout = layout
        self.row_format = row_format
        self.tables = tables
        self.memory = memory
        self.threads = threads
        self.vocab_size = model.config.vocab_size
        self.arenas = [torch.from_numpy(rows) for rows in memory.arenas.sources]
        self.pool = [torch.from_numpy(rows) for rows in memory.pool.sources]
        self.keys = [torch.from_numpy(keys) for keys in memory.keys.groups]
        self.group_of = {source: g for g, group in enumerate(layout.groups) for source in group.sources}
        slots = len(tables.tail_first)
        self.plans = [host.Plan.empty(slots, group.top_k) for group in layout.groups]
        self.latest = [np.full((slots, group.top_k), -1, dtype=np.int32) for group in layout.groups]
        """By group: what the latest decoding step of each slot selected, int32 [slots, K]; −1 where there was none."""
        self.resolver_tables = [
            host.ResolverTables(
                tables.ready_map,
                tables.host_map,
                tables.tail_first,
                tables.tail_pages,
                tables.hot_pages,
                layout.page_tokens // group.ratio,
            )
            for group in layout.groups
        ]

    def open_slot(self, slot: int) -> None:
        """Forget the hot cache of a slot that is about to have a new owner, and what the old one selected."""
        self.memory.hot.clear(slot)
        for selected in self.latest:
            selected[slot] = -1

    def step(self, batch: StepBatch) -> StepResult:
        """Run one step; see `engines.base`.

        Raises:
            RuntimeError: a prompt chunk selected rows that are nowhere.
        """
        if batch.recycled:
            self._adopt(batch.recycled)
        torch.set_num_threads(self.threads if len(batch.tokens) >= PARALLEL_TOKENS else 1)
        state = StepState(self, batch)
        with torch.inference_mode():
            logits = self.model.forward(
                torch.from_numpy(batch.tokens.astype(np.int64)),
                torch.from_numpy(batch.positions.astype(np.int64)),
                state,
                torch.from_numpy(batch.logits_of.astype(np.int64)),
            )
        return StepResult(logits.numpy(), state.counts)

    def _adopt(self, recycled: tuple[Recycled, ...]) -> None:
        """Take what the latest resolves selected of recycled pages into the hot caches, before it is overwritten."""
        slots = np.array([one.slot for one in recycled], dtype=np.int32)
        index = np.array([one.index for one in recycled], dtype=np.int32)
        pages = np.array([one.page for one in recycled], dtype=np.int32)
        for g, group in enumerate(self.layout.groups):
            tables = self.resolver_tables[g]
            plan = host.Adoption.empty(len(recycled), tables.page_rows)
            host.adopt(tables, self.memory.hot, g, self.latest[g], slots, index, pages, plan)
            for source in group.sources:
                host.copy_rows(self.memory.arenas.sources[source], plan)


class Chunk(NamedTuple):
    """Tokens `first` to `end` of a step: consecutive positions of a prompt, which stand in the first `pages` pages."""

    first: int
    end: int
    slot: int
    pages: int


class DecodePages(NamedTuple):
    """The pages of index keys that a step's decoding tokens score, in the order of the store or of the tokens.

    `pages` are page ids, a slice of the store or int32 [n]; `owner`, int64 [n], says which token scores which of them;
    `places`, int64 [decodes, most pages of a token], where among the n a token's pages are, in order of position.
    """

    pages: slice | torch.Tensor
    owner: torch.Tensor
    places: torch.Tensor


class StepState:
    """Keeps the rows of one step for the model (`models.state.KvState`): writes, selects, resolves, fetches, reads."""

    def __init__(self, engine: TorchEngine, batch: StepBatch) -> None:
        self._engine = engine
        self._batch = batch
        self._chunks = _chunks(batch, engine.layout.page_tokens)
        self._decode_pages = _decode_pages(batch, engine.tables.index_map, engine.layout.page_tokens)
        self._locations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._remote: dict[int, torch.Tensor] = {}
        """By group: host rows of what prompts selected and the device does not hold, int64 [T, K]."""
        self.counts = np.zeros((batch.decodes, len(host.Counts._fields)), dtype=np.int64)

    def write_rows(self, source: int, rows: torch.Tensor) -> None:
        """See `KvState`."""
        self._engine.memory.arenas.sources[source][self._batch.rows] = rows.numpy()

    def write_index_keys(self, group: int, keys: torch.Tensor) -> None:
        """See `KvState`."""
        self._engine.memory.keys.groups[group][self._batch.index_rows] = keys.numpy()

    def select(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """See `KvState`. Chooses each token's rows and finds or fetches them."""
        batch, engine, decodes = self._batch, self._engine, self._batch.decodes
        k = engine.layout.groups[group].top_k
        ratio = engine.layout.groups[group].ratio
        visible = (batch.positions + 1) // ratio
        selected = np.empty((len(batch.tokens), k), dtype=np.int32)
        if decodes:
            scores = self._decode_scores(group, queries[:decodes], weights[:decodes])
            host.topk(scores.numpy(), visible[:decodes], k, out=selected[:decodes])
        for chunk in self._chunks:
            span = slice(chunk.first, chunk.end)
            pages = torch.from_numpy(engine.tables.index_map[chunk.slot, : chunk.pages])
            keys = self._key_pages(group, pages, queries.shape[-1])
            scores = prompt_scores(queries[span], weights[span], keys)
            host.topk(scores.numpy(), visible[span], k, out=selected[span])
        locations = torch.from_numpy(self._resolve(group, selected))
        found = locations >= 0
        if group in self._remote:
            found |= self._remote[group] >= 0
        self._locations[group] = locations.clamp_min(0), found

    def read_rows(self, source: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvState`. Rows that the group's resolve missed are fetched from the host first, source by source."""
        engine = self._engine
        group = engine.group_of[source]
        if self._batch.decodes and tokens.start == 0:
            memory = engine.memory
            host.fetch_rows(memory.pool.sources[source], memory.arenas.sources[source], engine.plans[group])
        locations, valid = self._locations[group]
        rows = engine.arenas[source].index_select(0, locations[tokens].flatten())
        if group in self._remote:
            remote = self._remote[group][tokens].flatten()
            (missing,) = torch.nonzero(remote >= 0, as_tuple=True)
            rows[missing] = engine.pool[source].index_select(0, remote[missing])
        return rows.view(-1, locations.shape[1], rows.shape[1]), valid[tokens]

    def _resolve(self, group: int, selected: Int32) -> Int32:
        """Locations, int32 [T, K], of selected positions: decoding tokens through the hot cache, prompts directly."""
        batch, engine, decodes = self._batch, self._engine, self._batch.decodes
        tables = engine.resolver_tables[group]
        locations = np.empty_like(selected)
        if decodes:
            plan = host.resolve(
                tables, engine.memory.hot, group, selected[:decodes], batch.slots[:decodes], engine.plans[group]
            )
            engine.latest[group][batch.slots[:decodes]] = selected[:decodes]
            locations[:decodes] = plan.locations[:decodes]
            self.counts += plan.counts[:decodes]
        if decodes < len(selected):
            masked = host.locate(tables, selected[decodes:], batch.slots[decodes:], locations[decodes:])
            if masked:
                self._remote[group] = torch.from_numpy(self._host_rows(group, selected, locations))
        return locations

    def _host_rows(self, group: int, selected: Int32, locations: Int32) -> npt.NDArray[np.int64]:
        """Host rows, int64 [T, K], of what prompts selected and the device does not hold; −1 elsewhere.

        Of a prompt that the pool can't hold, what is behind the window is on the host: each layer reads it from there,
        a few tokens' rows at a time.
        """
        tables, decodes = self._engine.resolver_tables[group], self._batch.decodes
        missing = (locations < 0) & (selected >= 0)
        missing[:decodes] = False
        token, _ = np.nonzero(missing)
        page, offset = np.divmod(selected[missing], tables.page_rows)
        host_pages = tables.host_map[self._batch.slots[token], page]
        if (host_pages < 0).any():
            raise RuntimeError(f"{(host_pages < 0).sum()} selected rows of prompts are nowhere (group {group})")
        rows = np.full(selected.shape, -1, dtype=np.int64)
        rows[missing] = host_pages.astype(np.int64) * tables.page_rows + offset
        return rows

    def _decode_scores(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [decodes, keys of the longest session]; beyond a session's own keys it is undefined."""
        pages, owner, places = self._decode_pages
        keys = self._key_pages(group, pages, queries.shape[-1])
        # A token fills its block alone: what stands in the other rows changes nothing in the first.
        blocks = torch.stack([queries] * TOKEN_BLOCK, dim=1), torch.stack([weights] * TOKEN_BLOCK, dim=1)
        scored = index_scores(*blocks, keys, owner)
        own = scored.view(-1, keys.shape[1]).index_select(0, (places * TOKEN_BLOCK).flatten())
        return own.view(len(queries), -1)

    def _key_pages(self, group: int, pages: slice | torch.Tensor, dim: int) -> torch.Tensor:
        """Index keys of some pages: float32 [pages, keys of a page, dim]."""
        engine = self._engine
        page_keys, key_bytes = engine.resolver_tables[group].page_rows, engine.keys[group].shape[1]
        store = engine.keys[group].view(-1, page_keys * key_bytes)
        # index_select copies a page at a time, where indexing would copy byte by byte.
        stored = store[pages] if isinstance(pages, slice) else store.index_select(0, pages)
        return KeyCodec(engine.row_format, dim).decode(stored.view(-1, page_keys, key_bytes))


def _chunks(batch: StepBatch, page_tokens: int) -> list[Chunk]:
    """The prompt chunks of a batch, cut where the session changes."""
    first, slots = batch.decodes, batch.slots
    edges = [first, *(np.flatnonzero(np.diff(slots[first:])) + first + 1).tolist(), len(slots)]
    return [
        Chunk(a, b, int(slots[a]), int(batch.positions[b - 1]) // page_tokens + 1) for a, b in pairwise(edges) if b > a
    ]


def _decode_pages(batch: StepBatch, index_map: Int32, page_tokens: int) -> DecodePages:
    """The index pages of a batch's decoding tokens: read where they are, unless that takes in too many others."""
    counts = batch.positions[: batch.decodes] // page_tokens + 1
    number = np.arange(counts.max(initial=0))
    own = number < counts[:, np.newaxis]
    named = index_map[batch.slots[: batch.decodes], : len(number)]
    pages = named[own]
    owner = np.repeat(np.arange(batch.decodes), counts)
    first, end = int(pages.min(initial=0)), int(pages.max(initial=-1)) + 1
    if end - first > len(pages) * SPARE_PAGES:
        places = np.where(own, np.cumsum(own).reshape(own.shape) - 1, 0)
        return DecodePages(torch.from_numpy(pages), torch.from_numpy(owner), torch.from_numpy(places))
    owners = np.zeros(end - first, dtype=np.int64)
    owners[pages - first] = owner
    places = np.where(own, named - first, 0)
    return DecodePages(slice(first, end), torch.from_numpy(owners), torch.from_numpy(places.astype(np.int64)))
