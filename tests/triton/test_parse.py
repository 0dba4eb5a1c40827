"""From tensors to a request, and what is refused on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_backend.request import ErrorCode, Request, RequestError, SamplingParams
from trt_backend.triton.parse import DEFAULT_MAX_TOKENS, Fields, make_request, read_fields
from trt_backend.triton.text import Tokenizer

MAX_MODEL_LEN = 1000
END_IDS = frozenset({0})


def tensor(value: Any, shape: tuple[int, ...] = (1,), dtype: Any = np.object_) -> Any:
    return np.full(shape, value, dtype=dtype)


def refusal(tokenizer: Tokenizer, fields: Fields) -> str:
    with pytest.raises(RequestError) as caught:
        make_request("r1", fields, tokenizer, END_IDS, MAX_MODEL_LEN)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(caught.value).startswith("INVALID_ARGUMENT id=r1 ")
    return caught.value.detail


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_all_inputs_are_read_in_either_shape(shape: tuple[int, ...]) -> None:
    fields = read_fields(
        "r1",
        {
            "text_input": tensor("déf".encode(), shape),
            "max_tokens": tensor(7, shape, np.int32),
            "temperature": tensor(0.5, shape, np.float32),
            "seed": tensor(2**64 - 1, shape, np.uint64),
            "stream": tensor(True, shape, np.bool_),
        },
    )
    assert fields == Fields("déf", 7, 0.5, 2**64 - 1, True)


def test_absent_inputs_have_defaults() -> None:
    assert read_fields("r1", {"text_input": tensor(b"x")}) == Fields("x", None, 0.0, 0, False)


@pytest.mark.parametrize(
    ("tensors", "detail"),
    [
        ({}, "text_input is missing"),
        ({"text_input": tensor(b"x", (1, 2))}, r"text_input has shape \[1, 2\]; it must have exactly 1 element"),
        ({"text_input": tensor(b"x", (0,))}, r"text_input has shape \[0\]"),
        ({"text_input": tensor(b"ab\xff")}, "text_input is not UTF-8: byte 2 of 3 is 0xff"),
        ({"text_input": tensor(b"x"), "seed": tensor(1, (2,), np.uint64)}, r"seed has shape \[2\]"),
    ],
)
def test_tensors_that_make_no_sense_are_refused(tensors: dict[str, Any], detail: str) -> None:
    with pytest.raises(RequestError, match=f"^INVALID_ARGUMENT id=r1 {detail}"):
        read_fields("r1", tensors)


def test_a_request_has_the_prompts_tokens_and_the_sampling(tokenizer: Tokenizer) -> None:
    request = make_request("r1", Fields("import os", 5, 0.7, 3), tokenizer, END_IDS, MAX_MODEL_LEN)
    assert isinstance(request, Request)
    assert request.prompt.dtype == np.int32
    assert tokenizer.decode(request.prompt.tolist()) == "import os"
    assert (request.max_tokens, request.sampling, request.end_ids) == (5, SamplingParams(0.7, 3), END_IDS)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        (Fields(""), "text_input is empty"),
        (Fields("x", 0), "max_tokens=0 is not legal; legal range: 1 to 1000"),
        (Fields("x", -5), "max_tokens=-5 is not legal"),
        (Fields("x", 1, -0.1), "temperature=-0.1 is not legal"),
        (Fields("x", 1, float("nan")), "temperature=nan is not legal"),
        (Fields("x", 1, float("inf")), "temperature=inf is not legal"),
        (Fields("x", 1, 0.0, -1), "seed=-1 is not legal; legal range: 0 to 18446744073709551615"),
        (Fields("x\ud800", 1), "the prompt is not Unicode text"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(tokenizer: Tokenizer, fields: Fields, detail: str) -> None:
    assert refusal(tokenizer, fields).startswith(detail)


def test_a_request_longer_than_the_deployment_is_refused_with_the_numbers(tokenizer: Tokenizer) -> None:
    text = "import os\n" * 50
    tokens = len(tokenizer.encode(text))
    assert refusal(tokenizer, Fields(text, 999)) == (
        f"max_tokens=999 with a {tokens}-token prompt needs {tokens + 999} positions; "
        "this deployment holds 1000 (max_model_len)"
    )
    longest = make_request("r1", Fields(text, 1000 - tokens), tokenizer, END_IDS, MAX_MODEL_LEN)
    assert longest.max_length == MAX_MODEL_LEN


def test_a_huge_prompt_is_refused_without_being_tokenised(tokenizer: Tokenizer) -> None:
    size = 1000 * tokenizer.longest_token_bytes
    assert refusal(tokenizer, Fields(" " * size)).startswith(f"a prompt of {size} bytes has at least 1000 tokens")


def test_the_default_length_fits_what_is_left(tokenizer: Tokenizer) -> None:
    short = make_request("r1", Fields("x"), tokenizer, END_IDS, MAX_MODEL_LEN)
    assert short.max_tokens == DEFAULT_MAX_TOKENS
    text = "import os\n" * 400
    tokens = len(tokenizer.encode(text))
    assert make_request("r1", Fields(text), tokenizer, END_IDS, tokens + 10).max_tokens == 10
