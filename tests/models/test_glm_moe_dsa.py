"""Our glm_moe_dsa against transformers', on the same random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.reference import load, random_reference, random_tokens, reference_run, run

LOGIT_TOLERANCE = 1e-4
SCORE_TOLERANCE = 2e-5
"""Index scores here are of order 1 and carry the rounding of a few layers, about 1e-6."""

LAYERS: dict[str, dict[str, Any]] = {
    "every layer full": {"indexer_types": ["full"] * 6},
    "GLM-5.3's schedule": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "transformers' default schedule": {},
    "a list": {"indexer_types": ["full", "shared", "full", "shared", "shared", "full"]},
    "dense layers only": {"first_k_dense_replace": 6, "index_topk_freq": 2},
    "experts only": {"first_k_dense_replace": 0, "index_topk_freq": 2, "num_experts_per_tok": 2},
    "raw expert weights and two shared experts": {"norm_topk_prob": False, "n_shared_experts": 2},
    "few rows": {"index_topk": 16},
}


def assert_best(chosen: torch.Tensor, scores: torch.Tensor, top_k: int) -> None:
    """`chosen` bool [T, T] is a top-k of `scores` [T, keys], but for the order of scores equal within rounding."""
    scores = scores[:, : chosen.shape[1]]
    lengths = torch.arange(1, len(chosen) + 1)
    assert torch.equal(chosen.sum(1), lengths.clamp(max=top_k))
    worst_chosen = torch.where(chosen, scores, torch.inf).amin(1)
    visible = torch.ones_like(chosen).tril()
    best_left = torch.where(visible & ~chosen, scores, -torch.inf).amax(1)
    assert float((best_left - worst_chosen).max()) < SCORE_TOLERANCE


@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS.keys())
def test_logits_and_selections_equal_the_reference_beyond_top_k(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = random_reference(tmp_path, **changes)
    tokens = random_tokens(300)
    expected, chosen = reference_run(reference, tokens)
    model = load(tmp_path)

    forced = run(model, tokens, forced=chosen)
    assert float((forced.logits - expected).abs().max()) < LOGIT_TOLERANCE
    assert expected.std() > 0.5  # so that the tolerance means something
    for group, one in enumerate(chosen):
        assert_best(one, torch.cat(forced.state.scores[group]), model.config.index_topk)

    # Left to itself, our model may differ only after a selection that was a matter of rounding.
    free = run(model, tokens, chunk=64)
    first = first_difference(chosen, free.state.selections)
    assert float((free.logits[:first] - expected[:first]).abs().max()) < LOGIT_TOLERANCE
    assert first > 2 * model.config.index_topk


def first_difference(chosen: list[torch.Tensor], selections: list[torch.Tensor]) -> int:
    """The first token for which a group's selections differ, or the number of tokens."""
    tokens = len(chosen[0])
    first = tokens
    for one, selection in zip(chosen, selections, strict=True):
        ours = torch.zeros(tokens, tokens + 1, dtype=torch.bool)
        ours.scatter_(1, torch.where(selection >= 0, selection, tokens), True)
        differing = (ours[:, :tokens] != one).any(1).nonzero()
        if len(differing):
            first = min(first, int(differing[0]))
    return first


def test_logits_equal_the_reference_at_far_positions(tmp_path: Path) -> None:
    reference = random_reference(tmp_path, max_position_embeddings=1 << 20)
    tokens = random_tokens(100)
    start = 900_000
    expected, chosen = reference_run(reference, tokens, torch.arange(start, start + 100))
    ours = run(load(tmp_path), tokens, forced=chosen, first_position=start)
    assert float((ours.logits - expected).abs().max()) < LOGIT_TOLERANCE


def test_tied_embeddings_serve_as_the_output_matrix(tmp_path: Path) -> None:
    reference = random_reference(tmp_path, tie_word_embeddings=True)
    tokens = random_tokens(40)
    expected, chosen = reference_run(reference, tokens)
    ours = run(load(tmp_path), tokens, forced=chosen)
    assert float((ours.logits - expected).abs().max()) < LOGIT_TOLERANCE


def test_an_attention_that_ignored_the_selection_would_be_seen(tmp_path: Path) -> None:
    """Guards the tests above: the same session with every row visible has quite other logits."""
    reference = random_reference(tmp_path, index_topk=16)
    tokens = random_tokens(200)
    expected, _ = reference_run(reference, tokens)
    reference.config.index_topk = 200
    for layer in reference.model.layers:
        layer.self_attn.indexer.index_topk = 200
    dense, _ = reference_run(reference, tokens)
    assert float((dense - expected).abs().max()) > 100 * LOGIT_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS.keys())
def test_logits_equal_the_reference_over_600_tokens(tmp_path: Path, changes: dict[str, Any], seed: int) -> None:
    reference = random_reference(tmp_path, seed=seed, **changes)
    tokens = random_tokens(600, seed=seed)
    expected, chosen = reference_run(reference, tokens)
    model = load(tmp_path)
    ours = run(model, tokens, forced=chosen, chunk=96)
    assert float((ours.logits - expected).abs().max()) < LOGIT_TOLERANCE
    for group, one in enumerate(chosen):
        scores = torch.zeros(600, 640)
        for number, part in enumerate(ours.state.scores[group]):
            scores[96 * number : 96 * number + len(part), : part.shape[1]] = part
        assert_best(one, scores, model.config.index_topk)
