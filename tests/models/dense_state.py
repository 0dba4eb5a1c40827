"""The simplest keeper of rows: one session, plain tensors, exact top-k. The reference that models are compared with."""

from __future__ import annotations

import torch

from trt_backend.kv.layout import KvLayout
from trt_backend.models.indexer import prompt_scores
from trt_backend.models.rows import KeyCodec

KEY_BLOCK = 64


class DenseState:
    """A `KvState` of one session whose tokens come in order.

    A selection lists positions in ascending order; ties go to the lower position. `selections[group]` is int64
    [tokens, K] of everything selected so far, -1 beyond a short selection, and `scores[group]` the scores that led to
    it. `forced[group]`, when given, replaces what would be selected: bool [tokens, positions].
    """

    def __init__(
        self, layout: KvLayout, codec: KeyCodec, capacity: int, forced: dict[int, torch.Tensor] | None = None
    ) -> None:
        """Room for `capacity` tokens."""
        self._layout = layout
        self._codec = codec
        room = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self._rows = [torch.zeros(room, source.row_bytes, dtype=torch.uint8) for source in layout.sources]
        self._keys = [torch.zeros(room, group.key_bytes, dtype=torch.uint8) for group in layout.groups]
        self._forced = forced or {}
        self._group_of = {source: number for number, group in enumerate(layout.groups) for source in group.sources}
        self.length = 0
        self._tokens = 0
        self.selections = [torch.empty(0, group.top_k, dtype=torch.int64) for group in layout.groups]
        self.scores: list[list[torch.Tensor]] = [[] for _ in layout.groups]

    def begin(self, tokens: int) -> torch.Tensor:
        """Start a step of `tokens` more tokens; their positions, int64 [tokens]."""
        self.length += self._tokens
        self._tokens = tokens
        return torch.arange(self.length, self.length + tokens)

    def write_rows(self, source: int, rows: torch.Tensor) -> None:
        """See `KvState`."""
        self._rows[source][self.length : self.length + self._tokens] = rows

    def write_index_keys(self, group: int, keys: torch.Tensor) -> None:
        """See `KvState`."""
        self._keys[group][self.length : self.length + self._tokens] = keys

    def select(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """See `KvState`."""
        end = self.length + self._tokens
        blocks = -(-end // KEY_BLOCK)
        keys = self._codec.decode(self._keys[group][: blocks * KEY_BLOCK]).view(blocks, KEY_BLOCK, -1)
        scores = prompt_scores(queries, weights, keys)
        visible = torch.arange(blocks * KEY_BLOCK) <= torch.arange(self.length, end).unsqueeze(1)
        scores = torch.where(visible, scores, -torch.inf)
        self.scores[group].append(scores)
        if group in self._forced:
            chosen = torch.zeros_like(visible)
            chosen[:, :end] = self._forced[group][self.length : end, :end]
            chosen &= visible
        else:
            chosen = _top_k(scores, self._layout.groups[group].top_k) & visible
        self.selections[group] = torch.cat(
            [self.selections[group], _ascending(chosen, self._layout.groups[group].top_k)]
        )

    def read_rows(self, source: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvState`."""
        chosen = self.selections[self._group_of[source]][self.length :][tokens]
        rows = self._rows[source].index_select(0, chosen.clamp(min=0).flatten())
        return rows.view(*chosen.shape, -1), chosen >= 0


def _top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """bool [T, positions]: the `top_k` best of each line, the lower position first among equals."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def _ascending(chosen: torch.Tensor, top_k: int) -> torch.Tensor:
    """bool [T, positions] to int64 [T, top_k] positions, -1 beyond the last."""
    positions = torch.where(chosen, torch.arange(chosen.shape[1]), chosen.shape[1])
    first = torch.sort(positions, dim=-1).values[:, :top_k]
    out = torch.full((len(chosen), top_k), -1, dtype=torch.int64)
    out[:, : first.shape[1]] = torch.where(first < chosen.shape[1], first, -1)
    return out
