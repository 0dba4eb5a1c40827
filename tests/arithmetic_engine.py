"""An engine whose answers are arithmetic over the rows it finds: fast, and wrong as soon as any row is wrong."""

from __future__ import annotations

import threading

import numpy as np

from tests.serving import Int32
from trt_backend.engines.base import StepBatch, StepResult
from trt_backend.kv.layout import TAIL_PAGES, KvLayout
from trt_backend.kv.tables import SlotTables
from trt_backend.memory.arena import RowStore

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """The token that follows `tokens`."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % VOCAB


def expected(prompt: Int32, new_tokens: int) -> list[int]:
    """What the engine must answer."""
    tokens = [int(token) for token in prompt]
    for _ in range(new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ArithmeticEngine:
    """Writes each token into its row (8 bytes, int64), and reads a session's whole history back, row by row.

    `gate` holds steps back while it is not set; `fail_next` makes the next step fail.
    """

    def __init__(self, layout: KvLayout, tables: SlotTables, arenas: RowStore, pool: RowStore) -> None:
        self.layout = layout
        self.tables = tables
        self.vocab_size = VOCAB
        self.gate = threading.Event()
        self.gate.set()
        self.fail_next = False
        self.batches: list[tuple[int, int]] = []
        self._device = arenas.sources[0].view(np.int64)[:, 0]
        self._pool = pool.sources[0].view(np.int64)[:, 0]

    def open_slot(self, slot: int) -> None:
        """Nothing is kept between steps."""

    def step(self, batch: StepBatch) -> StepResult:
        assert self.gate.wait(60)
        if self.fail_next:
            self.fail_next = False
            raise ArithmeticError("asked to fail")
        self._device[batch.rows] = batch.tokens
        self.batches.append((batch.decodes, len(batch.tokens) - batch.decodes))
        logits = np.zeros((len(batch.logits_of), VOCAB), dtype=np.float32)
        for line, token in enumerate(batch.logits_of):
            history = self._history(int(batch.slots[token]), int(batch.positions[token]) + 1)
            logits[line, next_token(history)] = 1
        return StepResult(logits, np.zeros((batch.decodes, 5), dtype=np.int64))

    def _history(self, slot: int, length: int) -> list[int]:
        index, offset = np.divmod(np.arange(length), self.layout.page_tokens)
        tables = self.tables
        tail = index - tables.tail_first[slot]
        in_tail = (tail >= 0) & (tail < TAIL_PAGES)
        pages = np.where(in_tail, tables.tail_pages[slot, index % TAIL_PAGES], tables.ready_map[slot, index])
        on_host = pages < 0
        host_pages = tables.host_map[slot, index]
        assert (host_pages[on_host] >= 0).all(), "a row is nowhere"
        found = self._device[np.where(on_host, 0, pages * self.layout.page_tokens + offset)]
        if on_host.any():
            kept = self._pool[np.maximum(host_pages, 0) * self.layout.page_tokens + offset]
            found = np.where(on_host, kept, found)
        return [int(token) for token in found]
