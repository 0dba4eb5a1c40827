"""The tokenizer and the detokeniser that works as tokens come."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.triton.conftest import MODEL
from trt_backend.build import find_model
from trt_backend.config import ConfigError
from trt_backend.triton.text import Detokenizer, StopFinder, Tokenizer, read_end_ids

VOCAB = 2048
TOKENIZER = Tokenizer.load(find_model(MODEL), VOCAB)

any_token = st.integers(0, VOCAB - 1)
byte_token = st.integers(2, 257)  # after the special tokens come the 256 bytes: most sequences of them are no UTF-8
token_lists = st.lists(st.one_of(any_token, byte_token), max_size=40)


@given(token_lists, st.lists(st.integers(1, 5), max_size=40))
def test_pieces_together_are_the_whole_text(tokens: list[int], steps: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces, rest = [], tokens
    for step in [*steps, len(tokens) + 1]:
        pieces.append(detokenizer.push(rest[:step]))
        rest = rest[step:]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == TOKENIZER.decode(tokens)


@given(st.text(max_size=60))
def test_encoded_text_comes_back_token_by_token(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push([token]) for token in TOKENIZER.encode(text).tolist()]
    assert "".join(pieces) + detokenizer.flush() == text


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end() -> None:
    tokens = TOKENIZER.encode("é").tolist()
    assert len(tokens) == 2
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(tokens[:1]) == ""
    assert detokenizer.push(tokens[1:]) == "é"
    assert detokenizer.push(tokens[:1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    assert Detokenizer(TOKENIZER).push([0, 1, VOCAB, -1]) == ""


few_letters = st.text("ab\u00e9", min_size=1, max_size=4)


def first_stop(text: str, stops: list[str], after: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first and not before `after`, found by trying every end."""
    for end in range(after + 1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found), end
    return None


@given(st.text("ab\u00e9", max_size=30), st.lists(few_letters, max_size=3), st.lists(st.integers(1, 5)), st.booleans())
def test_stop_strings_never_leak_a_character_and_never_eat_one_too_many(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    finder = StopFinder(stops, keep)
    shown, rest, stopped = "", text, False
    for cut in [*cuts, len(text) + 1]:
        piece, stopped = finder.push(rest[:cut])
        shown, rest = shown + piece, rest[cut:]
        found = first_stop(text, stops)
        assert text.startswith(shown)
        assert found is None or keep or len(shown) <= found[0], "part of a stop string was shown"
        if stopped:
            break
    found = first_stop(text, stops)
    assert stopped == (found is not None)
    assert shown + finder.flush() == (text if found is None else text[: found[1] if keep else found[0]])


@given(st.text("ab", max_size=20), st.lists(few_letters, min_size=1, max_size=3), st.integers(0, 20))
def test_stop_strings_before_the_least_length_are_text_like_any_other(text: str, stops: list[str], least: int) -> None:
    finder = StopFinder(stops)
    shown, stopped = "", False
    for number, letter in enumerate(text, start=1):
        piece, stopped = finder.push(letter, may_stop=number > least)
        shown += piece
        if stopped:
            break
    found = first_stop(text, stops, after=least)
    assert stopped == (found is not None)
    assert shown + finder.flush() == (text if found is None else text[: found[0]])


def test_end_ids_come_from_generation_config_if_it_names_any(tmp_path: Path) -> None:
    assert read_end_ids(tmp_path, (5,)) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    assert read_end_ids(tmp_path, (5,)) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_end_ids(tmp_path, (5,)) == {7, 8}


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
def test_a_damaged_generation_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_end_ids(tmp_path, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "the tokenizer is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "can't be read as a tokenizer"),
        (lambda path: path.write_text("{}"), "can't be read as a tokenizer"),
        (lambda path: path.write_text(path.read_text().replace('"ByteLevel"', '"Metaspace"')), "can't be read|decoder"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copy(find_model(MODEL) / "tokenizer.json", path)
    assert callable(change)
    change(path)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: ({message})"):
        Tokenizer.load(tmp_path, VOCAB)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="has token id 2047; the model's vocab_size=2000 allows 0 to 1999"):
        Tokenizer.load(find_model(MODEL), 2000)
