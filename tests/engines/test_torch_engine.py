"""The torch engine: what becomes of rows whose page leaves the tail, and of requests whose rows are lost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.serving import Answer, Int32, Recorder, python_tokens, serve
from trt_backend.config import DeploymentConfig, Residency
from trt_backend.engines.base import Engine, StepBatch, StepResult
from trt_backend.engines.torch_engine import TorchEngine
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.tables import Recycled
from trt_backend.kv.transfers import Fence
from trt_backend.request import FinishReason

NEW_TOKENS = 24
LOSES_ITS_HISTORY = 700


class CountsRefetches(Recorder):
    """Counts rows that had been on the device until their page was recycled, that the step before had selected, and
    that were fetched from the host all the same.

    Copies between device and host are over at once, so that pages leave at the same steps in every run.
    """

    refetched = 0

    def __init__(self, engine: Engine, hierarchy: Hierarchy, answers: dict[int, Answer]) -> None:
        super().__init__(engine, hierarchy, answers)
        stream = hierarchy._movement._transfers.stream
        submit = stream.submit

        def submit_and_wait(work: Callable[[], None], after: Fence) -> Fence:
            fence = submit(work, after)
            assert fence._over.wait(timeout=60)
            return fence

        stream.submit = submit_and_wait

    def step(self, batch: StepBatch) -> StepResult:
        latest = [selected.copy() for selected in self._engine.latest]
        result = self.hand_on(batch)
        decoding = batch.slots[: batch.decodes].tolist()
        for one in batch.recycled:
            if one.slot in decoding:
                self.refetched += sum(
                    len(np.intersect1d(self._fetched(group, one, decoding.index(one.slot)), selected[one.slot]))
                    for group, selected in enumerate(latest)
                )
        return result

    def hand_on(self, batch: StepBatch) -> StepResult:
        return super().step(batch)

    def _fetched(self, group: int, page: Recycled, line: int) -> Int32:
        """Positions of a page that line `line` of the last step fetched from the host."""
        plan, page_rows = self._engine.plans[group], self._engine.resolver_tables[group].page_rows
        host_pages, offsets = np.divmod(plan.fetch_host_rows[line, : plan.fetch_counts[line]], page_rows)
        return page.index * page_rows + offsets[host_pages == self.tables.host_map[page.slot, page.index]]


class NeverAdopts(CountsRefetches):
    """Keeps from the engine which pages are recycled."""

    def hand_on(self, batch: StepBatch) -> StepResult:
        return super().hand_on(replace(batch, recycled=()))


@pytest.mark.parametrize("hot_tokens", [64, 256])
def test_selected_rows_of_recycled_pages_are_not_fetched_from_the_host(hot_tokens: int) -> None:
    text = python_tokens(argparse)
    prompts = [text[:60], text[5000:5075]]
    config = DeploymentConfig(residency=Residency.HISPARSE, max_sessions=2, hot_tokens=hot_tokens)
    answers, runtime = serve(config, prompts, 400, recorder=CountsRefetches)
    expected, without = serve(config, prompts, 400, recorder=NeverAdopts)
    assert runtime.hierarchy.moved.recycled > 10
    assert runtime.scheduler._engine.refetched == 0
    saved = without.scheduler._engine.refetched
    assert saved > 500
    # Not by just as much: an adopted row may serve many steps, and it takes the slot of one that may be wanted again.
    fetched, fetched_without = (r.scheduler.snapshot().totals.rows.host for r in (runtime, without))
    assert fetched < fetched_without - saved / 2
    for length, answer in answers.items():
        assert answer.tokens == expected[length].tokens
        assert np.array_equal(answer.logits, expected[length].logits)


def test_the_new_owner_of_a_slot_adopts_nothing_of_the_old_one_s() -> None:
    text = python_tokens(argparse)
    config = DeploymentConfig(residency=Residency.HISPARSE, max_sessions=2)
    _, runtime = serve(config, [text[:100], text[:99]], NEW_TOKENS)
    engine = runtime.scheduler._engine._engine
    assert isinstance(engine, TorchEngine)
    assert all((selected >= 0).any(axis=1).all() for selected in engine.latest)
    engine.open_slot(1)
    for selected in engine.latest:
        assert (selected[0] >= 0).any()
        assert (selected[1] == -1).all()


class LosesRows(Recorder):
    """Forgets where the host pages of one session are, as soon as it decodes."""

    def step(self, batch: StepBatch) -> StepResult:
        for slot, session in self._hierarchy.sessions.items():
            if session.prompt_tokens == LOSES_ITS_HISTORY and not session.importing:
                self.tables.host_map[slot, :6] = -1
                self.tables.ready_map[slot, :6] = -1
        return super().step(batch)


class LosesPages(Recorder):
    """Forgets the first pages of one session while its prompt is being imported."""

    def step(self, batch: StepBatch) -> StepResult:
        for slot, session in self._hierarchy.sessions.items():
            if session.prompt_tokens == LOSES_ITS_HISTORY and session.length > 128:
                self.tables.ready_map[slot, :2] = -1
                self.tables.host_map[slot, :2] = -1
        return super().step(batch)


def test_a_lost_row_fails_its_own_request_and_leaves_the_others_alone() -> None:
    text = python_tokens(argparse)
    prompts = [text[:LOSES_ITS_HISTORY], text[100:900], text[3000:3333]]
    config = DeploymentConfig(residency=Residency.HISPARSE, max_sessions=3)
    sound, _ = serve(config, prompts, NEW_TOKENS)
    answers, _ = serve(config, prompts, NEW_TOKENS, recorder=LosesRows)
    lost = answers[LOSES_ITS_HISTORY].last
    assert lost is not None
    assert lost.finish is FinishReason.ERROR
    assert str(lost.error).startswith(f"INTERNAL id={LOSES_ITS_HISTORY} ")
    assert f"{lost.rows.masked} selected rows were neither on the device nor on the host" in str(lost.error)
    assert lost.rows.masked > 0
    for length in (800, 333):
        assert answers[length].tokens == sound[length].tokens
        assert np.array_equal(answers[length].logits, sound[length].logits)


def test_a_prompt_whose_pages_are_lost_fails_instead_of_reading_others() -> None:
    text = python_tokens(argparse)
    config = DeploymentConfig(residency=Residency.HISPARSE, max_sessions=1, prefill_chunk_tokens=64)
    answers, runtime = serve(config, [text[:LOSES_ITS_HISTORY], text[3000:3333]], NEW_TOKENS, recorder=LosesPages)
    failed, later = answers[LOSES_ITS_HISTORY], answers[333]
    assert failed.last is not None
    assert "selected rows of prompts are nowhere" in str(failed.last.error)
    assert not failed.tokens
    assert len(later.tokens) == NEW_TOKENS
    assert runtime.scheduler.failure is None
