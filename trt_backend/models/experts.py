"""A mixture of experts, batch-invariant like the other `blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trt_backend.models.blocks import ROW_BLOCK, Mlp, in_pieces, linear, swiglu


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
    """Routed experts and one that every token takes.

    The routed ones' weights are stacked: `gate_up` [experts, hidden, 2 n] and `down` [experts, n, hidden], as `Mlp`'s.
    """

    router: Router
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp

    @classmethod
    def of(cls, router: Router, experts: Sequence[Mlp], shared: Mlp) -> MoE:
        """Stack the experts' weights."""
        gate_up = torch.stack([expert.gate_up for expert in experts])
        return cls(router, gate_up, torch.stack([expert.down for expert in experts]), shared)

    def __call__(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """[16 n, hidden] to the same; rows from `tokens` on are padding and visit no routed expert."""
        experts, weights = self.router(x)
        out = self.shared(x)
        visit = self._visit_together if x.shape[0] == ROW_BLOCK else self._visit_grouped
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
        gate_up, down = self.gate_up, self.down
        if len(used) < gate_up.shape[0]:
            picked = torch.from_numpy(used)
            gate_up, down = gate_up.index_select(0, picked), down.index_select(0, picked)
        inner = torch.bmm(x.expand(len(used), -1, -1), gate_up)
        done = torch.bmm(swiglu(inner.flatten(0, 1)).view(len(used), ROW_BLOCK, -1), down)
        return done[torch.from_numpy(place.reshape(chosen.shape)), torch.arange(len(chosen)).unsqueeze(1)]

    def _visit_grouped(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What each token's experts make of it: [16 n, hidden] and int64 [T, top_k] to float32 [T, top_k, hidden]."""
        chosen = experts.numpy().ravel()
        order = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=self.gate_up.shape[0])
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
            done[block] = Mlp(self.gate_up[expert], self.down[expert])(grouped[block])
        return done[torch.from_numpy(place_of)].view(*experts.shape, -1)
