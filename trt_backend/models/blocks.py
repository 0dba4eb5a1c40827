"""Building blocks whose result for a token is the same, bit for bit, whoever else is in the step.

Matrix libraries choose a kernel by the number of rows, and kernels add up in different orders. So every product here
is made of products of one fixed shape: 16 rows at a time. Element-wise functions are run in pieces that torch neither
splits among threads nor ends on a scalar remainder, for its vector and scalar exponentials differ in the last bit.
Lists of tokens are padded with zero rows to a multiple of 16.

Measured with torch 2.13 and MKL (AVX2, EPYC 7003, 1 and 2 threads) over 17 shapes from [17, 33] to [256, 6144] and row
counts from 16 to 512: a plain product of all rows, a batched product of blocks and a loop over blocks gave equal bits
for every row at every place. At 16 rows the plain product costs 5 to 15 us less than the batched one; at 512 rows it
is 1.1 to 1.6 times as fast for sizes up to 768 and about twice as fast beyond. A product of fewer than 4 rows, or with
a single output, gave other bits. The batched product is used because its shape is fixed by construction; one block
alone takes the plain product, which has that very shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

ROW_BLOCK = 16
"""Rows of every matrix product."""

_PIECE = 32768
"""Elements up to which torch runs an element-wise function on one thread (at::internal::GRAIN_SIZE)."""


def padded(tokens: int) -> int:
    """The next multiple of 16."""
    return -(-tokens // ROW_BLOCK) * ROW_BLOCK


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """[T, ...] with zero rows added up to a multiple of 16."""
    missing = padded(len(x)) - len(x)
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight in blocks of 16 rows: [16 n, in] and [in, out] to [16 n, out].

    Weights stand input first, the transpose of a checkpoint's: read from memory they are a fifth faster so. There must
    be at least 2 outputs, for one would be dispatched as a matrix-vector product.
    """
    blocks = len(x) // ROW_BLOCK
    if blocks == 1:
        return torch.mm(x, weight)
    return torch.bmm(x.reshape(blocks, ROW_BLOCK, -1), weight.expand(blocks, -1, -1)).view(len(x), -1)


def linear_per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's own product: [16 n, heads, in] and [heads, in, out] to [16 n, heads, out]."""
    rows, heads, _ = x.shape
    blocks = rows // ROW_BLOCK
    if blocks == 1:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    out = x.new_empty(heads, blocks, ROW_BLOCK, weight.shape[-1])
    for head in range(heads):
        torch.bmm(x[:, head].view(blocks, ROW_BLOCK, -1), weight[head].expand(blocks, -1, -1), out=out[head])
    return out.view(heads, rows, -1).transpose(0, 1)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An element-wise function of [T, n], a few rows at a time."""
    rows = max(1, _PIECE // x.shape[-1])
    rows = rows // 8 * 8 or rows
    if len(x) <= rows:
        return function(x)
    return torch.cat([function(piece) for piece in torch.split(x, rows)])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions over interleaved pairs of channels (0, 1), (2, 3), ...

    Rotated vectors come out as all first members of the pairs, then all second ones. Both sides of every product are
    rotated by this class, so their order does not matter to it.
    """

    frequencies: torch.Tensor

    @classmethod
    def of(cls, theta: float, channels: int) -> Rotary:
        """Frequencies theta^(-2i/channels), in float32 as the reference implementation computes them."""
        return cls(1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)))

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [T, 1, channels / 2], of int64 [T] positions."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies
        return in_pieces(torch.cos, angles).unsqueeze(1), in_pieces(torch.sin, angles).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate float32 [T, heads, channels] by tables of [T, 1, channels / 2]."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 n], gate first, to [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return in_pieces(F.silu, gate).mul_(up)


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)): `gate_up` [hidden, 2 n], gate first; `down` [n, hidden]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[16 n, hidden] to the same."""
        return linear(swiglu(linear(x, self.gate_up)), self.down)


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
        out[:tokens] += self._routed(x, experts[:tokens], weights[:tokens])
        return out

    def _routed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum over a token's experts, in its own order, of weight * expert(x)."""
        tokens, top_k = experts.shape
        chosen = experts.numpy().ravel()
        order = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=len(self.experts))
        room = -(-counts // ROW_BLOCK) * ROW_BLOCK  # every expert's tokens fill whole blocks
        starts = np.cumsum(room) - room
        places = np.arange(len(order)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        source = np.zeros(int(room.sum()), dtype=np.int64)  # a padding row is a copy of token 0
        source[places] = order // top_k
        place_of = np.empty_like(order)
        place_of[order] = places

        grouped = x[torch.from_numpy(source)]
        done = torch.empty_like(grouped)
        for expert in np.flatnonzero(counts).tolist():
            block = slice(starts[expert], starts[expert] + room[expert])
            done[block] = self.experts[expert](grouped[block])
        terms = done[torch.from_numpy(place_of)].view(tokens, top_k, -1) * weights.unsqueeze(-1)
        total = terms[:, 0]
        for choice in range(1, top_k):
            total = total + terms[:, choice]
        return total
