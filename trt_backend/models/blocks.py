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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

ROW_BLOCK = 16
"""Rows of every matrix product."""

_PIECE = 32768
"""Elements up to which torch runs an element-wise function on one thread (at::internal::GRAIN_SIZE)."""


@cache
def constant(value: float) -> torch.Tensor:
    """A number as a float32 tensor without dimensions. Torch makes one of a Python number anew in every call (4 us)."""
    return torch.tensor(value)


def padded(tokens: int) -> int:
    """The next multiple of 16."""
    return -(-tokens // ROW_BLOCK) * ROW_BLOCK


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """[T, ...] with zero rows added up to a multiple of 16."""
    missing = padded(x.shape[0]) - x.shape[0]
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight in blocks of 16 rows: [16 n, in] and [in, out] to [16 n, out].

    Weights stand input first, the transpose of a checkpoint's: read from memory they are a fifth faster so. There must
    be at least 2 outputs, for one would be dispatched as a matrix-vector product.
    """
    rows = x.shape[0]
    blocks = rows // ROW_BLOCK
    if blocks == 1:
        return torch.mm(x, weight)
    return torch.bmm(x.reshape(blocks, ROW_BLOCK, -1), weight.expand(blocks, -1, -1)).view(rows, -1)


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
    if x.shape[0] <= rows:
        return function(x)
    return torch.cat([function(piece) for piece in torch.split(x, rows)])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Spelled out, in the reference's order of roundings, for torch's own has no CPU kernel: it makes a dozen calls.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.mul_(norm).mul_(constant(1 / x.shape[-1])).add_(constant(eps)).rsqrt_()
    return (x * scale).mul_(weight)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions over pairs of channels. The first members of all pairs come first, then the second ones.

    Models whose pairs are neighbours, (0, 1), (2, 3), ..., have their weights reordered when they are loaded
    (`halves_first`).
    """

    frequencies: torch.Tensor

    @classmethod
    def of(cls, theta: float, channels: int) -> Rotary:
        """Frequencies theta^(-2i/channels), in float32 as the reference implementation computes them."""
        return cls(1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)))

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `rotate`: float32 [T, 1, channels] each, of int64 [T] positions.

        The first holds cosines twice, the second negated sines and then sines.
        """
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies
        cos, sin = in_pieces(torch.cos, angles), in_pieces(torch.sin, angles)
        return torch.cat([cos, cos], dim=-1).unsqueeze(1), torch.cat([-sin, sin], dim=-1).unsqueeze(1)


def halves_first(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Reorder the last `channels` rows of [..., rows, columns]: rows 0, 2, 4, ... of them, then 1, 3, 5, ..."""
    kept, paired = weight[..., :-channels, :], weight[..., -channels:, :]
    return torch.cat([kept, paired[..., 0::2, :], paired[..., 1::2, :]], dim=-2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate float32 [T, heads, channels] by the tables of its tokens."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


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
