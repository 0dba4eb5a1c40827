"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trt_backend.request import Request, SamplingParams, TokenLogprob

Floats = npt.NDArray[np.floating[Any]]


class Choice(NamedTuple):
    """A chosen token, with its log-probability if the request asked for it."""

    token: int
    logprob: TokenLogprob | None


class Sampler:
    """Chooses the tokens of one running request. `generated` counts those that have become part of its answer."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.sampling
        self.generated = 0
        self._request = request
        self._penalties = Penalties(params, request.prompt, vocab_size) if Penalties.wanted(params) else None
        self._stops = {(end,) for end in request.end_ids} | set(request.stop_sequences)
        self._end_ids = [stop[0] for stop in self._stops if len(stop) == 1 and 0 <= stop[0] < vocab_size]
        self._banned: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in request.bad_sequences:
            if 0 <= last < vocab_size:
                self._banned[tuple(before)].append(last)
        self._stop_lengths = {len(stop) for stop in self._stops}
        self._banned_lengths = {len(before) for before in self._banned}
        self._memory = max((1, *self._stop_lengths, *self._banned_lengths))
        self._recent: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the highest logit is the choice, now and ever after: greedy, nothing changed, nothing reported."""
        return not (
            self._request.sampling.temperature > 0
            or self._request.logprobs is not None
            or self._penalties is not None
            or self._banned
            or (self._end_ids and self.generated < self._request.min_tokens)
        )

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> Choice:
        """The token for `position` from its logits, float32 [vocabulary]. Changes no state.

        Raises:
            ValueError: No token can be chosen, because all are masked or the logits are not finite.
        """
        params = self._request.sampling
        changed = self._changed(logits)
        if params.temperature > 0:
            tokens, weights = candidates(changed, params)
            token = int(tokens[draw(weights, params.seed, position)])
        else:
            token = int(changed.argmax())
        alternatives = self._request.logprobs
        return Choice(token, None if alternatives is None else token_logprob(logits, token, alternatives))

    def probabilities(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """With what probability `choose` takes each token: float64 [vocabulary]. Raises as `choose` does."""
        tokens, weights = candidates(self._changed(logits), self._request.sampling)
        probabilities = np.zeros(len(logits), dtype=np.float64)
        probabilities[tokens] = weights / weights.sum()
        return probabilities

    def accept(self, token: int) -> None:
        """Make a token part of the answer."""
        self.generated += 1
        self._recent = (*self._recent, token)[-self._memory :]
        if self._penalties is not None:
            self._penalties.accept(token)

    def stopped(self) -> bool:
        """Whether the answer must end here: it ends with an end token or a stop sequence, and is long enough."""
        if self.generated < self._request.min_tokens:
            return False
        return any(self._latest(length) in self._stops for length in self._stop_lengths)

    def _latest(self, length: int) -> tuple[int, ...]:
        """The last tokens of the answer, fewer than `length` where it has no more."""
        return self._recent[max(0, len(self._recent) - length) :]

    def _masked(self) -> list[int]:
        """The tokens that must not come next."""
        masked = [token for length in self._banned_lengths for token in self._banned.get(self._latest(length), ())]
        return masked + self._end_ids if self.generated < self._request.min_tokens else masked

    def _changed(self, logits: npt.NDArray[np.float32]) -> Floats:
        """The logits after penalties and masks; a copy in float64 if there are any."""
        changed: Floats = logits
        masked = self._masked()
        if masked or self._penalties is not None:
            changed = logits.astype(np.float64)
            if self._penalties is not None:
                self._penalties.apply(changed)
            changed[masked] = -np.inf
        best = float(changed.max())
        if not math.isfinite(best):
            raise ValueError(
                f"no token can follow {self.generated} new ones: bad_sequences and "
                f"min_tokens={self._request.min_tokens} mask {len(set(masked))} of {len(logits)}, "
                f"and the highest logit left is {best}"
            )
        return changed


class Penalties:
    """What a request's tokens so far take from the logits. Its arrays span the vocabulary: make it only if `wanted`."""

    def __init__(self, params: SamplingParams, prompt: npt.NDArray[np.int32], vocab_size: int) -> None:
        self._params = params
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._seen[prompt] = True
        self._counts = np.zeros(vocab_size, dtype=np.int32)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether any penalty is on."""
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        self._seen[token] = True
        self._counts[token] += 1

    def apply(self, logits: Floats) -> None:
        """Change logits [vocabulary] in place, as `SamplingParams` says."""
        repetition = self._params.repetition_penalty
        if repetition != 1:
            seen = logits[self._seen]
            logits[self._seen] = np.where(seen > 0, seen / repetition, seen * repetition)
        answered = np.flatnonzero(self._counts)
        logits[answered] -= self._params.presence_penalty + self._params.frequency_penalty * self._counts[answered]


def choose(logits: npt.NDArray[np.float32], samplers: Sequence[Sampler], positions: Sequence[int]) -> list[Choice]:
    """One choice for each row of `logits`, float32 [n, vocabulary]; `positions[i]` is where row i's token will stand.

    A row's choice depends on its own logits, sampler and position alone.

    Raises:
        ValueError: No token can be chosen for some row. No state has changed: the rows can be asked one by one.
    """
    best: list[int] = logits.argmax(axis=1).tolist()
    return [
        Choice(token, None) if sampler.plain else sampler.choose(row, position)
        for token, row, sampler, position in zip(best, logits, samplers, positions, strict=True)
    ]


class Candidates(NamedTuple):
    """The tokens that may be drawn, integers [k] in ascending order, and their relative probabilities, float64 [k]."""

    tokens: npt.NDArray[np.intp]
    weights: npt.NDArray[np.float64]


def candidates(logits: Floats, params: SamplingParams) -> Candidates:
    """What temperature, min_p, top_k and top_p leave of logits [vocabulary].

    top_k goes first here and min_p before exp: both keep the highest whatever their order, and what they drop costs
    nothing more. In a vocabulary of 154,880 that saves half of the time.
    """
    if params.temperature == 0:
        return Candidates(logits.argmax(keepdims=True), np.ones(1))
    tokens = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        tokens = highest(logits, params.top_k)
        logits = logits[tokens]
    weights = logits.astype(np.float64)
    weights -= float(logits.max())
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to exp(-inf), as it should
        weights /= params.temperature
    if params.min_p > 0:
        likely = weights >= math.log(params.min_p)
        tokens, weights = tokens[likely], weights[likely]
    np.exp(weights, out=weights)
    if params.top_p < 1:
        inner = nucleus(weights, params.top_p)
        tokens, weights = tokens[inner], weights[inner]
    return Candidates(tokens, weights)


def highest(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Where the `count` (at least 1) highest values are, in ascending order; of equal ones those at the front.

    Partitions instead of sorting: 1 ms instead of 20 ms for 154,880 values.
    """
    threshold = np.partition(values, -count)[-count]
    kept = values > threshold
    tied = np.flatnonzero(values == threshold)
    kept[tied[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """Where the smallest set of the highest weights is, at least one, that holds `top_p` of their sum; ascending.

    Nucleus sampling is from Holtzman et al., arXiv 1904.09751. Only a part is sorted: the weights below
    (1 - top_p) / n of the sum can't hold 1 - top_p of it together, so the nucleus is among the others.
    """
    total = weights.sum()
    head = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    head = head[np.argsort(-weights[head], kind="stable")]
    last = int(np.searchsorted(np.cumsum(weights[head]), top_p * total))
    return np.sort(head[: last + 1])


def draw(weights: npt.NDArray[np.float64], seed: int, position: int) -> int:
    """Draw an index of weights, float64 [k], in proportion to them, by inverting their cumulative distribution.

    The random number comes from Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", SC 2011), keyed by the seed and counted by the position: no state to keep or to share.
    """
    cumulative = np.cumsum(weights)
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    # Rounding may lift the product to the sum itself, which lies behind every index.
    inside = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(np.searchsorted(cumulative, inside, side="right"))


def token_logprob(logits: npt.NDArray[np.float32], token: int, alternatives: int) -> TokenLogprob:
    """A token's log-probability under softmax(logits), logits float32 [vocabulary], and those of the best tokens."""
    total = log_sum_exp(logits)
    rank = 1 + np.count_nonzero(logits > logits[token]) + np.count_nonzero(logits[:token] == logits[token])
    best = highest(logits, min(alternatives, len(logits))) if alternatives else np.empty(0, dtype=np.intp)
    best = best[np.argsort(-logits[best], kind="stable")]
    top = tuple((one, float(logits[one]) - total) for one in best.tolist())
    return TokenLogprob(token, float(logits[token]) - total, int(rank), top)


def prompt_logprobs(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
    """The log-probability of each target, integers [n], under its row of logits, float32 [n, vocabulary]: float32 [n].

    Goes row by row: a chunk of 2,048 tokens of a vocabulary of 154,880 would be 2.5 GB in float64.
    """
    rows = zip(logits, targets.tolist(), strict=True)
    return np.array([float(row[target]) - log_sum_exp(row) for row, target in rows], dtype=np.float32)


def log_sum_exp(logits: npt.NDArray[np.float32]) -> float:
    """log(sum(exp(logits))) in float64, safe from overflow."""
    best = float(logits.max())
    shifted = logits.astype(np.float64)
    shifted -= best
    return best + math.log(np.exp(shifted, out=shifted).sum())
