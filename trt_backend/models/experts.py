"""A mixture of experts, batch-invariant like the other `blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trt_backend.models.blocks import ROW_BLOCK, Mlp, in_pieces, linear


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts by sigmoid(score) + bias and weighs them by sigmoid(score) alone (`noaux_tc`, one group).

    `weight` is [hidden, experts] and `bias` [experts].
    """

    weight: torch.Tensor
    bias: torch.Tensor
    top_k: int
    normalise: bool
    scale: float

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[16 n, hidden] to int64 [16 n, top_k] experts, best first and ties to the lower, and float32 weights."""
        scores = in_pieces(torch.sigmoid, linear(x, self.weight))
        experts = torch.sort(scores + self.bias, dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts, each an `Mlp`, and one that every token takes."""

    router: Router
    experts: Sequence[Mlp]
    shared: Mlp

    def __call__(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """[16 n, hidden] to the same; rows from `tokens` on are padding and visit no routed expert."""
        experts, weights = self.router(x)
        out = self.shared(x)
        visit = self._visit_together if len(x) == ROW_BLOCK else self._visit_grouped
        terms = visit(x, experts[:tokens]) * weights[:tokens].unsqueeze(-1)
        total = terms[:, 0]
        for choice in range(1, self.router.top_k):  # one after another: the order must not depend on the batch
            total = total + terms[:, choice]
        out[:tokens].add_(total)
        return out

    def _visit_together(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As `_visit_grouped`, for a single block of rows: all of it visits every expert that any token has chosen."""
        chosen = experts.numpy()
        used, place = np.unique(chosen, return_inverse=True)
        done = torch.stack([self.experts[expert](x) for expert in used.tolist()])
        return done[torch.from_numpy(place.reshape(chosen.shape)), torch.arange(len(experts)).unsqueeze(1)]

    def _visit_grouped(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What each token's experts make of it: [16 n, hidden] and int64 [T, top_k] to float32 [T, top_k, hidden]."""
        chosen = experts.numpy().ravel()
        order = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=len(self.experts))
        room = -(-counts // ROW_BLOCK) * ROW_BLOCK  # every expert's tokens fill whole blocks
        starts = np.cumsum(room) - room
        places = np.arange(len(order)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        source = np.zeros(int(room.sum()), dtype=np.int64)  # a padding row is a copy of token 0
        source[places] = order // experts.shape[1]
        place_of = np.empty_like(order)
        place_of[order] = places

        grouped = x[torch.from_numpy(source)]
        done = torch.empty_like(grouped)
        for expert in np.flatnonzero(counts).tolist():
            block = slice(starts[expert], starts[expert] + room[expert])
            done[block] = self.experts[expert](grouped[block])
        return done[torch.from_numpy(place_of)].view(*experts.shape, -1)
