"""One layer of `glm_moe_dsa`: latent attention over selected rows, then a feed-forward block.

Attention works on the latents themselves: the key half of kv_b_proj is applied to the query and the value half to the
result (the absorbed form of DeepSeek-V2, arXiv 2405.04434), so that a row is read as it is stored. Layers share
selections as in IndexShare (arXiv 2603.12201).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_backend.models.blocks import Mlp, constant, layer_norm, linear, linear_per_head, rms_norm, rotate
from trt_backend.models.experts import MoE
from trt_backend.models.rows import KeyCodec, RowCodec
from trt_backend.models.state import KvState

LATENT_NORM_EPS = 1e-6
"""Of q_a_layernorm and kv_a_layernorm; the other RMS norms take the configuration's `rms_norm_eps` (transformers)."""

INDEX_NORM_EPS = 1e-6
"""Of the index keys' layer norm."""

ATTENTION_TOKENS = 32
"""Tokens whose rows are read and attended at a time. Of 8, 16, 32, 64 and 512 it was the fastest for 512 tokens, each
with 64 rows of 576 bytes: 5 ms against 26 ms for all at once, for the rows stay in the second-level cache."""

MASKED = -1e30
"""The score of an entry that holds no row. Finite, so that a token without any row makes no NaN."""


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share. `cos` and `sin` are the tables of `blocks.Rotary`, float32 [16 n, 1, rope]."""

    tokens: int
    cos: torch.Tensor
    sin: torch.Tensor
    state: KvState


@dataclass(frozen=True, slots=True)
class Indexer:
    """The part of a full layer that chooses rows. Its projections are columns of the attention's fused ones.

    A query's or key's channels stand with the rotated ones last, in halves (the checkpoint has them first, in pairs).
    The weights of heads carry the scale factor of the scores.
    """

    group: int
    heads: int
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    codec: KeyCodec

    def select(self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, step: Step) -> None:
        """Hand this step's keys and queries to the keeper of rows.

        Args:
            queries: float32 [16 n, heads * dim], not yet rotated.
            keys: float32 [16 n, dim], neither normed nor rotated.
            weights: float32 [16 n, heads].
        """
        dim = self.codec.dim
        still = dim - step.cos.shape[-1]
        normed = layer_norm(keys, self.norm_weight, self.norm_bias, INDEX_NORM_EPS).unsqueeze(1)
        both = torch.cat([queries.view(-1, self.heads, dim), normed], dim=1)
        both = torch.cat([both[..., :still], rotate(both[..., still:], step.cos, step.sin)], dim=-1)
        step.state.write_index_keys(self.group, self.codec.encode(both[: step.tokens, -1]))
        step.state.select(self.group, both[: step.tokens, :-1].contiguous(), weights[: step.tokens])


@dataclass(frozen=True, slots=True)
class Attention:
    """Latent attention of one layer.

    | weight | shape | columns of |
    |---|---|---|
    | `input_proj` | [hidden, q_rank + rank + rope (+ dim + index heads)] | q_a, kv_a (, indexer wk, weights_proj) |
    | `query_proj` | [q_rank, heads * (nope + rope) (+ index heads * dim)] | q_b (, indexer wq_b) |
    | `to_latent` | [heads, nope, rank] | key half of kv_b |
    | `from_latent` | [heads, rank, v] | value half of kv_b |
    | `output_proj` | [heads * v, hidden] | o_proj |

    Rotated channels stand in halves, where the checkpoint has them in pairs. Queries carry the scale factor of
    attention.
    """

    source: int
    heads: int
    nope: int
    codec: RowCodec
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    input_proj: torch.Tensor
    query_proj: torch.Tensor
    to_latent: torch.Tensor
    from_latent: torch.Tensor
    output_proj: torch.Tensor
    indexer: Indexer | None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Write this step's rows, select (in a full layer), and attend: float32 [16 n, hidden] to the same."""
        rank, rope, heads, tokens = self.codec.rank, self.codec.rope, self.heads, step.tokens
        index_dim = self.indexer.codec.dim if self.indexer else 0
        inputs = linear(x, self.input_proj)
        parts = [len(self.q_norm), rank, rope, index_dim]
        query_latent, latent, key_rope, index_key, index_weights = inputs.split_with_sizes(
            [*parts, inputs.shape[-1] - sum(parts)], dim=-1
        )
        queries = linear(rms_norm(query_latent, self.q_norm, LATENT_NORM_EPS), self.query_proj)
        width = heads * (self.nope + rope)
        query, index_query = queries[:, :width].view(-1, heads, self.nope + rope), queries[:, width:]

        rotated = rotate(torch.cat([query[..., self.nope :], key_rope.unsqueeze(1)], dim=1), step.cos, step.sin)
        latent = rms_norm(latent, self.kv_norm, LATENT_NORM_EPS)
        step.state.write_rows(self.source, self.codec.encode(latent[:tokens], rotated[:tokens, -1]))
        if self.indexer:
            self.indexer.select(index_query, index_key, index_weights, step)
        absorbed = torch.cat([linear_per_head(query[..., : self.nope], self.to_latent), rotated[:, :-1]], dim=-1)
        attended = self._attend(absorbed, step)
        values = linear_per_head(attended, self.from_latent).reshape(len(x), -1)
        return linear(values, self.output_proj)

    def _attend(self, query: torch.Tensor, step: Step) -> torch.Tensor:
        """Queries, float32 [16 n, heads, rank + rope], to sums of latents, float32 [16 n, heads, rank].

        A product of its own for every token, and sums over K in the order of the selection. Padding gives zeros.
        """
        sums = query.new_zeros(*query.shape[:2], self.codec.rank)
        for first in range(0, step.tokens, ATTENTION_TOKENS):
            part = slice(first, min(first + ATTENTION_TOKENS, step.tokens))
            rows, valid = step.state.read_rows(self.source, part)
            keys = self.codec.decode(rows)
            scores = torch.bmm(query[part], keys.transpose(1, 2))
            scores.masked_fill_(valid.logical_not().unsqueeze(1), constant(MASKED))
            torch.bmm(torch.softmax(scores, dim=-1), keys[..., : self.codec.rank], out=sums[part])
        return sums


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and feed-forward block, each behind a norm and around a residual."""

    eps: float
    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: Mlp | MoE

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Apply to float32 [16 n, hidden], in place."""
        x.add_(self.attention(rms_norm(x, self.attention_norm, self.eps), step))
        normed = rms_norm(x, self.mlp_norm, self.eps)
        return x.add_(self.mlp(normed, step.tokens) if isinstance(self.mlp, MoE) else self.mlp(normed))
