"""How KV rows and index keys are stored: fp32, bf16, or fp8 in the 656-byte row of DeepSeek's sparse MLA.

An fp8 row is the latent in e4m3 with one fp32 scale for every 128 channels, then the scales, then the rotated key in
bf16. An fp8 index key is its channels in e4m3, then one fp32 scale. A scale is the largest magnitude over 448, the
largest e4m3 number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_backend.config import RowFormat
from trt_backend.models.glm_config import FP8_TILE

_WIDE = {RowFormat.FP32: torch.float32, RowFormat.BF16: torch.bfloat16}
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class RowCodec:
    """Rows of one source: `rank` latent channels and `rope` rotated ones."""

    format: RowFormat
    rank: int
    rope: int

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        if self.format is RowFormat.FP8:
            return self.rank + 4 * (self.rank // FP8_TILE) + 2 * self.rope
        return _WIDE[self.format].itemsize * (self.rank + self.rope)

    def encode(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """float32 [T, rank] and float32 [T, rope] to uint8 [T, row_bytes]."""
        if self.format is RowFormat.FP8:
            values, scales = _quantise(latent.reshape(*latent.shape[:-1], -1, FP8_TILE))
            parts = [values.flatten(-2).view(torch.uint8), scales.view(torch.uint8), _bytes(rope, torch.bfloat16)]
            return torch.cat(parts, dim=-1)
        return _bytes(torch.cat([latent, rope], dim=-1), _WIDE[self.format])

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [..., row_bytes] to float32 [..., rank + rope]. In fp32 it is a view."""
        if self.format is RowFormat.FP8:
            scales_at, rope_at = self.rank, self.rank + 4 * (self.rank // FP8_TILE)
            values = rows[..., :scales_at].view(torch.float8_e4m3fn).to(torch.float32)
            tiles = values.view(*values.shape[:-1], -1, FP8_TILE)
            latent = tiles.mul_(rows[..., scales_at:rope_at].view(torch.float32).unsqueeze(-1)).flatten(-2)
            return torch.cat([latent, rows[..., rope_at:].view(torch.bfloat16).to(torch.float32)], dim=-1)
        return rows.view(_WIDE[self.format]).to(torch.float32)


@dataclass(frozen=True, slots=True)
class KeyCodec:
    """Index keys of one group: `dim` channels."""

    format: RowFormat
    dim: int

    @property
    def key_bytes(self) -> int:
        """Size of one key."""
        if self.format is RowFormat.FP8:
            return self.dim + 4
        return _WIDE[self.format].itemsize * self.dim

    def encode(self, keys: torch.Tensor) -> torch.Tensor:
        """float32 [T, dim] to uint8 [T, key_bytes]."""
        if self.format is RowFormat.FP8:
            values, scale = _quantise(keys)
            return torch.cat([values.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)], dim=-1)
        return _bytes(keys, _WIDE[self.format])

    def decode(self, keys: torch.Tensor) -> torch.Tensor:
        """uint8 [..., key_bytes] to float32 [..., dim]. In fp32 it is a view."""
        if self.format is RowFormat.FP8:
            values = keys[..., : self.dim].view(torch.float8_e4m3fn).to(torch.float32)
            # A key's scale need not be aligned in its row (dim may be odd), so it is copied out before it is viewed.
            return values.mul_(keys[..., self.dim :].contiguous().view(torch.float32))
        return keys.view(_WIDE[self.format]).to(torch.float32)


def _quantise(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] to e4m3 of the same shape and float32 scales [...]. A tile of zeros has scale 1."""
    scale = tiles.abs().amax(dim=-1) / _E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = (tiles / scale.unsqueeze(-1)).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def _bytes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).contiguous().view(torch.uint8)
