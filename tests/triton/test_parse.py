"""From a client's wishes to a request, and what is refused on the way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trt_backend.request import ErrorCode, Request, RequestError, SamplingParams
from trt_backend.triton.inputs import Fields
from trt_backend.triton.parse import Limits, Shape, make_request
from trt_backend.triton.text import Tokenizer

LIMITS = Limits(max_model_len=1000, vocab_size=2048, end_ids=frozenset({0}))


def make(tokenizer: Tokenizer, limits: Limits = LIMITS, **fields: Any) -> tuple[Request, Shape]:
    return make_request("r1", Fields(**{"text": "import os"} | fields), tokenizer, limits)


def refusal(tokenizer: Tokenizer, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        make(tokenizer, **fields)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(caught.value).startswith("INVALID_ARGUMENT id=r1 ")
    return caught.value.detail


def test_a_request_has_the_prompts_tokens_and_the_sampling(tokenizer: Tokenizer) -> None:
    request, shape = make(tokenizer, max_tokens=5, temperature=0.7, seed=3, top_k=9, stream=True)
    assert request.prompt.dtype == np.int32
    assert tokenizer.decode(request.prompt.tolist()) == "import os"
    assert (request.max_tokens, request.end_ids) == (5, LIMITS.end_ids)
    assert request.sampling == SamplingParams(temperature=0.7, top_k=9, seed=3)
    assert (shape.in_pieces, shape.echo, shape.prompt_tokens) == (True, "", len(request.prompt))


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({}, 0.0), ({"top_k": 1}, 0.0), ({"top_k": 5}, 1.0), ({"top_p": 0.9}, 1.0), ({"min_p": 0.1}, 1.0)],
)
def test_a_filter_that_needs_chance_brings_it(tokenizer: Tokenizer, fields: dict[str, Any], temperature: float) -> None:
    assert make(tokenizer, **fields)[0].sampling.temperature == temperature


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_filters_that_are_off_are_off(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    assert make(tokenizer, **fields)[0].sampling == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"text": ""}, "text_input is empty"),
        ({"text": None}, "text_input or input_ids, one of them, must hold the prompt; neither is here"),
        ({"input_ids": (1,)}, "text_input or input_ids, one of them, must hold the prompt; both are here"),
        ({"text": None, "input_ids": ()}, "input_ids is empty"),
        ({"text": None, "input_ids": (5, 2048)}, "input_ids has token id 2048; the vocabulary has 0 to 2047"),
        ({"max_tokens": 0}, "max_tokens=0 is not legal; legal range: 1 to 1000 (max_model_len)"),
        ({"max_tokens": -5}, "max_tokens=-5 is not legal"),
        ({"max_tokens": -1, "score_prompt": True}, "max_tokens=-1 is not legal; legal range: 0 (the prompt is only"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is not legal; legal range: 0 to 4"),
        ({"temperature": -0.1}, "temperature=-0.1 is not legal"),
        ({"temperature": float("nan")}, "temperature=nan is not legal"),
        ({"temperature": float("inf")}, "temperature=inf is not legal"),
        ({"top_k": -2}, "top_k=-2 is not legal; legal: 1 and up, or 0 or -1 for all tokens"),
        ({"top_p": 1.5}, "top_p=1.5 is not legal; legal range: 0 to 1"),
        ({"top_p": float("nan")}, "top_p=nan is not legal"),
        ({"min_p": -0.5}, "min_p=-0.5 is not legal"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0 is not legal"),
        ({"presence_penalty": 3.0}, "presence_penalty=3 is not legal; legal range: -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan is not legal"),
        ({"seed": -1}, "seed=-1 is not legal; legal range: 0 to 18446744073709551615"),
        ({"logprobs": 21}, "logprobs=21 is not legal; legal range: 0 to 20"),
        ({"priority": 10}, "priority=10 is not legal; legal range: 0 to 9"),
        ({"deadline_ms": 0}, "deadline_ms=0 is not legal; legal: 1 and up"),
        ({"end_id": 5000}, "end_id has token id 5000"),
        ({"stop_token_ids": (9999,)}, "stop_token_ids has token id 9999"),
        ({"stop": ("x",) * 65}, "stop_words has 65 words; at most 64 are looked for"),
        ({"bad_words": ("x" * 1025,)}, "bad_words has a word of 1025 characters; at most 1024"),
        ({"stop_sequences": ((1, 4000),)}, "stop_words_list has token id 4000"),
        ({"text": "x\ud800"}, "the prompt is not Unicode text"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(
    tokenizer: Tokenizer, fields: dict[str, Any], detail: str
) -> None:
    assert refusal(tokenizer, **fields).startswith(detail)


def test_a_request_longer_than_the_deployment_is_refused_with_the_numbers(tokenizer: Tokenizer) -> None:
    text = "import os\n" * 50
    tokens = len(tokenizer.encode(text))
    assert refusal(tokenizer, text=text, max_tokens=999) == (
        f"max_tokens=999 with a {tokens}-token prompt needs {tokens + 999} positions; "
        "this deployment holds 1000 (max_model_len)"
    )
    assert make(tokenizer, text=text, max_tokens=1000 - tokens)[0].max_length == 1000


def test_a_huge_prompt_is_refused_without_being_tokenised(tokenizer: Tokenizer) -> None:
    size = 1001 * tokenizer.longest_token_bytes
    assert refusal(tokenizer, text=" " * size).startswith(f"a prompt of {size} bytes has at least 1001 tokens")


def test_the_default_length_fits_what_is_left(tokenizer: Tokenizer) -> None:
    assert make(tokenizer)[0].max_tokens == LIMITS.default_max_tokens
    tokens = len(tokenizer.encode("import os"))
    assert make(tokenizer, replace(LIMITS, max_model_len=tokens + 10))[0].max_tokens == 10


def test_end_ids_are_the_models_unless_the_client_says_otherwise(tokenizer: Tokenizer) -> None:
    assert make(tokenizer, end_id=7)[0].end_ids == {7}
    assert make(tokenizer, end_id=-1)[0].end_ids == frozenset()
    assert make(tokenizer, ignore_eos=True, stop_token_ids=(8,))[0].end_ids == {8}
    assert make(tokenizer, stop_token_ids=(8,))[0].end_ids == {0, 8}


def test_bad_words_are_banned_as_they_are_written_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    sequences = make(tokenizer, bad_words=("self",), bad_sequences=((5, 6),))[0].bad_sequences
    assert sequences[0] == (5, 6)
    assert [tokenizer.decode(sequence) for sequence in sequences[1:]] == ["self", " self"]


def test_a_prompt_is_echoed_when_the_client_or_the_deployment_says_so(tokenizer: Tokenizer) -> None:
    assert make(tokenizer)[1].echo == ""
    assert make(tokenizer, exclude_input=False, stream=True)[1].echo == "import os"
    echoing = replace(LIMITS, exclude_input_in_output=False)
    request, shape = make(tokenizer, echoing)
    assert (shape.echo, shape.prompt) == ("import os", tuple(request.prompt.tolist()))
    assert make(tokenizer, echoing, stream=True)[1].echo == ""
    assert make(tokenizer, echoing, exclude_input=True)[1].echo == ""
    ids = tuple(tokenizer.encode("x = 1").tolist())
    assert make(tokenizer, echoing, text=None, input_ids=ids)[1].echo == "x = 1"


def test_a_prompt_may_only_be_scored(tokenizer: Tokenizer) -> None:
    request, _ = make(tokenizer, max_tokens=0, score_prompt=True)
    assert (request.max_tokens, request.score_prompt) == (0, True)


def test_a_deadline_counts_from_the_requests_arrival(tokenizer: Tokenizer) -> None:
    before = time.monotonic_ns()
    request = make(tokenizer, deadline_ms=5000)[0]
    assert request.deadline_ms == 5000
    assert request.arrival_ns is not None
    assert before <= request.arrival_ns <= time.monotonic_ns()
