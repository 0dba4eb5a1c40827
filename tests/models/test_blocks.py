"""Building blocks: each against its formula, and each with the same bits whoever else is in the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from trt_backend.models.blocks import (
    Mlp,
    Rotary,
    halves_first,
    in_pieces,
    layer_norm,
    linear,
    linear_per_head,
    pad_rows,
    rms_norm,
    rotate,
    swiglu,
)
from trt_backend.models.experts import MoE, Router
from trt_backend.models.indexer import index_scores, prompt_scores, token_blocks

SHAPES = [(192, 276), (96, 320), (192, 96), (48, 192), (192, 8), (192, 2048), (33, 17), (64, 2), (7, 3), (768, 192)]
HEAD_SHAPES = [(4, 32, 128), (4, 128, 48), (1, 24, 128), (7, 5, 9)]
ROWS = 96

RowFunction = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[pytest.param(1, id="1 thread"), pytest.param(2, id="2 threads", marks=pytest.mark.long)])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moe(top_k: int = 2, *, normalise: bool = True, experts: int = 8) -> MoE:
    return MoE.of(
        router=Router(normal(64, experts, seed=1) / 8, normal(experts, seed=2) * 0.1, top_k, normalise, 2.5),
        experts=[Mlp(normal(64, 48, seed=10 + i) / 8, normal(24, 64, seed=30 + i) / 5) for i in range(experts)],
        shared=Mlp(normal(64, 96, seed=3) / 8, normal(48, 64, seed=4) / 7),
    )


def row_functions() -> dict[str, tuple[int, RowFunction]]:
    """Every block as a function of [16 n, width], by name."""
    functions: dict[str, tuple[int, RowFunction]] = {}
    for inputs, outputs in SHAPES:
        weight = normal(inputs, outputs)
        functions[f"linear {inputs} {outputs}"] = (inputs, lambda x, w=weight: linear(x, w))  # type: ignore[misc]
    for heads, inputs, outputs in HEAD_SHAPES:
        weight = normal(heads, inputs, outputs)
        functions[f"linear_per_head {heads} {inputs} {outputs}"] = (
            heads * inputs,
            lambda x, w=weight: linear_per_head(x.view(len(x), *w.shape[:2]), w).flatten(1),  # type: ignore[misc]
        )
    gain, shift = normal(192, seed=5), normal(192, seed=6)
    functions["rms_norm"] = (192, lambda x: rms_norm(x, gain, 1e-5))
    functions["rms_norm of a part"] = (300, lambda x: rms_norm(x[:, 50:242], gain, 1e-5))
    functions["layer_norm"] = (192, lambda x: layer_norm(x, gain, shift, 1e-6))
    functions["swiglu"] = (768, swiglu)
    functions["sigmoid"] = (250, lambda x: in_pieces(torch.sigmoid, x))
    mixture = moe()
    functions["router"] = (64, lambda x: torch.cat(mixture.router(x), dim=-1))
    functions["experts"] = (64, lambda x: mixture(x, len(x)))
    wide = moe(8, experts=16)
    functions["many experts"] = (64, lambda x: wide(x, len(x)))
    return functions


FUNCTIONS = row_functions()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("width", "function"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_row_has_the_same_bits_whatever_its_place_and_company(width: int, function: RowFunction) -> None:
    x = normal(ROWS, width, seed=7)
    alone = torch.cat([function(pad_rows(x[row : row + 1]))[:1] for row in range(ROWS)])
    generator = torch.Generator().manual_seed(8)
    for rows in (16, 32, 48, ROWS):
        assert torch.equal(function(x[:rows].clone()), alone[:rows])
        order = torch.randperm(ROWS, generator=generator)
        assert torch.equal(function(x[order][:rows].clone()), alone[order[:rows]])
    company = normal(1024, width, seed=9)
    company[500 : 500 + ROWS] = x
    assert torch.equal(function(company)[500 : 500 + ROWS], alone)


def test_linear_is_a_product() -> None:
    x, weight = normal(48, 70), normal(70, 30, seed=1)
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double(), rtol=1e-5, atol=1e-5)


def test_linear_per_head_is_a_product_for_each_head() -> None:
    for rows in (16, 48):
        x, weight = normal(rows, 3, 20), normal(3, 20, 10, seed=1)
        expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
        torch.testing.assert_close(linear_per_head(x, weight).double(), expected, rtol=1e-5, atol=1e-5)


def test_padding_adds_zero_rows_up_to_a_block() -> None:
    x = normal(17, 3)
    assert torch.equal(pad_rows(x), torch.cat([x, torch.zeros(15, 3)]))
    assert pad_rows(x[:16]).shape == (16, 3)
    assert pad_rows(x[:0]).shape == (0, 3)


def test_norms_follow_their_formulas() -> None:
    x, gain, shift = normal(16, 40).double(), normal(40, seed=1).double(), normal(40, seed=2).double()
    expected = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * gain
    torch.testing.assert_close(rms_norm(x.float(), gain.float(), 1e-5), expected.float())
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6) * gain + shift
    torch.testing.assert_close(layer_norm(x.float(), gain.float(), shift.float(), 1e-6), expected.float())


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    rotary = Rotary.of(100.0, 6)
    positions = torch.tensor([0, 1, 5, 1000])
    x = normal(4, 2, 6)
    cos, sin = rotary.tables(positions)
    rotated = rotate(halves_first(x.transpose(1, 2), 6).transpose(1, 2), cos, sin)
    pairs = torch.view_as_complex(x.double().view(4, 2, 3, 2))
    angles = positions.double()[:, None, None] * 100.0 ** -(torch.arange(3).double() / 3)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated[..., :3].double(), expected.real, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotated[..., 3:].double(), expected.imag, rtol=1e-4, atol=1e-4)
    assert torch.equal(rotated[0], torch.cat([x[0, :, 0::2], x[0, :, 1::2]], dim=-1))


def test_rotation_tables_have_the_same_bits_whatever_the_company() -> None:
    rotary = Rotary.of(8e6, 64)
    positions = torch.randint(0, 1 << 20, (2048,), generator=torch.Generator().manual_seed(1))
    together = rotary.tables(positions)
    for start in range(0, 2048, 128):
        apart = rotary.tables(positions[start : start + 16])
        assert all(torch.equal(a, b[start : start + 16]) for a, b in zip(apart, together, strict=True))


def test_experts_with_equal_scores_are_chosen_from_the_lowest() -> None:
    router = Router(torch.zeros(4, 6), torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), 4, True, 2.5)
    experts, weights = router(torch.ones(16, 4))
    assert experts.tolist() == [[1, 3, 4, 0]] * 16
    assert torch.equal(weights, torch.full((16, 4), 0.25 * 2.5))


def test_the_bias_chooses_experts_but_does_not_weigh_them() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    router = Router(torch.diag(logits), torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, False, 1.0)
    experts, weights = router(torch.ones(16, 4))
    assert experts[0].tolist() == [3, 0]
    torch.testing.assert_close(weights[0], torch.sigmoid(logits[[3, 0]]))


@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_a_mixture_is_the_weighed_sum_of_its_experts_and_the_shared_one(tokens: int) -> None:
    mixture = moe(3)
    x = normal(tokens, 64, seed=7)
    experts, weights = mixture.router(pad_rows(x))
    expected = mixture.shared(pad_rows(x))[:tokens]
    for token in range(tokens):
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            expected[token] += (
                Mlp(mixture.gate_up[expert], mixture.down[expert])(pad_rows(x[token : token + 1]))[0] * weight
            )
    torch.testing.assert_close(mixture(pad_rows(x), tokens)[:tokens], expected)


def test_an_index_score_follows_its_formula() -> None:
    queries, weights, keys = normal(10, 3, 16), normal(10, 3, seed=1), normal(2, 64, 16, seed=2)
    dots = torch.einsum("thd,kd->thk", queries.double(), keys.double().flatten(0, 1))
    expected = (weights.double().unsqueeze(-1) * dots.relu()).sum(1)
    torch.testing.assert_close(prompt_scores(queries, weights, keys).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("heads", "dim", "block"), [(4, 32, 64), (32, 128, 64), (1, 16, 16), (3, 20, 48)])
def test_an_index_score_has_the_same_bits_whatever_else_is_scored(heads: int, dim: int, block: int) -> None:
    queries, weights, keys = normal(40, heads, dim), normal(40, heads, seed=1), normal(12, block, dim, seed=2)
    together = prompt_scores(queries, weights, keys)
    assert torch.equal(prompt_scores(queries[:7], weights[:7], keys[:1]), together[:7, :block])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(prompt_scores(queries[order], weights[order], keys), together[order])
    for token in (0, 13, 39):  # a decoding token: alone in its block, against some blocks of keys in any order
        lone = token_blocks(queries[token : token + 1]), token_blocks(weights[token : token + 1])
        for some in (torch.tensor([5]), torch.randperm(12, generator=torch.Generator().manual_seed(token))):
            scores = index_scores(lone[0].expand(len(some), -1, -1, -1), lone[1].expand(len(some), -1, -1), keys[some])
            assert torch.equal(scores[:, 0], together[token].view(12, block)[some])
