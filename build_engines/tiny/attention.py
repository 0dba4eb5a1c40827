"""Multi-head latent attention and the lightning indexer, densely for training and over gathered rows for sparse use.

The arithmetic is that of the published architecture (transformers, modeling_glm_moe_dsa.py); the sparse path is the
absorbed form, in which queries meet latent rows and keys are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import INDEX_NORM_EPS, LATENT_NORM_EPS, TinyConfig
from .gathered import GatheredAttention

# Queries scored at a time: 128 queries against 8192 keys and 4 heads are 16 MiB of products.
QUERY_CHUNK = 128


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, `[T, rope / 2]` each."""

    cos: Tensor
    sin: Tensor


def rotation(config: TinyConfig, positions: Tensor) -> Rotation:
    """Angles of `positions` (`[T]`), one frequency for each interleaved pair of channels."""
    half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32)
    frequencies = config.rope_theta ** (-half / config.qk_rope_head_dim)
    angles = positions.float()[:, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate interleaved pairs of `x` (`[B, T, heads, rope]`); the result holds all first halves, then all second."""
    cos, sin = by.cos[:, None], by.sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


class Latents(NamedTuple):
    """What a layer's projections give for its input."""

    query_latent: Tensor  # [B, T, q_lora]
    query: Tensor  # [B, T, heads, nope + rope], rotated
    row: Tensor  # [B, T, kv_lora], normalised
    key_rot: Tensor  # [B, T, rope], rotated


@dataclass(frozen=True)
class Selection:
    """Positions each query may read.

    Attributes:
        index: `[B, T, K]` positions; where `valid` is false the entry is padding and holds position 0.
        valid: `[B, T, K]`.
    """

    index: Tensor
    valid: Tensor

    def of(self, queries: Tensor) -> Selection:
        """The selection of the query positions `queries` (`[Q]`)."""
        return Selection(self.index[:, queries], self.valid[:, queries])


class Indexer(nn.Module):
    """Scores every earlier position for a query: `sum_h w_h * relu(q_h . k) / sqrt(dim)`."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.top_k = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=INDEX_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def project(self, x: Tensor, query_latent: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, T, heads, dim]` scaled by `dim ** -0.5`, keys `[B, T, dim]`, head weights `[B, T, heads]`."""
        batch, length, _ = x.shape
        q = self.wq_b(query_latent).view(batch, length, self.heads, self.dim)
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        q = torch.cat((rotate(q[..., : self.rope], by), q[..., self.rope :]), dim=-1) * self.dim**-0.5
        k = torch.cat((rotate(k[..., : self.rope], by), k[..., self.rope :]), dim=-1).squeeze(2)
        return q, k, self.weights_proj(x) * self.heads**-0.5

    @torch.no_grad()
    def select(self, x: Tensor, query_latent: Tensor, by: Rotation) -> Selection:
        """The top-k earlier positions of every query, its own included."""
        q, k, w = self.project(x, query_latent, by)
        length = x.shape[1]
        kept = min(self.top_k, length)
        parts: list[Tensor] = []
        for start in range(0, length, QUERY_CHUNK):
            stop = min(start + QUERY_CHUNK, length)
            visible = max(stop, kept)
            scores = score_all(q[:, start:stop], k[:, :visible], w[:, start:stop])
            scores.masked_fill_(_future(torch.arange(start, stop), visible), float("-inf"))
            parts.append(scores.topk(kept, dim=-1, sorted=False).indices)
        index = torch.cat(parts, dim=1)
        valid = index <= torch.arange(length)[:, None]
        return Selection(index.masked_fill(~valid, 0), valid)


def score_all(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Indexer scores `[B, Q, T]` of queries `[B, Q, heads, dim]`, keys `[B, T, dim]`, head weights `[B, Q, heads]`."""
    batch, queries, heads, dim = q.shape
    products = torch.bmm(q.reshape(batch, queries * heads, dim), k.transpose(1, 2)).relu_()
    products = products.view(batch * queries, heads, -1)
    return torch.bmm(w.reshape(batch * queries, 1, heads), products).view(batch, queries, -1)


def score_selected(q: Tensor, k: Tensor, w: Tensor, selection: Selection) -> Tensor:
    """Indexer scores `[B, Q, K]` of the selected positions only, `-inf` where a selection is padding.

    Args:
        q: queries `[B, Q, heads, dim]`.
        k: keys `[B, T, dim]`.
        w: head weights `[B, Q, heads]`.
        selection: of the same queries.
    """
    batch, queries, heads, dim = q.shape
    keys = gather_rows(k, selection.index).view(batch * queries, -1, dim)
    products = torch.bmm(q.reshape(batch * queries, heads, dim), keys.transpose(1, 2)).relu()
    scores = torch.bmm(w.reshape(batch * queries, 1, heads), products).view(batch, queries, -1)
    return scores.masked_fill(~selection.valid, float("-inf"))


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` (`[B, T, D]`) at `index` (`[B, Q, K]`): `[B, Q, K, D]`."""
    batch, length, width = table.shape
    return F.embedding(_flat_index(index, length), table.reshape(batch * length, width))


def _flat_index(index: Tensor, length: int) -> Tensor:
    """`index` (`[B, Q, K]`) as rows of the table with its batch and length folded into one."""
    return index + torch.arange(index.shape[0])[:, None, None] * length


def _future(queries: Tensor, keys: int) -> Tensor:
    """Which of the first `keys` positions lie after each query: `[Q, keys]`."""
    return torch.arange(keys) > queries[:, None]


class LatentAttention(nn.Module):
    """MLA with low-rank queries; `indexer` exists on full layers only."""

    indexer: Indexer | None

    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        self.rank, self.value = config.kv_lora_rank, config.v_head_dim
        self.scale = config.qk_head_dim**-0.5
        hidden = config.hidden_size
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        self.indexer = Indexer(config) if config.is_full(layer) else None

    def project(self, x: Tensor, by: Rotation) -> Latents:
        """Down-projections, norms and rotation of `x` (`[B, T, hidden]`)."""
        batch, length, _ = x.shape
        query_latent = self.q_a_layernorm(self.q_a_proj(x))
        query = self.q_b_proj(query_latent).view(batch, length, self.heads, self.nope + self.rope)
        row, key_rot = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), dim=-1)
        query = torch.cat((query[..., : self.nope], rotate(query[..., self.nope :], by)), dim=-1)
        return Latents(query_latent, query, self.kv_a_layernorm(row), rotate(key_rot.unsqueeze(2), by).squeeze(2))

    def _expand(self, latents: Latents) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, `[B, heads, T, nope + rope]` and `[B, heads, T, value]`."""
        batch, length, _ = latents.row.shape
        expanded = self.kv_b_proj(latents.row).view(batch, length, self.heads, self.nope + self.value)
        key, value = expanded.split((self.nope, self.value), dim=-1)
        shared = latents.key_rot.unsqueeze(2).expand(-1, -1, self.heads, -1)
        return torch.cat((key, shared), dim=-1).transpose(1, 2), value.transpose(1, 2)

    def dense(self, latents: Latents) -> Tensor:
        """Causal attention over every earlier position: `[B, T, hidden]`."""
        key, value = self._expand(latents)
        out = F.scaled_dot_product_attention(
            latents.query.transpose(1, 2), key, value, is_causal=True, scale=self.scale
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    @torch.no_grad()
    def probabilities(self, latents: Latents, queries: Tensor) -> Tensor:
        """Dense attention of the query positions `queries` (`[Q]`), summed over heads: `[B, Q, T]`."""
        key, _ = self._expand(latents)
        scores = latents.query[:, queries].transpose(1, 2) @ key.transpose(2, 3) * self.scale
        scores.masked_fill_(_future(queries, key.shape[2]), float("-inf"))
        mass: Tensor = scores.softmax(dim=-1).sum(dim=1)
        return mass

    def sparse(self, latents: Latents, selection: Selection) -> tuple[Tensor, Tensor]:
        """Attention over the selected positions.

        Returns:
            `[B, T, hidden]`, and the probabilities summed over heads, `[B, T, K]`, detached.
        """
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.rank)
        absorbed = torch.einsum("bthn,hnr->bthr", latents.query[..., : self.nope], up[:, : self.nope])
        query = torch.cat((absorbed, latents.query[..., self.nope :]), dim=-1) * self.scale
        table = torch.cat((latents.row, latents.key_rot), dim=-1)
        batch, length = table.shape[:2]
        context: Tensor
        mass: Tensor
        context, mass = GatheredAttention.apply(  # type: ignore[no-untyped-call]
            query.flatten(0, 1),
            table.flatten(0, 1),
            _flat_index(selection.index, length).flatten(0, 1),
            selection.valid.flatten(0, 1),
            self.rank,
        )
        value = torch.einsum("bthr,hvr->bthv", context.view(batch, length, self.heads, self.rank), up[:, self.nope :])
        projected: Tensor = self.o_proj(value.flatten(2))
        return projected, mass.view(batch, length, -1)
