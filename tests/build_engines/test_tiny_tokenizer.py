"""The tokeniser of `glm53-tiny`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_engines.tiny.config import CHECKPOINT_DIR, TinyConfig
from build_engines.tiny.tokenizer import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    end_of_text,
    load_tokenizer,
    token_bytes,
    train_tokenizer,
)

TOKENIZER = load_tokenizer(CHECKPOINT_DIR)
SIZES = token_bytes(TOKENIZER)

# st.text() draws every code point that UTF-8 can carry; surrogates, which it can't, have their own test.
ENCODABLE = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)


@given(ENCODABLE)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_and_its_bytes_are_counted(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    specials = sum(text.count(token) for token in SPECIAL_TOKENS)
    assert specials > 0 or int(SIZES[ids].sum()) == len(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00\x01\x7f",
        "\r\n\r\n\t \n  \n",
        "\u200b\ufeff\u202e\ufffd\uffff",
        "e\u0301 \U0001f9d1\u200d\U0001f4bb \U0010ffff",
        "if x:\n        return  \n\n\n    y\n",
        "0123456789" * 5,
    ],
)
def test_edge_cases_come_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.binary(max_size=64))
@settings(max_examples=60, deadline=None)
def test_undecodable_bytes_survive_as_replacement_characters(raw: bytes) -> None:
    text = raw.decode("utf-8", errors="replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        TOKENIZER.encode("\ud800")


def test_special_tokens_stand_for_no_text() -> None:
    config = TinyConfig()
    assert TOKENIZER.get_vocab_size() == config.vocab_size
    assert end_of_text(TOKENIZER) == config.eos_token_id == config.bos_token_id
    assert SIZES[config.eos_token_id] == SIZES[config.pad_token_id] == 0
    assert int((SIZES == 0).sum()) == len(SPECIAL_TOKENS)
    assert TOKENIZER.encode(f"a{END_OF_TEXT}b").ids[1] == config.eos_token_id


def test_an_indented_line_break_is_one_token_after_a_colon() -> None:
    tokens = TOKENIZER.encode("def f(self):\n        return x").tokens
    assert [TOKENIZER.decode([TOKENIZER.token_to_id(token)]) for token in tokens][-3:] == [
        "):\n       ",
        " return",
        " x",
    ]


def test_a_corpus_too_small_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learnt 2\d\d tokens where 2048"):
        train_tokenizer(["pass"], 2048)


def test_every_byte_has_a_token() -> None:
    assert int((np.asarray(SIZES) == 1).sum()) == 256
