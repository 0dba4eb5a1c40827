"""Scores of the sparse-attention indexer, for whoever keeps the keys.

A score must not depend on how many other tokens or keys are scored with it, or selections near a tie would depend on
the batch. So scores are made of products of one fixed shape: `TOKEN_BLOCK` tokens against one block of keys. Two
tokens are few enough for decoding, where a block holds one token and a row of padding. Measured on one core: for 264
blocks of keys, decoding took 0.46, 0.41 and 0.64 ms with blocks of 1, 2 and 4 tokens; a 512-token chunk against 4K
keys took 46, 23 and 19 ms.
"""

from __future__ import annotations

import torch

TOKEN_BLOCK = 2
"""Tokens of one item of work."""

_OWN = torch.eye(TOKEN_BLOCK).unsqueeze(-1)


def token_blocks(x: torch.Tensor) -> torch.Tensor:
    """[T, ...] to [blocks, TOKEN_BLOCK, ...], the last one padded with zeros."""
    missing = -len(x) % TOKEN_BLOCK
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return x.view(-1, TOKEN_BLOCK, *x.shape[1:])


def index_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, block_of: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores of a list of items, each one block of tokens against one block of keys.

    score(t, k) = sum over heads h of weights[t, h] * relu(queries[t, h] . keys[k])

    Args:
        queries: float32 [n, TOKEN_BLOCK, heads, dim]. It may be expanded (stride 0) over n.
        weights: float32 [n, TOKEN_BLOCK, heads], the same.
        keys: float32 [n, block, dim], the same. Use one block size throughout a deployment.
        block_of: int64 [n]; if given, item i is block `block_of[i]` of `queries` and `weights` with `keys[i]`.

    Returns:
        float32 [n, TOKEN_BLOCK, block].
    """
    stacked, spread = queries.flatten(1, 2), _spread(weights)
    if block_of is not None:
        stacked, spread = stacked.index_select(0, block_of), spread.index_select(0, block_of)
    return _scores(stacked, spread, keys)


def prompt_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores of consecutive tokens of one session against all its blocks of keys.

    Args:
        queries: float32 [T, heads, dim].
        weights: float32 [T, heads].
        keys: float32 [blocks, block, dim].

    Returns:
        float32 [T, blocks * block], equal to what `index_scores` gives for every pair.
    """
    stacked = token_blocks(queries).flatten(1, 2)
    spread = _spread(token_blocks(weights))
    items, size = len(stacked), keys.shape[1]
    out = queries.new_empty(items, TOKEN_BLOCK, len(keys) * size)
    for number, block in enumerate(keys):
        out[:, :, number * size : (number + 1) * size] = _scores(stacked, spread, block.expand(items, -1, -1))
    return out.flatten(0, 1)[: len(queries)]


def _spread(weights: torch.Tensor) -> torch.Tensor:
    """[n, t, heads] to [n, t, t * heads]: a token's weights at its own heads, zero at the other tokens'.

    With it the sum over heads is a product of matrices. The zeros add nothing to a sum, not even rounding.
    """
    return (weights.unsqueeze(2) * _OWN).flatten(2)


def _scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, t * heads, dim], [n, t, t * heads] and [n, block, dim] to [n, t, block]."""
    return torch.bmm(weights, torch.bmm(queries, keys.transpose(1, 2)).relu_())
