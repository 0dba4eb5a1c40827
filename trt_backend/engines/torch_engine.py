"""The embedded engine: a PyTorch model over the host twin of the kernels, on any CPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from plugins import host
from trt_backend.config import RowFormat
from trt_backend.engines.base import StepBatch, StepResult
from trt_backend.kv.layout import KvLayout
from trt_backend.kv.tables import SlotTables
from trt_backend.memory.arena import IndexKeyStore, RowStore
from trt_backend.models.indexer import TOKEN_BLOCK, index_scores, prompt_scores
from trt_backend.models.rows import KeyCodec
from trt_backend.models.state import Model

Int32 = npt.NDArray[np.int32]


PARALLEL_TOKENS = 64
"""Steps of fewer tokens run on one thread: their operations are too short to be shared. With two threads a step of 1
or 8 tokens of the tiny model took 1.3 times as long, most of it waiting. Results do not depend on it."""


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
        self.keys = [torch.from_numpy(keys) for keys in memory.keys.groups]
        self.group_of = {source: g for g, group in enumerate(layout.groups) for source in group.sources}
        slots = len(tables.tail_first)
        self.plans = [host.Plan.empty(slots, group.top_k) for group in layout.groups]
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
        """Forget the hot cache of a slot that is about to have a new owner."""
        self.memory.hot.clear(slot)

    def step(self, batch: StepBatch) -> StepResult:
        """Run one step; see `engines.base`.

        Raises:
            RuntimeError: a prompt chunk selected rows that are not on the device.
        """
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


class Chunk(NamedTuple):
    """Tokens `first` to `end` of a step: consecutive positions of a prompt, which stand in the first `pages` pages."""

    first: int
    end: int
    slot: int
    pages: int


class StepState:
    """Keeps the rows of one step for the model (`models.state.KvState`): writes, selects, resolves, fetches, reads."""

    def __init__(self, engine: TorchEngine, batch: StepBatch) -> None:
        self._engine = engine
        self._batch = batch
        self._rows = torch.from_numpy(batch.rows.astype(np.int64))
        self._index_rows = torch.from_numpy(batch.index_rows.astype(np.int64))
        self._chunks = _chunks(batch, engine.layout.page_tokens)
        self._locations: dict[int, torch.Tensor] = {}
        self.counts = np.zeros((batch.decodes, len(host.Counts._fields)), dtype=np.int64)

    def write_rows(self, source: int, rows: torch.Tensor) -> None:
        """See `KvState`."""
        self._engine.arenas[source].index_copy_(0, self._rows, rows)

    def write_index_keys(self, group: int, keys: torch.Tensor) -> None:
        """See `KvState`."""
        self._engine.keys[group].index_copy_(0, self._index_rows, keys)

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
            keys = self._key_pages(group, engine.tables.index_map[chunk.slot, : chunk.pages], queries.shape[-1])
            scores = prompt_scores(queries[span], weights[span], keys)
            host.topk(scores.numpy(), visible[span], k, out=selected[span])
        self._locations[group] = torch.from_numpy(self._resolve(group, selected))

    def read_rows(self, source: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvState`. Rows that the group's resolve missed are fetched from the host first, source by source."""
        engine = self._engine
        group = engine.group_of[source]
        if self._batch.decodes and tokens.start == 0:
            memory = engine.memory
            host.fetch_rows(memory.pool.sources[source], memory.arenas.sources[source], engine.plans[group])
        locations = self._locations[group][tokens]
        arena = engine.arenas[source]
        rows = arena.index_select(0, locations.clamp_min(0).flatten())
        return rows.view(*locations.shape, -1), locations >= 0

    def _resolve(self, group: int, selected: Int32) -> Int32:
        """Locations, int32 [T, K], of selected positions: decoding tokens through the hot cache, prompts directly."""
        batch, engine, decodes = self._batch, self._engine, self._batch.decodes
        tables = engine.resolver_tables[group]
        locations = np.empty_like(selected)
        if decodes:
            plan = host.resolve(
                tables, engine.memory.hot, group, selected[:decodes], batch.slots[:decodes], engine.plans[group]
            )
            locations[:decodes] = plan.locations[:decodes]
            self.counts += plan.counts[:decodes]
        if decodes < len(selected):
            masked = host.locate(tables, selected[decodes:], batch.slots[decodes:], locations[decodes:])
            if masked:
                raise RuntimeError(f"{masked} selected rows of prompts are not on the device (group {group})")
        return locations

    def _decode_scores(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [decodes, keys of the longest session]; beyond a session's own keys it is undefined."""
        engine, page_tokens = self._engine, self._engine.layout.page_tokens
        slots = self._batch.slots[: len(queries)]
        pages = self._batch.positions[: len(queries)] // page_tokens + 1
        owner = torch.from_numpy(np.repeat(np.arange(len(pages)), pages))
        number = np.concatenate([np.arange(count) for count in pages])
        keys = self._key_pages(group, engine.tables.index_map[slots[owner.numpy()], number], queries.shape[-1])
        lone_queries = pad(queries.unsqueeze(1), (0, 0, 0, 0, 0, TOKEN_BLOCK - 1))  # each token alone in its block
        lone_weights = pad(weights.unsqueeze(1), (0, 0, 0, TOKEN_BLOCK - 1))
        scored = index_scores(lone_queries.index_select(0, owner), lone_weights.index_select(0, owner), keys)
        scores = torch.empty(len(queries), int(pages.max()), keys.shape[1])
        scores[owner, torch.from_numpy(number)] = scored[:, 0]
        return scores.flatten(1)

    def _key_pages(self, group: int, pages: Int32, dim: int) -> torch.Tensor:
        """Index keys of some pages: float32 [pages, keys of a page, dim]."""
        engine = self._engine
        page_keys, key_bytes = engine.resolver_tables[group].page_rows, engine.keys[group].shape[1]
        # index_select copies a page at a time, where indexing would copy byte by byte.
        stored = engine.keys[group].view(-1, page_keys * key_bytes).index_select(0, torch.from_numpy(pages))
        return KeyCodec(engine.row_format, dim).decode(stored.view(-1, page_keys, key_bytes))


def _chunks(batch: StepBatch, page_tokens: int) -> list[Chunk]:
    """The prompt chunks of a batch, cut where the session changes."""
    first, slots = batch.decodes, batch.slots
    edges = [first, *(np.flatnonzero(np.diff(slots[first:])) + first + 1).tolist(), len(slots)]
    return [
        Chunk(a, b, int(slots[a]), int(batch.positions[b - 1]) // page_tokens + 1) for a, b in pairwise(edges) if b > a
    ]
