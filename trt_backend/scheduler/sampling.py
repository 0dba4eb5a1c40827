"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_backend.request import SamplingParams


def choose(logits: npt.NDArray[np.float32], params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token for each row of `logits`, float32 [n, vocabulary]; `positions[i]` is where row i's token will stand.

    A row's choice depends on its own logits, parameters and position alone.
    """
    tokens: list[int] = logits.argmax(axis=1).tolist()
    for row, (sampling, position) in enumerate(zip(params, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row] = draw(logits[row], sampling, position)
    return tokens


def draw(logits: npt.NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """Draw from softmax(logits / temperature) by inverting its cumulative distribution in float64.

    The random number comes from Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), keyed by the seed and counted by the position: no state to keep or to share.
    """
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    cumulative = np.cumsum(np.exp(scaled))
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=position)).random()
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(logits) - 1)
