"""A mixture of experts, batch-invariant like the other `blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from trt_backend.models.blocks import ROW_BLOCK, Mlp, constant, in_pieces, linear, swiglu

_ROWS = torch.arange(ROW_BLOCK).unsqueeze(1)


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
            weights.div_(weights.sum(dim=-1, keepdim=True).add_(constant(1e-20)))
        return experts, weights.mul_(constant(self.scale))


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts, and shared ones that every token takes.

    All weights are stacked, the shared experts' last: `gate_up` [experts, hidden, 2 n] and `down` [experts, n, hidden],
    as `Mlp`'s.
    """

    router: Router
    routed: int
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, router: Router, experts: Sequence[Mlp], shared: Mlp) -> MoE:
        """Stack the experts' weights. A shared one that is several times as wide is cut into several."""
        width = experts[0].down.shape[0]
        gate, up = (torch.split(half, width, dim=1) for half in shared.gate_up.chunk(2, dim=1))
        gate_up = [expert.gate_up for expert in experts] + [
            torch.cat(pair, dim=1) for pair in zip(gate, up, strict=True)
        ]
        down = [expert.down for expert in experts] + list(torch.split(shared.down, width))
        return cls(router, len(experts), torch.stack(gate_up), torch.stack(down))

    def __call__(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """[16 n, hidden] to the same; rows from `tokens` on are padding and visit no routed expert."""
        experts, weights = self.router(x)
        visit = self._visit_together if x.shape[0] == ROW_BLOCK else self._visit_grouped
        out, terms = visit(x, experts[:tokens])
        # A product of its own for every token: its sum must not depend on the batch.
        out[:tokens].unsqueeze(1).baddbmm_(weights[:tokens].unsqueeze(1), terms)
        return out

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """What the shared experts make of [16 n, hidden]."""
        return _total([Mlp(self.gate_up[e], self.down[e])(x) for e in range(self.routed, len(self.gate_up))])

    def _visit_together(self, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_visit_grouped`, for a single block of rows: all of it visits every expert that any token has chosen.

        When there are as many choices as experts, it visits all: the few that nobody chose cost less than copying the
        weights of the others.
        """
        gate_up, down, place = self.gate_up, self.down, experts
        if experts.numel() < self.routed:
            used, inverse = np.unique(experts.numpy(), return_inverse=True)
            picked = torch.from_numpy(np.concatenate([used, np.arange(self.routed, len(gate_up))]))
            gate_up, down = gate_up.index_select(0, picked), down.index_select(0, picked)
            place = torch.from_numpy(inverse.reshape(experts.shape))
        inner = torch.bmm(x.expand(len(gate_up), -1, -1), gate_up)
        done = torch.bmm(swiglu(inner.flatten(0, 1)).view(len(gate_up), ROW_BLOCK, -1), down)
        rows = torch.add(_ROWS[: len(experts)], place, alpha=ROW_BLOCK)
        terms = done.flatten(0, 1).index_select(0, rows.flatten()).view(*experts.shape, -1)
        return _total(list(done[len(done) - (len(self.gate_up) - self.routed) :])), terms

    def _visit_grouped(self, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the shared experts make of each row, and each token's own of it.

        [16 n, hidden] and int64 [T, top_k] to float32 [16 n, hidden] and [T, top_k, hidden].
        """
        chosen = experts.numpy().ravel()
        order = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=self.routed)
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
        return self.shared(x), done[torch.from_numpy(place_of)].view(*experts.shape, -1)


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, one after another: the order must not depend on the batch."""
    return reduce(torch.add, terms)
