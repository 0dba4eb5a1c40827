"""Row and key formats: sizes, round trips and their bounds."""

from __future__ import annotations

import pytest
import torch

from trt_backend.config import RowFormat
from trt_backend.models.registry import kv_layout, read_config
from trt_backend.models.rows import KeyCodec, RowCodec

E4M3_STEP = 2.0**-4
"""Half a unit in the last place of e4m3's three mantissa bits, relative to the number."""
E4M3_SMALLEST = 2.0**-9
BF16_STEP = 2.0**-8


def sample(rows: int, channels: int) -> torch.Tensor:
    """Rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(3)
    magnitudes = 10.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    return torch.randn(rows, channels, generator=generator) * magnitudes


@pytest.mark.parametrize("row_format", RowFormat)
def test_codecs_and_layout_agree_on_sizes(row_format: RowFormat) -> None:
    layout = kv_layout(read_config("glm-5.3"), row_format, 64, 4096)
    assert RowCodec(row_format, 512, 64).row_bytes == layout.sources[0].row_bytes
    assert KeyCodec(row_format, 128).key_bytes == layout.groups[0].key_bytes
    assert RowCodec(row_format, 512, 64).encode(sample(3, 512), sample(3, 64)).shape == (3, layout.sources[0].row_bytes)
    assert KeyCodec(row_format, 128).encode(sample(3, 128)).shape == (3, layout.groups[0].key_bytes)


def test_fp32_rows_come_back_exactly() -> None:
    codec = RowCodec(RowFormat.FP32, 96, 10)
    latent, rope = sample(20, 96), sample(20, 10)
    assert torch.equal(codec.decode(codec.encode(latent, rope)), torch.cat([latent, rope], dim=-1))


def test_bf16_rows_are_the_nearest_bf16_numbers() -> None:
    codec = RowCodec(RowFormat.BF16, 96, 10)
    both = torch.cat([sample(20, 96), sample(20, 10)], dim=-1)
    assert torch.equal(codec.decode(codec.encode(both[:, :96], both[:, 96:])), both.bfloat16().float())


def test_fp8_latents_stay_within_half_a_step_of_their_tile() -> None:
    codec = RowCodec(RowFormat.FP8, 512, 64)
    latent, rope = sample(50, 512), sample(50, 64)
    latent[:, 128:256] *= 1e-4  # tiles of one row have scales of their own
    decoded = codec.decode(codec.encode(latent, rope))
    tiles = latent.view(50, 4, 128)
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(tiles.abs() * E4M3_STEP, scale * E4M3_SMALLEST) * 1.001
    assert bool(((decoded[:, :512].view(50, 4, 128) - tiles).abs() <= bound).all())
    assert torch.equal(decoded[:, 512:], rope.bfloat16().float())


def test_the_largest_number_of_an_fp8_tile_comes_back_to_rounding() -> None:
    codec = RowCodec(RowFormat.FP8, 128, 2)
    latent = sample(50, 128)
    decoded = codec.decode(codec.encode(latent, torch.zeros(50, 2)))[:, :128]
    largest = latent.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(decoded.gather(1, largest), latent.gather(1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("row_format", RowFormat)
def test_rows_of_zeros_come_back_as_zeros(row_format: RowFormat) -> None:
    codec = RowCodec(row_format, 256, 8)
    encoded = codec.encode(torch.zeros(2, 256), torch.zeros(2, 8))
    assert torch.equal(codec.decode(encoded), torch.zeros(2, 264))
    assert torch.equal(codec.decode(torch.zeros_like(encoded)), torch.zeros(2, 264))
    keys = KeyCodec(row_format, 32)
    assert torch.equal(keys.decode(keys.encode(torch.zeros(2, 32))), torch.zeros(2, 32))


@pytest.mark.parametrize("row_format", RowFormat)
def test_decoding_keeps_leading_dimensions_and_the_order_of_rows(row_format: RowFormat) -> None:
    codec = RowCodec(row_format, 128, 16)
    rows = codec.encode(sample(12, 128), sample(12, 16))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    assert torch.equal(codec.decode(rows[order].view(3, 4, -1)).view(12, -1), codec.decode(rows)[order])


@pytest.mark.parametrize(
    ("row_format", "tolerance"), [(RowFormat.FP32, 0.0), (RowFormat.BF16, BF16_STEP), (RowFormat.FP8, E4M3_STEP)]
)
@pytest.mark.parametrize("dim", [32, 33, 128])
def test_index_keys_stay_within_a_step(row_format: RowFormat, tolerance: float, dim: int) -> None:
    codec = KeyCodec(row_format, dim)
    keys = sample(50, dim)
    decoded = codec.decode(codec.encode(keys))
    smallest = keys.abs().amax(-1, keepdim=True) / 448 * E4M3_SMALLEST
    bound = torch.maximum(keys.abs() * tolerance, smallest) * 1.001 if tolerance else torch.zeros_like(keys)
    assert bool(((decoded - keys).abs() <= bound).all())
