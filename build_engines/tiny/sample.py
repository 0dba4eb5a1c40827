"""Continue a prompt with the network alone, without a cache: for looking at what it learnt, not for serving."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from .network import TinyGlm
from .tokenizer import end_of_text


@torch.no_grad()
def continue_text(
    network: TinyGlm,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """The prompt and up to `tokens` more tokens, sampled from the nucleus `top_p`; temperature 0 takes the likeliest.

    Raises:
        ValueError: if the result would pass the trained positions.
    """
    ids: list[int] = tokenizer.encode(prompt).ids
    limit = network.config.max_position_embeddings
    if len(ids) + tokens > limit:
        raise ValueError(
            f"{tokens} tokens after a prompt of {len(ids)} need {len(ids) + tokens} positions; the model has {limit}"
        )
    end = end_of_text(tokenizer)
    ids = ids or [end]
    draw = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        hidden = network(torch.tensor([ids]), sparse=True).hidden[0, -1]
        token = _pick(network.logits(hidden), temperature, top_p, draw)
        if token == end:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids)
    return text


def _pick(logits: torch.Tensor, temperature: float, top_p: float, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    chance, order = torch.sort(torch.softmax(logits / temperature, dim=-1), descending=True)
    chance[chance.cumsum(0) - chance > top_p] = 0.0
    return int(order[torch.multinomial(chance, 1, generator=draw)])
