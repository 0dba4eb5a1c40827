"""Attention over gathered latent rows, with its backward pass written out.

A query reads K rows of its own, so the rows of many queries outgrow the cache at once. Here a few queries at a time
are gathered, used and dropped, and gathered again on the way back: twice as fast as autograd over the whole gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Queries gathered at a time: 64 queries of 64 rows of 144 fp32 channels are 2.3 MiB, about a core's share of cache.
GATHER_CHUNK = 64


class GatheredAttention(torch.autograd.Function):
    """`softmax(query . rows) rows[:rank]` over each query's own rows.

    Arguments of `apply`:
        query: `[N, heads, D]`, scaled.
        table: `[R, D]` latent rows with their rotated key channels last.
        index: `[N, K]` rows of `table` each query reads.
        valid: `[N, K]`; entries that are false get no weight.
        rank: the leading channels of a row that are its value.

    Returns:
        Context `[N, heads, rank]`, and the probabilities summed over heads, `[N, K]`, which carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, table: Tensor, index: Tensor, valid: Tensor, rank: int
    ) -> tuple[Tensor, Tensor]:
        queries, heads, width = query.shape
        kept = index.shape[1]
        context = query.new_empty(queries, heads, rank)
        chance = query.new_empty(queries, heads, kept)
        for part in _parts(queries):
            rows = table.index_select(0, index[part].flatten()).view(-1, kept, width)
            scores = torch.bmm(query[part], rows.transpose(1, 2))
            scores.masked_fill_(~valid[part].unsqueeze(1), float("-inf"))
            torch.softmax(scores, dim=-1, out=chance[part])
            torch.bmm(chance[part], rows[..., :rank], out=context[part])
        mass = chance.sum(dim=1)
        ctx.save_for_backward(query, table, index, chance)
        ctx.mark_non_differentiable(mass)
        return context, mass

    @staticmethod
    def backward(ctx: Any, d_context: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        query, table, index, chance = ctx.saved_tensors
        queries, heads, width = query.shape
        rank, kept = d_context.shape[-1], index.shape[1]
        d_query = torch.empty_like(query)
        d_table = torch.zeros_like(table)
        # A row's gradient has two terms, as a value and as a key; stacked over heads they are one product.
        outer = query.new_zeros(GATHER_CHUNK, 2 * heads, width)
        for part in _parts(queries):
            flat = index[part].flatten()
            rows = table.index_select(0, flat).view(-1, kept, width)
            p, grad = chance[part], d_context[part]
            d_p = torch.bmm(grad, rows[..., :rank].transpose(1, 2))
            d_scores = p * (d_p - (d_p * p).sum(dim=-1, keepdim=True))
            torch.bmm(d_scores, rows, out=d_query[part])
            stacked = outer[: p.shape[0]]
            stacked[:, :heads] = query[part]
            stacked[:, heads:, :rank] = grad
            d_rows = torch.bmm(torch.cat((d_scores, p), dim=1).transpose(1, 2), stacked)
            d_table.index_add_(0, flat, d_rows.view(-1, width))
        return d_query, d_table, None, None, None


def _parts(queries: int) -> list[slice]:
    return [slice(start, min(start + GATHER_CHUNK, queries)) for start in range(0, queries, GATHER_CHUNK)]
