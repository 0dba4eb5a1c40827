"""An answer that grows step by step: however its tokens are cut into steps, the text is the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.triton.conftest import MODEL
from trt_backend.build import find_model
from trt_backend.request import FinishReason, Output, RequestTimes, RowCounts
from trt_backend.triton.answer import Answer
from trt_backend.triton.outputs import TEXT_OUTPUTS, TOKEN_OUTPUTS, Ended
from trt_backend.triton.parse import Shape
from trt_backend.triton.text import Tokenizer

VOCAB = 2048
TOKENIZER = Tokenizer.load(find_model(MODEL), VOCAB)
END = Ended("a", FinishReason.LENGTH, None, 0, RowCounts(), RequestTimes())

token_lists = st.lists(st.one_of(st.integers(2, VOCAB - 1), st.integers(2, 257)), max_size=30)
stop_lists = st.lists(st.text(st.sampled_from("aeinrst é\n"), min_size=1, max_size=3), max_size=3)


def run(tokens: list[int], steps: list[int], shape: Shape) -> tuple[str, list[int], int]:
    """Text, tokens and number of tokens taken, with `steps` tokens in each step; a piece is taken after each."""
    answer = Answer(shape, TOKENIZER)
    text, shown = "", []
    edges = [0, *itertools.accumulate(steps), len(tokens)]
    for start, end in itertools.pairwise(edges):
        if answer.add(Output("a", tuple(tokens[start:end]))):
            break
        piece = answer.take()
        if piece is not None:
            assert shape.in_pieces
            assert piece.text
            text, shown = text + piece.text, shown + piece.tokens
    last = answer.take_last(END)
    return text + last.text, shown + last.tokens, answer.generated


@given(token_lists, st.lists(st.integers(1, 6), max_size=30), stop_lists, st.integers(0, 5), st.booleans())
def test_any_split_into_steps_gives_the_same_text(
    tokens: list[int], steps: list[int], stops: list[str], min_tokens: int, keep: bool
) -> None:
    steps = [step for step, total in zip(steps, itertools.accumulate(steps), strict=True) if total <= len(tokens)]
    outputs = TEXT_OUTPUTS | TOKEN_OUTPUTS
    whole = Shape(outputs, stops=tuple(stops), min_tokens=min_tokens, keep_stop=keep)
    pieces = Shape(outputs, True, stops=tuple(stops), min_tokens=min_tokens, keep_stop=keep)
    expected = run(tokens, [1] * len(tokens), whole)
    assert run(tokens, steps, pieces) == expected
    assert run(tokens, [], whole) == expected
    if not stops:
        assert expected == (TOKENIZER.decode(tokens), tokens, len(tokens))


def test_ids_are_held_back_with_the_text_they_belong_to() -> None:
    first, second = TOKENIZER.encode("é").tolist()[:2]
    answer = Answer(Shape(TEXT_OUTPUTS | TOKEN_OUTPUTS, in_pieces=True), TOKENIZER)
    answer.add(Output("a", (first,)))
    assert answer.take() is None
    answer.add(Output("a", (second,)))
    piece = answer.take()
    assert piece is not None
    assert (piece.text, piece.tokens) == ("é", [first, second])


def test_a_client_of_ids_alone_gets_them_as_they_come() -> None:
    first = TOKENIZER.encode("é").tolist()[0]
    answer = Answer(Shape(TOKEN_OUTPUTS, in_pieces=True), TOKENIZER)
    answer.add(Output("a", (first,)))
    piece = answer.take()
    assert piece is not None
    assert piece.tokens == [first]
