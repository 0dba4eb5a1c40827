"""Greedy tokens and logits are the same, bit for bit, wherever the rows are and whoever else is served."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import typing
from typing import Any

import numpy as np
import pytest

from tests.serving import Answer, Int32, python_tokens, serve
from trt_backend.config import DeploymentConfig, ReclaimOrder, Residency, RowFormat

NEW_TOKENS = 200
PROMPTS = 32
TOP_K = 64


def prompts_of_many_lengths(count: int, longest: int) -> list[Int32]:
    """`count` stretches of the standard library, 50 to `longest` tokens, no two of one length; in mixed order."""
    text = np.concatenate([python_tokens(module) for module in (argparse, typing, inspect, subprocess)])
    lengths = np.unique(np.geomspace(50, longest, count).astype(int))
    assert len(lengths) == count
    starts = np.random.default_rng(7).integers(0, len(text) - longest, count)
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return [prompts[i] for i in np.random.default_rng(8).permutation(count)]


def assert_same(answers: dict[int, Answer], expected: dict[int, Answer]) -> None:
    assert answers.keys() == expected.keys()
    for length, answer in answers.items():
        assert answer.tokens == expected[length].tokens, f"tokens of the {length}-token prompt differ"
        same = np.array_equal(np.array(answer.logits), np.array(expected[length].logits))
        assert same, f"logits of the {length}-token prompt differ"


@pytest.fixture(scope="module")
def prompts() -> list[Int32]:
    return prompts_of_many_lengths(PROMPTS, 6000)


@pytest.fixture(scope="module")
def resident(prompts: list[Int32]) -> dict[int, Answer]:
    """Everything on the device, all sessions in one batch."""
    config = DeploymentConfig(residency=Residency.RESIDENT, max_sessions=PROMPTS, prefill_chunk_tokens=512)
    answers, _ = serve(config, prompts, NEW_TOKENS)
    assert all(len(answer.tokens) == NEW_TOKENS == len(answer.logits) for answer in answers.values())
    return answers


@pytest.mark.parametrize(("sessions", "chunk", "device_pages"), [(PROMPTS, 512, 280), (5, 208, 130)])
def test_hisparse_equals_resident_whatever_the_batch_and_the_chunk(
    prompts: list[Int32], resident: dict[int, Answer], sessions: int, chunk: int, device_pages: int
) -> None:
    config = DeploymentConfig(
        residency=Residency.HISPARSE,
        hot_tokens=2 * TOP_K,
        max_sessions=sessions,
        prefill_chunk_tokens=chunk,
        device_pages=device_pages,
    )
    histories = sum((len(prompt) + NEW_TOKENS) // 64 for prompt in prompts)
    assert device_pages < histories, "the pool must be too small to hold all histories"
    answers, runtime = serve(config, prompts, NEW_TOKENS)
    assert_same(answers, resident)
    rows = runtime.scheduler.snapshot().totals.rows
    assert rows.masked == 0
    assert min(rows.direct, rows.hot, rows.host) > 10_000, f"all three ways must be taken: {rows}"
    assert runtime.hierarchy.pages.budget.free == device_pages
    assert (runtime.hierarchy.host.used, runtime.hierarchy.index.used, runtime.hierarchy.slots.used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("device_pages", "sessions", "settings"),
    [
        # Requests come and go: memory is lent, taken back in every order, and lent again.
        (150, 6, {"reclaim_order": ReclaimOrder.OLDEST}),
        (150, 6, {"reclaim_order": ReclaimOrder.COLDEST, "promote_decode_pages": False, "backup_pages_per_tick": 0}),
        (150, 9, {"reclaim_order": ReclaimOrder.NEWEST, "reserve_pages": 0, "refill_hysteresis_pages": 0}),
        # The longest prompts, of up to 94 pages, don't fit: they are imported through a window.
        (60, 5, {"reclaim_order": ReclaimOrder.LARGEST, "prefill_chunk_tokens": 256}),
    ],
)
def test_adaptive_equals_resident_under_reclaim_and_refill(
    prompts: list[Int32],
    resident: dict[int, Answer],
    device_pages: int,
    sessions: int,
    settings: dict[str, Any],
) -> None:
    some = prompts[::2]
    config = DeploymentConfig(
        residency=Residency.ADAPTIVE,
        hot_tokens=2 * TOP_K,
        max_sessions=sessions,
        device_pages=device_pages,
        **settings,
    )
    answers, runtime = serve(config, some, NEW_TOKENS, waves=4)
    assert_same(answers, {len(prompt): resident[len(prompt)] for prompt in some})
    moved, rows = runtime.hierarchy.moved, runtime.scheduler.snapshot().totals.rows
    assert rows.masked == 0
    assert min(moved.reclaimed, moved.refilled, moved.backed_up) > 20, f"memory must go both ways: {moved}"
    assert settings.get("promote_decode_pages", True) or moved.promoted == 0
    assert runtime.hierarchy.pages.budget.free == device_pages


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FP8])
def test_hisparse_equals_resident_in_every_row_format(row_format: RowFormat) -> None:
    prompts = prompts_of_many_lengths(4, 900)
    shared = {"row_format": row_format, "max_sessions": 4}
    expected, _ = serve(DeploymentConfig(residency=Residency.RESIDENT, **shared), prompts, 40)
    answers, runtime = serve(DeploymentConfig(residency=Residency.HISPARSE, **shared), prompts, 40)
    assert_same(answers, expected)
    assert runtime.scheduler.snapshot().totals.rows.host > 0


def test_a_session_s_logits_do_not_depend_on_its_neighbours_or_its_chunks() -> None:
    prompts = prompts_of_many_lengths(6, 1200)
    together, _ = serve(DeploymentConfig(max_sessions=6, prefill_chunk_tokens=1024), prompts, 24)
    for prompt, chunk in zip(prompts, (16, 48, 100, 333, 512, 4096), strict=True):
        alone, _ = serve(DeploymentConfig(max_sessions=1, prefill_chunk_tokens=chunk), [prompt], 24)
        assert_same(alone, {len(prompt): together[len(prompt)]})
