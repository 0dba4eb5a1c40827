"""The sampler against a slow and plain reference, its draws against the distribution they should have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_backend.request import Request, SamplingParams, TokenSequences
from trt_backend.scheduler.sampling import Choice, Sampler, choose, draw, prompt_logprobs

Logits = npt.NDArray[np.float32]

DRAWS = 6000
SEEDS = 30
LEAST_P = 1e-4
FEWEST_EXPECTED = 5
"""Cells expected to hold fewer draws are too small for the chi-square approximation (Cochran, Biometrics 10, 1954)."""

LOGITS = np.array([1.5, 0.25, -1.0, 2.0, 0.25, -3.0, 1.0, 2.0, 0.0, -0.5, 0.75, -2.0], dtype=np.float32)
EVERYTHING = SamplingParams(
    temperature=1.3,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=0.2,
    frequency_penalty=0.1,
)


def request(
    sampling: SamplingParams = SamplingParams(),
    prompt: Sequence[int] = (0,),
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
    stop_sequences: TokenSequences = (),
    bad_sequences: TokenSequences = (),
    logprobs: int | None = None,
) -> Request:
    return Request(
        id="r",
        prompt=np.array(prompt, dtype=np.int32),
        max_tokens=100,
        sampling=sampling,
        end_ids=frozenset(end_ids),
        min_tokens=min_tokens,
        stop_sequences=stop_sequences,
        bad_sequences=bad_sequences,
        logprobs=logprobs,
    )


def sampler_after(answer: Sequence[int], of: Request, vocabulary: int = len(LOGITS)) -> Sampler:
    sampler = Sampler(of, vocabulary)
    for token in answer:
        sampler.accept(token)
    return sampler


def row(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


# --- the reference ---


def reference(logits: Logits, of: Request, answer: Sequence[int]) -> list[float]:
    """The probabilities by the letter of `SamplingParams` and `Request`, one rule after the other, all sorted."""
    params = of.sampling
    scores = [float(logit) for logit in logits]
    for token in {*of.prompt.tolist(), *answer}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(answer):
        scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * list(answer).count(token)
    for *before, last in of.bad_sequences:
        if list(answer[len(answer) - len(before) :]) == before and len(answer) >= len(before):
            scores[last] = -math.inf
    if len(answer) < of.min_tokens:
        for token in {*of.end_ids, *(stop[0] for stop in of.stop_sequences if len(stop) == 1)}:
            scores[token] = -math.inf
    ranking = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    best = scores[ranking[0]]
    if params.temperature == 0:
        return [float(token == ranking[0]) for token in range(len(scores))]
    left = {token: math.exp((scores[token] - best) / params.temperature) for token in ranking}
    left = normalised(left)
    left = {token: p for token, p in left.items() if p >= params.min_p * left[ranking[0]] * (1 - 1e-14)}
    if params.top_k:
        left = dict(list(left.items())[: params.top_k])
    nucleus: dict[int, float] = {}
    for token, p in normalised(left).items():
        if params.top_p < 1 and sum(nucleus.values()) >= params.top_p:
            break
        nucleus[token] = p
    nucleus = normalised(nucleus)
    return [nucleus.get(token, 0.0) for token in range(len(scores))]


def normalised(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def chi_square_tail(x: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees > x): Q(freedom/2, x/2) by its recurrence (Abramowitz & Stegun 26.4.6-8)."""
    half = x / 2
    a, tail = (1.0, math.exp(-half)) if freedom % 2 == 0 else (0.5, math.erfc(math.sqrt(half)))
    while a < freedom / 2:
        tail += math.exp(a * math.log(half) - half - math.lgamma(a + 1)) if half > 0 else 0
        a += 1
    return tail


def p_value(tokens: Sequence[int], probabilities: Sequence[float]) -> float:
    """How likely draws from `probabilities` differ from them by as much as `tokens` do; 0 if one was impossible."""
    expected = np.array(probabilities) * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0
    rare = expected < FEWEST_EXPECTED
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= FEWEST_EXPECTED:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    distance = sum((count - mean) ** 2 / mean for count, mean in cells)
    return chi_square_tail(float(distance), len(cells) - 1)


def drawn(seeded: Callable[[int], Callable[[int], int]]) -> list[int]:
    """DRAWS tokens over many seeds and positions: `seeded(seed)(position)` is one."""
    return [one(position) for one in map(seeded, range(SEEDS)) for position in range(DRAWS // SEEDS)]


# --- the whole of it ---


@st.composite
def situations(data: st.DrawFn) -> tuple[Logits, Request, list[int]]:
    """Logits on a grid, full of ties, with steps that float64 holds exactly; or anything, without ties."""
    size = data(st.integers(2, 12))
    tokens = st.integers(0, size - 1)
    sequences = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
    ties = data(st.booleans())
    if ties:
        logits = row(*data(st.lists(st.integers(-8, 8), min_size=size, max_size=size))) / 4
        repetition, penalty = st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([-0.5, 0.0, 0.25, 1.0])
    else:
        logits = np.random.default_rng(data(st.integers(0, 10**6))).normal(0, 3, size).astype(np.float32)
        repetition, penalty = st.floats(0.5, 2), st.floats(-2, 2)
    params = SamplingParams(
        temperature=data(st.just(0.0) | st.floats(0.05, 5)),
        top_k=data(st.integers(0, size + 2)),
        top_p=data(st.just(1.0) | st.floats(0.01, 1)),
        min_p=data(st.just(0.0) | st.floats(0, 1)),
        repetition_penalty=data(repetition),
        presence_penalty=data(penalty),
        frequency_penalty=data(penalty),
    )
    of = request(
        params,
        prompt=data(st.lists(tokens, min_size=1, max_size=4)),
        end_ids=data(st.lists(tokens, max_size=1)),
        min_tokens=data(st.integers(0, 4)),
        stop_sequences=data(sequences),
        bad_sequences=data(sequences),
    )
    return logits, of, data(st.lists(tokens, max_size=6))


@given(situations())
def test_probabilities_are_the_references(situation: tuple[Logits, Request, list[int]]) -> None:
    logits, of, answer = situation
    sampler = sampler_after(answer, of, len(logits))
    try:
        probabilities = sampler.probabilities(logits)
    except ValueError:
        # Whatever is masked once is masked whatever the penalties: nothing else can be left in the reference either.
        assert len(forbidden(of, answer)) == len(logits)
        return
    # A sum that meets top_p up to rounding may fall on either side of it.
    close = [
        replace(of, sampling=replace(of.sampling, top_p=of.sampling.top_p + nudge)) for nudge in (0, -1e-12, 1e-12)
    ]
    assert any(np.allclose(probabilities, reference(logits, one, answer), rtol=1e-9, atol=1e-15) for one in close)
    assert probabilities[sampler.choose(logits, 17).token] > 0


def forbidden(of: Request, answer: list[int]) -> set[int]:
    text = tuple(answer)
    early = len(answer) < of.min_tokens
    ends = {*of.end_ids, *(stop[0] for stop in of.stop_sequences if len(stop) == 1)} if early else set()
    return ends | {bad[-1] for bad in of.bad_sequences if text[max(0, len(text) - len(bad) + 1) :] == bad[:-1]}


# --- draws ---


@pytest.mark.parametrize(("x", "freedom", "tail"), [(3.841, 1, 0.05), (5.991, 2, 0.05), (27.877, 9, 0.001)])
def test_chi_square_tail_is_the_tables(x: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(x, freedom) == pytest.approx(tail, rel=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, presence_penalty=0.8),
        SamplingParams(temperature=1.0, frequency_penalty=0.5),
        EVERYTHING,
    ],
    ids=["temperature", "min_p", "top_k", "top_p", "repetition", "presence", "frequency", "everything"],
)
def test_draws_follow_the_reference(params: SamplingParams) -> None:
    of = request(params, prompt=(0, 2), bad_sequences=((3, 6),))
    answer = [3, 8, 3]

    def seeded(seed: int) -> Callable[[int], int]:
        sampler = sampler_after(answer, replace(of, sampling=replace(params, seed=seed)))
        return lambda position: sampler.choose(LOGITS, position).token

    assert p_value(drawn(seeded), reference(LOGITS, of, answer)) > LEAST_P


@pytest.mark.parametrize(
    "wrong",
    [
        replace(EVERYTHING, temperature=1.0),
        replace(EVERYTHING, min_p=0.0, top_k=0),
        replace(EVERYTHING, top_k=4),
        replace(EVERYTHING, top_p=0.7),
        replace(EVERYTHING, repetition_penalty=1.0),
        replace(EVERYTHING, frequency_penalty=0.4),
    ],
)
def test_draws_of_a_wrong_filter_are_found_out(wrong: SamplingParams) -> None:
    answer = [3, 8, 3]
    weights = np.array(reference(LOGITS, request(wrong, prompt=(0, 2)), answer))
    tokens = drawn(lambda seed: lambda position: draw(weights, seed, position))
    assert p_value(tokens, reference(LOGITS, request(EVERYTHING, prompt=(0, 2)), answer)) < LEAST_P


def test_temperature_alone_draws_what_it_always_drew() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (200, 300)).astype(np.float32)
    for position, one in enumerate(logits):
        cumulative = np.cumsum(np.exp((one.astype(np.float64) - one.max()) / 0.8))
        uniform = np.random.Generator(np.random.Philox(key=7, counter=position)).random()
        token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        sampler = Sampler(request(SamplingParams(temperature=0.8, seed=7)), 300)
        assert sampler.choose(one, position) == Choice(token, None)


def test_a_draw_depends_on_its_seed_and_position_alone() -> None:
    def one(seed: int, position: int) -> int:
        return Sampler(request(replace(EVERYTHING, seed=seed)), len(LOGITS)).choose(LOGITS, position).token

    assert [one(3, position) for position in range(50)] == [one(3, position) for position in range(50)]
    assert len({one(3, position) for position in range(50)}) > 3
    assert len({one(seed, 3) for seed in range(50)}) > 3


# --- filters and their ties ---


def test_top_k_keeps_exactly_k_and_the_lower_tokens_of_a_tie() -> None:
    sampler = Sampler(request(SamplingParams(temperature=1.0, top_k=3)), 6)
    assert sampler.probabilities(row(1, 2, 1, 1, 2, 1)).nonzero()[0].tolist() == [0, 1, 4]


@pytest.mark.parametrize("top_k", [0, 12, 13, 10**9])
def test_top_k_of_none_or_of_more_than_there_are_keeps_all(top_k: int) -> None:
    sampler = Sampler(request(SamplingParams(temperature=1.0, top_k=top_k)), len(LOGITS))
    assert (sampler.probabilities(LOGITS) > 0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, [1]), (0.125, [1]), (0.25, [1]), (0.26, [1, 2]), (0.5, [1, 2]), (1.0, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_fewest_that_reach_it_and_the_lower_tokens_of_a_tie(top_p: float, kept: list[int]) -> None:
    logits = np.log(row(0.125, 0.25, 0.25, 0.25, 0.125) * 4)
    sampler = Sampler(request(SamplingParams(temperature=1.0, top_p=top_p)), 5)
    assert sampler.probabilities(logits).nonzero()[0].tolist() == kept


def test_min_p_is_a_share_of_the_highest_probability() -> None:
    logits = np.log(row(0.4, 0.21, 0.19, 0.2001))
    sampler = Sampler(request(SamplingParams(temperature=1.0, min_p=0.5)), 4)
    assert sampler.probabilities(logits).nonzero()[0].tolist() == [0, 1, 3]


def test_a_min_p_of_1_keeps_all_that_tie_for_the_best() -> None:
    sampler = Sampler(request(SamplingParams(temperature=1.0, min_p=1.0)), 4)
    assert sampler.probabilities(row(3, 2.99, 3, 1)).tolist() == [0.5, 0, 0.5, 0]


@pytest.mark.parametrize("params", [SamplingParams(1.0, top_p=0.25), SamplingParams(1.0, top_k=256)])
def test_the_lower_tokens_of_a_long_tie_are_kept(params: SamplingParams) -> None:
    logits = np.zeros(1024, dtype=np.float32)
    assert Sampler(request(params), 1024).probabilities(logits).nonzero()[0].tolist() == list(range(256))


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(row(0.3, 0.3, 0.2, 0.2))
    sampler = Sampler(request(SamplingParams(temperature=1.0, top_k=2, top_p=0.5)), 4)
    assert sampler.probabilities(logits) == pytest.approx([1, 0, 0, 0])


def test_a_tiny_temperature_takes_the_best() -> None:
    sampler = Sampler(request(SamplingParams(temperature=1e-310)), 3)
    assert sampler.probabilities(row(-50, 3, 2.9)).tolist() == [0, 1, 0]


# --- penalties ---


def test_repetition_penalty_weakens_what_the_prompt_or_the_answer_has() -> None:
    of = request(SamplingParams(repetition_penalty=2.0), prompt=(0,))
    logits = row(3, 2, 1.75)
    assert sampler_after([], of, 3).choose(logits, 1).token == 1
    assert sampler_after([1], of, 3).choose(logits, 2).token == 2
    assert sampler_after([1], of, 3).choose(-logits, 2).token == 2


def test_presence_counts_once_and_frequency_every_time_and_the_prompt_never() -> None:
    logits = row(1, 0.5)
    presence = request(SamplingParams(presence_penalty=0.375), prompt=(0, 0, 0))
    frequency = request(SamplingParams(frequency_penalty=0.375), prompt=(0, 0, 0))
    assert [sampler_after([0] * n, presence, 2).choose(logits, 3).token for n in range(4)] == [0, 0, 0, 0]
    assert [sampler_after([0] * n, frequency, 2).choose(logits, 3).token for n in range(4)] == [0, 0, 1, 1]


# --- what must not come ---


def test_a_bad_sequence_is_never_finished() -> None:
    of = request(bad_sequences=((4,), (1, 2), (1, 1, 3)), prompt=(1,))
    by_rank = row(0, 0, 4, 3, 5, 1)
    assert sampler_after([], of, 6).choose(by_rank, 1).token == 2  # the 1 of the prompt is not part of the answer
    assert sampler_after([1], of, 6).choose(by_rank, 2).token == 3
    assert sampler_after([1, 1], of, 6).choose(by_rank, 3).token == 5
    assert sampler_after([1, 1, 5], of, 6).choose(by_rank, 4).token == 2


def test_no_bad_sequence_is_in_an_answer() -> None:
    bad = ((0, 1), (1, 1, 0), (2,))
    sampler = Sampler(request(SamplingParams(temperature=1.0, seed=1), bad_sequences=bad), 4)
    answer: list[int] = []
    for position in range(500):
        answer.append(sampler.choose(row(0, 0, 0, -1), position).token)
        sampler.accept(answer[-1])
    windows = {tuple(answer[i : i + n]) for n in (1, 2, 3) for i in range(len(answer) - n + 1)}
    assert not windows & set(bad)
    assert {(1, 0), (1, 1), (1, 1, 1), (3,)} <= windows


def test_end_tokens_and_stops_of_one_token_wait_for_min_tokens() -> None:
    of = request(end_ids=(3, 99), stop_sequences=((2,), (0, 1)), min_tokens=2)
    sampler = Sampler(of, 4)
    chosen: list[int] = []
    while not sampler.stopped():
        chosen.append(sampler.choose(row(1, 0, 2, 3), len(chosen)).token)
        sampler.accept(chosen[-1])
    assert chosen == [0, 0, 3]


def test_masks_that_leave_nothing_raise_with_numbers() -> None:
    of = request(end_ids=(1, 2), min_tokens=5, bad_sequences=((7, 0),))
    with pytest.raises(ValueError, match=r"follow 1 new ones: bad_sequences and min_tokens=5 mask 3 of 3, .* -inf"):
        sampler_after([7], of, 3).choose(row(1, 2, 3), 8)
    assert sampler_after([6], of, 3).choose(row(1, 2, 3), 8).token == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_raise(temperature: float) -> None:
    sampler = Sampler(request(SamplingParams(temperature=temperature), logprobs=1), 3)
    with pytest.raises(ValueError, match="the highest logit left is nan"):
        sampler.choose(row(1, math.nan, 3), 8)


# --- endings ---


def stops_after(answer: Sequence[int], of: Request) -> int | None:
    """How many tokens of the answer it takes to stop."""
    sampler = Sampler(of, 10)
    for token in answer:
        sampler.accept(token)
        if sampler.stopped():
            return sampler.generated
    return None


def test_an_answer_stops_at_an_end_token_or_a_stop_sequence() -> None:
    of = request(end_ids=(9,), stop_sequences=((1, 1, 2), (5, 6)), prompt=(1, 1))
    assert stops_after([3, 9, 3], of) == 2
    assert stops_after([1, 1, 1, 2, 3], of) == 4
    assert stops_after([5, 1, 5, 6], of) == 4
    assert stops_after([2, 5, 1, 6, 1, 2], of) is None
    assert not Sampler(of, 10).stopped()


def test_a_stop_sequence_finished_before_min_tokens_does_not_stop() -> None:
    of = request(stop_sequences=((5, 6),), min_tokens=3)
    assert stops_after([5, 6, 1, 2], of) is None
    assert stops_after([5, 6, 5, 6], of) == 4
    assert stops_after([1, 5, 6], of) == 3


# --- log-probabilities ---


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = np.log(row(0.5, 0.25, 0.125, 0.125))
    params = SamplingParams(temperature=0.0, repetition_penalty=100.0, top_k=1)
    of = request(params, prompt=(1,), bad_sequences=((0,),), logprobs=2)
    token, logprob = Sampler(of, 4).choose(np.float32(4) + logits, 1)
    assert token == 2
    assert logprob is not None
    assert (logprob.token, logprob.rank, [one for one, _ in logprob.top]) == (2, 3, [0, 1])
    assert logprob.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [value for _, value in logprob.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_ranks_and_alternatives_of_a_tie_go_to_the_lower_tokens() -> None:
    logits = row(0, 2, 1, 2, 1, 2)
    of = request(bad_sequences=((1,), (3,)), logprobs=4)
    token, logprob = Sampler(of, 6).choose(logits, 1)
    assert token == 5
    assert logprob is not None
    assert (logprob.rank, [one for one, _ in logprob.top]) == (3, [1, 3, 5, 2])
    assert logprob.logprob == pytest.approx(-math.log(3 + 2 * math.exp(-1) + math.exp(-2)))


@pytest.mark.parametrize(("wanted", "given"), [(0, 0), (1, 1), (20, 3)])
def test_as_many_alternatives_as_wanted_or_as_there_are(wanted: int, given: int) -> None:
    choice = Sampler(request(logprobs=wanted), 3).choose(row(1, 3, 2), 1)
    assert choice.logprob is not None
    assert [token for token, _ in choice.logprob.top] == [1, 2, 0][:given]


def test_prompt_logprobs_hold_for_large_logits() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.normal(0, 3, (5, 40)) + 10_000).astype(np.float32)
    targets = rng.integers(0, 40, 5).astype(np.int32)
    expected = [
        -math.log(math.fsum(math.exp(float(other) - float(one[target])) for other in one))
        for one, target in zip(logits, targets, strict=True)
    ]
    scores = prompt_logprobs(logits, targets)
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx(expected, rel=1e-6)
    assert prompt_logprobs(logits[:0], targets[:0]).shape == (0,)


# --- batches ---


def test_a_row_of_a_batch_is_chosen_as_if_alone() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (40, 12)).astype(np.float32)
    kinds = [SamplingParams(), EVERYTHING, SamplingParams(temperature=1.0), SamplingParams(presence_penalty=1.0)]
    requests = [request(replace(kinds[i % 4], seed=i), logprobs=2 if i % 3 == 0 else None) for i in range(40)]
    samplers = [sampler_after([i % 12, 3], one) for i, one in enumerate(requests)]
    untouched = logits.copy()
    choices = choose(logits, samplers, range(40))
    assert choices == [samplers[i].choose(logits[i], i) for i in range(40)]
    order = np.random.default_rng(4).permutation(40).tolist()
    assert choose(logits[order], [samplers[i] for i in order], order) == [choices[i] for i in order]
    assert (logits == untouched).all()


def test_plain_is_what_argmax_can_do() -> None:
    assert Sampler(request(end_ids=(3,), stop_sequences=((1, 2),), prompt=(5,)), 12).plain
    assert choose(row(0, 2, 0, 2)[None], [Sampler(request(), 4)], [0]) == [Choice(1, None)]
    assert not Sampler(request(SamplingParams(temperature=0.1)), 12).plain
    assert not Sampler(request(SamplingParams(repetition_penalty=1.1)), 12).plain
    assert not Sampler(request(SamplingParams(presence_penalty=-0.1)), 12).plain
    assert not Sampler(request(bad_sequences=((3, 4),)), 12).plain
    assert not Sampler(request(logprobs=0), 12).plain
    early = request(end_ids=(3,), min_tokens=2)
    assert [sampler_after([0] * n, early).plain for n in range(4)] == [False, False, True, True]
