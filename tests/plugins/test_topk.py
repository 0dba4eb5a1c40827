"""Top-k: the host twin against sorting, at every kind of tie and special value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import host, oracle
from plugins.host import Float32, Int32, Threads
from tests.plugins.worlds import KS

orders = st.one_of(st.just(Threads()), st.builds(Threads, st.sampled_from((1, 32, 256, 1024)), st.integers(0, 2**32)))


def spread(rng: np.random.Generator, shape: tuple[int, int]) -> Float32:
    return rng.standard_normal(shape).astype(np.float32)


def few_values(rng: np.random.Generator, shape: tuple[int, int]) -> Float32:
    return rng.choice(np.array([0.0, -0.0, 1.0, -np.inf, np.nan, -2.5], dtype=np.float32), shape)


def all_equal(rng: np.random.Generator, shape: tuple[int, int]) -> Float32:
    return np.full(shape, rng.standard_normal(), dtype=np.float32)


def neighbours(rng: np.random.Generator, shape: tuple[int, int]) -> Float32:
    """Values that differ in their last 12 bits only, so that the search needs every digit."""
    bits = rng.integers(0, 4096, shape).astype(np.uint32) + np.uint32(rng.choice((0x3F800000, 0xBF800000)))
    return bits.view(np.float32)


def any_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Float32:
    """Every float: subnormals, infinities, NaN of both signs."""
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


def check_equals_oracle(kind: int, k: int, stride: int, seed: int, threads: Threads) -> None:
    rng = np.random.default_rng(seed)
    scores = (spread, few_values, all_equal, neighbours, any_bits)[kind](rng, (3, stride))
    visible = rng.integers(0, stride + 1, 3).astype(np.int32)
    visible[0] = stride
    out = rng.integers(-(2**31), 2**31, (3, k)).astype(np.int32)
    np.testing.assert_array_equal(host.topk(scores, visible, k, out, threads), oracle.topk(scores, visible, k))


cases = given(
    st.integers(0, 4),
    st.sampled_from(KS),
    st.one_of(st.integers(1, 300), st.integers(1, 12_000)),
    st.integers(0, 2**32 - 1),
    orders,
)


@settings(max_examples=150, deadline=None)
@cases
def test_equals_sorting(kind: int, k: int, stride: int, seed: int, threads: Threads) -> None:
    check_equals_oracle(kind, k, stride, seed, threads)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None)
@cases
def test_equals_sorting_in_many_cases(kind: int, k: int, stride: int, seed: int, threads: Threads) -> None:
    check_equals_oracle(kind, k, stride, seed, threads)


def line(*scores: float) -> Float32:
    return np.array([scores], dtype=np.float32)


def seen(count: int) -> Int32:
    return np.array([count], dtype=np.int32)


def test_ties_go_to_the_lower_position() -> None:
    assert host.topk(line(1, 3, 2, 3, 2, 2), seen(6), 3).tolist() == [[1, 2, 3]]


def test_zeros_of_both_signs_are_equal() -> None:
    assert host.topk(line(-0.0, 0.0, -1.0, 0.0), seen(4), 2).tolist() == [[0, 1]]


def test_nan_ranks_with_minus_infinity() -> None:
    assert host.topk(line(np.nan, -np.inf, -1e38, np.nan, np.inf), seen(5), 3).tolist() == [[0, 2, 4]]
    assert host.topk(line(-np.inf, np.nan, -np.inf, 0.0), seen(4), 3).tolist() == [[0, 1, 3]]


def test_a_short_line_is_chosen_whole_whatever_its_scores() -> None:
    assert host.topk(line(np.nan, np.nan, 7.0, 8.0), seen(2), 3).tolist() == [[0, 1, -1]]
    assert host.topk(line(5.0, 6.0), seen(0), 2).tolist() == [[-1, -1]]


def test_scores_beyond_the_visible_ones_are_no_candidates() -> None:
    assert host.topk(line(1, 2, 3, 99, 99), seen(3), 2).tolist() == [[1, 2]]


def test_lines_may_be_strided() -> None:
    wide = np.arange(40, dtype=np.float32).reshape(4, 10)
    assert host.topk(wide[::2, :5], np.array([5, 4], dtype=np.int32), 2).tolist() == [[3, 4], [2, 3]]


def test_a_million_scores_that_all_tie() -> None:
    scores = np.zeros((1, 1_000_000), dtype=np.float32)
    assert host.topk(scores, seen(1_000_000), 2048)[0].tolist() == list(range(2048))


def test_wrong_arguments_are_refused_with_their_numbers() -> None:
    scores = line(1, 2, 3)
    with pytest.raises(ValueError, match=r"visible\[0\]=4; legal range: 0 to 3"):
        host.topk(scores, seen(4), 2)
    with pytest.raises(ValueError, match=r"visible\[0\]=-1; legal range: 0 to 3"):
        host.topk(scores, seen(-1), 2)
    with pytest.raises(ValueError, match="k=0 must be positive"):
        host.topk(scores, seen(3), 0)
    with pytest.raises(ValueError, match=r"scores must be of dtype float32.*64 bits"):
        host.topk(scores.astype(np.float64), seen(3), 2)
    with pytest.raises(ValueError, match="axis 1 has a stride of 2 elements instead of 1"):
        host.topk(scores[:, ::2], seen(2), 1)
    with pytest.raises(ValueError, match=r"out has shape \[1, 3\], expected \[1, 2\]"):
        host.topk(scores, seen(3), 2, np.zeros((1, 3), dtype=np.int32))
