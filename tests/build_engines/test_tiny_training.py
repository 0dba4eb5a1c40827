"""Training a micro network: resuming, the three phases, and the two forms of attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from build_engines.tiny.attention import Selection
from build_engines.tiny.config import TinyConfig
from build_engines.tiny.evaluate import evaluate, read_evaluation
from build_engines.tiny.gathered import GatheredAttention
from build_engines.tiny.network import TinyGlm
from build_engines.tiny.schedule import Plan, Stage
from build_engines.tiny.train import StepReport, Trainer, batch_of, run

MICRO = TinyConfig(vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4)
SPARSE = replace(MICRO, index_topk=8)
PLAN = Plan((Stage("dense", 16, 2, 2), Stage("indexer", 24, 2, 2), Stage("sparse", 24, 2, 2)), warmup=2)
TEXT = np.random.default_rng(5).integers(0, 96, 400).astype(np.uint16)
ONE_BYTE_EACH = np.ones(96, dtype=np.int64)


def trainer() -> Trainer:
    return Trainer(SPARSE, PLAN, TEXT, ONE_BYTE_EACH)


def test_a_run_stopped_at_three_steps_of_six_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole, broken = trainer(), trainer()
    reports: list[StepReport] = []
    run(whole, tmp_path / "a.pt", tmp_path / "a.csv", save_every=1e9, on_step=reports.append)

    seen: list[StepReport] = []
    run(
        broken,
        tmp_path / "b.pt",
        tmp_path / "b.csv",
        save_every=1e9,
        on_step=seen.append,
        stopping=lambda: len(seen) == 3,
    )
    resumed = trainer()
    run(resumed, tmp_path / "b.pt", tmp_path / "b.csv", save_every=1e9, on_step=seen.append)

    assert [report.phase for report in reports] == ["dense", "dense", "indexer", "indexer", "sparse", "sparse"]
    assert [(r.loss, r.divergence, r.rate) for r in seen] == [(r.loss, r.divergence, r.rate) for r in reports]
    for (name, a), b in zip(whole.network.state_dict().items(), resumed.network.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert len((tmp_path / "b.csv").read_text().splitlines()) == 7


def test_each_phase_moves_only_what_it_may() -> None:
    one = trainer()

    def moved() -> tuple[bool, bool]:
        before = {name: value.clone() for name, value in one.network.named_parameters()}
        assert one.advance() is not None
        changed = {name for name, value in one.network.named_parameters() if not torch.equal(value, before[name])}
        return any(".indexer." not in name for name in changed), any(".indexer." in name for name in changed)

    assert [moved() for _ in range(6)] == [(True, False)] * 2 + [(False, True)] * 2 + [(True, True)] * 2
    assert one.advance() is None


def test_batches_depend_on_the_step_alone_and_cover_the_text_once_an_epoch() -> None:
    stage = Stage("dense", 16, 2, 12)
    assert torch.equal(batch_of(TEXT, stage, 0, 3), batch_of(TEXT, stage, 0, 3))
    epoch = torch.cat([batch_of(TEXT, stage, 0, step) for step in range(12)])
    starts = {tuple(row.tolist()) for row in epoch}
    assert len(starts) == (len(TEXT) - 1) // 16


def test_a_text_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="400 tokens hold 1 windows of 300"):
        batch_of(TEXT, Stage("dense", 300, 2, 1), 0, 0)


def test_selecting_everything_is_dense_attention() -> None:
    torch.manual_seed(1)
    network = TinyGlm(MICRO)
    tokens = torch.from_numpy(TEXT[:60].astype(np.int64)).view(2, 30)
    with torch.no_grad():
        dense = network(tokens, sparse=False).hidden
        sparse = network(tokens, sparse=True).hidden
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)


def test_gradients_through_gathered_rows_are_right() -> None:
    torch.manual_seed(2)
    query = torch.randn(70, 2, 6, dtype=torch.double, requires_grad=True)
    table = torch.randn(9, 6, dtype=torch.double, requires_grad=True)
    index, valid = torch.randint(0, 9, (70, 5)), torch.rand(70, 5) > 0.3
    valid[:, 0] = True

    def attend(q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        context: torch.Tensor = GatheredAttention.apply(q, t, index, valid, 4)[0]
        return context

    assert torch.autograd.gradcheck(attend, (query, table), fast_mode=True)


def test_a_selection_holds_the_best_scores_of_the_past_only() -> None:
    torch.manual_seed(3)
    network = TinyGlm(SPARSE)
    tokens = torch.from_numpy(TEXT[:40].astype(np.int64))[None]
    with torch.no_grad():
        result = network(tokens, sparse=True, queries=torch.arange(40))
    selection = result.cases[2].selection
    assert isinstance(selection, Selection)
    assert selection.index.shape == (1, 40, SPARSE.index_topk)
    positions = torch.arange(40)[:, None]
    assert bool((selection.index[0] <= positions).all())
    assert selection.valid[0].sum(-1).tolist() == [min(i + 1, SPARSE.index_topk) for i in range(40)]
    mass = result.cases[2].mass
    assert mass is not None
    # Layers 2 and 3 share this selection, each with a whole of attention a head.
    torch.testing.assert_close(mass.sum(-1), torch.full((1, 40), 2.0 * SPARSE.num_attention_heads))


def test_an_evaluation_reads_back_and_buckets_by_position(tmp_path: Path) -> None:
    torch.manual_seed(4)
    result = evaluate(TinyGlm(SPARSE).eval(), TEXT, ONE_BYTE_EACH, window=100, limit=2, workers=2)
    result.write(tmp_path / "score.json")
    assert read_evaluation(tmp_path / "score.json") == result
    assert (result.windows, result.tokens, result.bytes) == (2, 200, 200)
    assert [(bucket.start, bucket.stop) for bucket in result.sparse.by_position] == [(0, 64), (64, 100)]
    weighted = sum(b.bits_per_byte * (b.stop - b.start) for b in result.sparse.by_position) / 100
    assert weighted == pytest.approx(result.sparse.bits_per_byte, abs=1e-3)
