"""A token's logits are the same bits whatever batch, chunk and place it is computed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.dense_state import DenseState
from tests.models.reference import load, random_reference, random_tokens, run
from trt_backend.config import RowFormat
from trt_backend.models.glm_moe_dsa import GlmMoeDsa
from trt_backend.models.registry import kv_layout
from trt_backend.models.rows import KeyCodec

SCHEDULE = {"index_topk_freq": 2, "index_skip_topk_offset": 2, "num_hidden_layers": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_reference(path, **SCHEDULE)
    return path


@pytest.fixture(scope="module", params=RowFormat)
def model(request: pytest.FixtureRequest, folder: Path) -> GlmMoeDsa:
    return load(folder, request.param)


def row_format_of(model: GlmMoeDsa) -> RowFormat:
    return model.layers[0].attention.codec.format


def new_state(model: GlmMoeDsa, capacity: int) -> DenseState:
    row_format = row_format_of(model)
    layout = kv_layout(model.config, row_format, page_tokens=64, hot_tokens=0)
    return DenseState(layout, KeyCodec(row_format, model.config.index_head_dim), capacity)


class Side:
    """Several sessions side by side in one step, each with a `DenseState` of its own (a `KvState`)."""

    def __init__(self) -> None:
        self._states: list[DenseState] = []
        self._counts: list[int] = []

    def begin(self, states: list[DenseState], counts: list[int]) -> torch.Tensor:
        """Start a step of so many tokens of each of these sessions; their positions."""
        self._states, self._counts = states, counts
        return torch.cat([state.begin(count) for state, count in zip(states, counts, strict=True)])

    def write_rows(self, source: int, rows: torch.Tensor) -> None:
        for state, part in zip(self._states, torch.split(rows, self._counts), strict=True):
            state.write_rows(source, part)

    def write_index_keys(self, group: int, keys: torch.Tensor) -> None:
        for state, part in zip(self._states, torch.split(keys, self._counts), strict=True):
            state.write_index_keys(group, part)

    def select(self, group: int, queries: torch.Tensor, weights: torch.Tensor) -> None:
        parts = torch.split(queries, self._counts), torch.split(weights, self._counts)
        for state, query, weight in zip(self._states, *parts, strict=True):
            state.select(group, query, weight)

    def read_rows(self, source: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [state.read_rows(source, slice(0, n)) for state, n in zip(self._states, self._counts, strict=True)]
        rows, valid = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        rows[~valid] = rows[0, 0].clone()  # whatever was once written may stand where nothing is selected
        return rows[tokens], valid[tokens]


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 130])
def test_logits_do_not_depend_on_the_chunk(model: GlmMoeDsa, chunk: int) -> None:
    tokens = random_tokens(200 if chunk > 1 else 90)
    whole = run(model, tokens, row_format=row_format_of(model))
    parts = run(model, tokens, chunk=chunk, row_format=row_format_of(model))
    assert torch.equal(parts.logits, whole.logits)
    for group, selection in enumerate(whole.state.selections):
        assert torch.equal(parts.state.selections[group], selection)


def test_logits_do_not_depend_on_who_else_is_in_the_batch(model: GlmMoeDsa) -> None:
    lengths = [150, 33, 1, 97, 64]
    sessions = [random_tokens(length, seed=length) for length in lengths]
    alone = [run(model, tokens, row_format=row_format_of(model)).logits for tokens in sessions]
    side, states = Side(), [new_state(model, length) for length in lengths]
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    generator = torch.Generator().manual_seed(4)
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        wanted = torch.randint(0, 40, (len(lengths),), generator=generator).tolist()
        counts = [min(n, length - position) for n, length, position in zip(wanted, lengths, done, strict=True)]
        active = [number for number, count in enumerate(counts) if count]
        if not active:
            continue
        positions = side.begin([states[number] for number in active], [counts[number] for number in active])
        step = torch.cat([sessions[number][done[number] : done[number] + counts[number]] for number in active])
        logits = model.forward(step, positions, side, torch.arange(len(step)))
        for number, part in zip(active, torch.split(logits, [counts[number] for number in active]), strict=True):
            got[number].append(part)
            done[number] += counts[number]
    for number, expected in enumerate(alone):
        assert torch.equal(torch.cat(got[number]), expected)


def test_logits_do_not_depend_on_which_logits_are_wanted(model: GlmMoeDsa) -> None:
    tokens = random_tokens(80)
    whole = run(model, tokens, row_format=row_format_of(model)).logits
    for wanted in ([], [79], [5, 0, 79], list(range(79, 40, -1))):
        state = new_state(model, 80)
        logits = model.forward(tokens, state.begin(80), state, torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(logits, whole[wanted])


def test_logits_do_not_depend_on_the_number_of_threads(folder: Path) -> None:
    model = load(folder)
    tokens = random_tokens(200)
    one = run(model, tokens).logits
    torch.set_num_threads(2)
    two = run(model, tokens, chunk=90).logits
    torch.set_num_threads(1)
    assert torch.equal(one, two)


def test_narrow_rows_change_logits_a_little(tmp_path: Path) -> None:
    # Dense layers only: where random experts nearly tie, the smallest error sends a token to another one.
    random_reference(tmp_path, **SCHEDULE, first_k_dense_replace=5)
    tokens = random_tokens(120)
    exact = run(load(tmp_path), tokens)
    selected = [
        torch.zeros(120, 121, dtype=torch.bool).scatter_(1, torch.where(one >= 0, one, 120), True)[:, :120]
        for one in exact.state.selections
    ]
    spread = float(exact.logits.std())
    for row_format, bound in ((RowFormat.BF16, 0.01), (RowFormat.FP8, 0.1)):
        narrow = run(load(tmp_path, row_format), tokens, row_format=row_format, forced=selected)
        error = float((narrow.logits - exact.logits).pow(2).mean().sqrt()) / spread
        assert 0 < error < bound
