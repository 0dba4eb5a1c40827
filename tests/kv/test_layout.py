"""Sizes, and the settings that can't be used."""

from __future__ import annotations

import numpy as np
import pytest

from trt_backend.config import Residency
from trt_backend.kv.free_list import FreeList
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource
from trt_backend.kv.residency import POLICIES, Need, need_of

POOL, CHUNK = 100, 512


def layout(page_tokens: int = 64, hot_tokens: int = 128, ratio: int = 1) -> KvLayout:
    return KvLayout(
        (KvSource("a", 100), KvSource("b", 50, ratio)), (IndexGroup((0, 1), 128, 10),), page_tokens, hot_tokens
    )


def test_sizes_add_up_over_sources_and_ratios() -> None:
    sizes = layout(ratio=2)
    assert sizes.page_bytes == 64 * 100 + 32 * 50
    assert sizes.hot_bytes == 2 * sizes.page_bytes
    assert sizes.history_bytes(1000) == 1000 * 100 + 500 * 50
    assert sizes.index_key_bytes(1000) == 10_000
    assert (sizes.pages_for(1), sizes.pages_for(64), sizes.pages_for(65)) == (1, 1, 2)


@pytest.mark.parametrize(
    ("page_tokens", "hot_tokens", "ratio", "words"),
    [
        (64, 64, 1, "hot_tokens=64 is smaller than the largest top-k, 128 tokens; legal range: 128 and up"),
        (64, 130, 1, "hot_tokens=130 is not a multiple of page_tokens=64; nearest legal values: 128 and 192"),
        (63, 126, 2, "page_tokens=63 must be a positive multiple of every source's ratio"),
        (0, 0, 1, "page_tokens=0 must be a positive multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_would(
    page_tokens: int, hot_tokens: int, ratio: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        layout(page_tokens, hot_tokens, ratio)


def test_a_hisparse_session_needs_the_same_device_pages_however_long_it_gets() -> None:
    policy = POLICIES[Residency.HISPARSE]
    short, long = need_of(layout(), policy, 640, 900, POOL, CHUNK), need_of(layout(), policy, 640, 640_000, POOL, CHUNK)
    assert short == Need(hot=2, tail=3, history=10, windowed=False, host=15, index=15)
    assert (long.device, long.host, long.index) == (short.device, 10_000, 10_000)


def test_a_resident_session_takes_all_its_pages_and_no_host() -> None:
    need = need_of(layout(hot_tokens=0), POLICIES[Residency.RESIDENT], 640, 900, POOL, CHUNK)
    assert need == Need(hot=0, tail=0, history=15, windowed=False, host=0, index=15)
    assert need.device == 15


def test_a_prompt_longer_than_the_pool_needs_two_chunks_of_it_at_a_time() -> None:
    need = need_of(layout(), POLICIES[Residency.ADAPTIVE], 64_000, 64_200, POOL, CHUNK)
    assert need == Need(hot=2, tail=3, history=16, windowed=True, host=1004, index=1004)


def test_a_tail_is_no_longer_than_what_is_left_to_write() -> None:
    assert need_of(layout(), POLICIES[Residency.HISPARSE], 640, 641, POOL, CHUNK).tail == 1
    assert need_of(layout(), POLICIES[Residency.HISPARSE], 63, 64, POOL, CHUNK).tail == 1
    assert need_of(layout(), POLICIES[Residency.HISPARSE], 1, 200, POOL, CHUNK).tail == 3


def test_a_free_list_hands_out_each_id_once_and_takes_back_only_what_is_out() -> None:
    ids = FreeList(10)
    first, second = ids.take(4), ids.take(6)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(10))
    with pytest.raises(MemoryError, match="1 needed, 0 of 10 free"):
        ids.take(1)
    ids.give(first)
    with pytest.raises(ValueError, match="not all taken"):
        ids.give(first)
    with pytest.raises(ValueError, match="not distinct"):
        ids.give(np.array([second[0], second[0]], dtype=np.int32))
    assert (ids.free, ids.used) == (4, 6)
