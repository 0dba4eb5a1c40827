"""The torch engine under faults: a lost row fails its own request, with the reason, and nobody else's."""

from __future__ import annotations

import argparse

import numpy as np

from tests.serving import Recorder, python_tokens, serve
from trt_backend.config import DeploymentConfig, Residency
from trt_backend.engines.base import StepBatch, StepResult
from trt_backend.request import FinishReason

NEW_TOKENS = 24
LOSES_ITS_HISTORY = 700


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
