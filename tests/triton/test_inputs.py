"""From tensors to fields, under all the names that clients use."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trt_backend.request import RequestError
from trt_backend.triton.inputs import TENSORS, Fields, read_fields
from trt_backend.triton.outputs import PERFORMANCE_OUTPUTS, TEXT_OUTPUTS, TOKEN_OUTPUTS

PROMPT = np.array([b"x"], dtype=np.object_)


def tensor(value: Any, dtype: Any, shape: tuple[int, ...] = (1, 1)) -> Any:
    return np.full(shape, value, dtype=dtype)


def texts(*words: str) -> Any:
    return np.array([[word.encode() for word in words]], dtype=np.object_)


def read(**tensors: Any) -> Fields:
    return read_fields("r1", {"text_input": PROMPT} | tensors)


def refusal(**tensors: Any) -> str:
    with pytest.raises(RequestError, match=r"^INVALID_ARGUMENT id=r1 ") as caught:
        read(**tensors)
    return caught.value.detail


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_inputs_are_read_in_either_shape(shape: tuple[int, ...]) -> None:
    fields = read_fields(
        "r1",
        {
            "text_input": tensor("déf".encode(), np.object_, shape),
            "max_tokens": tensor(7, np.int32, shape),
            "temperature": tensor(0.1, np.float32, shape),
            "seed": tensor(2**64 - 1, np.uint64, shape),
            "stream": tensor(True, np.bool_, shape),
        },
    )
    assert fields == Fields(text="déf", max_tokens=7, temperature=0.1, seed=2**64 - 1, stream=True)


def test_what_is_absent_is_not_said() -> None:
    assert read() == Fields(text="x")


@pytest.mark.parametrize(
    ("legacy", "name", "value", "dtype", "field"),
    [
        ("request_output_len", "max_tokens", 9, np.int32, "max_tokens"),
        ("min_length", "min_tokens", 3, np.int32, "min_tokens"),
        ("runtime_top_k", "top_k", 5, np.int32, "top_k"),
        ("runtime_top_p", "top_p", 0.5, np.float32, "top_p"),
        ("random_seed", "seed", 8, np.uint64, "seed"),
        ("streaming", "stream", True, np.bool_, "stream"),
    ],
)
def test_legacy_names_say_the_same(legacy: str, name: str, value: Any, dtype: Any, field: str) -> None:
    assert getattr(read(**{legacy: tensor(value, dtype)}), field) == value
    assert getattr(read(**{name: tensor(value, dtype)}), field) == value
    assert getattr(read(**{name: tensor(value, dtype), legacy: tensor(value, dtype)}), field) == value


def test_two_names_for_one_wish_must_agree() -> None:
    assert refusal(max_tokens=tensor(5, np.int32), request_output_len=tensor(6, np.int32)) == (
        "request_output_len=6 contradicts max_tokens=5; send one of them"
    )
    assert "contradicts" in refusal(max_tokens=tensor(5, np.int32), sampling_parameters=texts('{"max_tokens": 6}'))


def test_prompts_may_come_as_token_ids() -> None:
    fields = read_fields(
        "r1",
        {"input_ids": np.array([[3, 4, 5]], dtype=np.int32), "input_lengths": np.array([[3]], dtype=np.int32)},
    )
    assert fields == Fields(input_ids=(3, 4, 5), outputs=TOKEN_OUTPUTS)
    assert refusal(input_ids=np.zeros((2, 3), np.int32)) == (
        "input_ids has shape [2, 3]; it must hold the tokens of one prompt"
    )
    assert refusal(input_lengths=tensor(2, np.int32)) == "input_lengths=2 with 0 input_ids; they must agree"


def test_empty_words_are_no_words() -> None:
    fields = read(stop_words=texts("", "end", ""), bad_words=texts(""))
    assert (fields.stop, fields.bad_words) == (("end",), ())


def test_lists_of_words_are_token_ids_and_their_ends() -> None:
    words = np.array([[[7, 8, 9, 3], [3, 4, -1, -1]]], dtype=np.int32)
    assert read(stop_words_list=words).stop_sequences == ((7, 8, 9), (3,))
    assert read(bad_words_list=words[0]).bad_sequences == ((7, 8, 9), (3,))
    assert "has 9 as the end of a word that begins at 0" in refusal(
        stop_words_list=np.array([[7, 8], [9, -1]], dtype=np.int32)
    )
    assert "it must be [2, n]" in refusal(bad_words_list=np.array([7, 8, 9], dtype=np.int32))


def test_parameters_in_json_may_be_quoted() -> None:
    quoted = {"max_tokens": "5", "temperature": "0.5", "ignore_eos": "true", "stop": ["a", ""], "n": 1, "seed": None}
    fields = read(sampling_parameters=texts(json.dumps(quoted)))
    assert fields == Fields(text="x", max_tokens=5, temperature=0.5, ignore_eos=True, stop=("a",))


def test_with_parameters_in_json_the_temperature_is_1_unless_it_is_given() -> None:
    assert read(sampling_parameters=texts('{"max_tokens": 5}')).temperature == 1.0
    assert read(sampling_parameters=texts("{}"), temperature=tensor(0.25, np.float32)).temperature == 0.25


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("{", "sampling_parameters is not JSON"),
        ("[1]", "sampling_parameters is list; it must be a JSON object"),
        ('{"beam": 3}', "sampling_parameters.beam is not served; keys: bad_words, best_of"),
        ('{"max_tokens": "many"}', "sampling_parameters.max_tokens='many' is not legal; legal: an integer"),
        ('{"max_tokens": 1.5}', "sampling_parameters.max_tokens=1.5 is not legal"),
        ('{"ignore_eos": 3}', "sampling_parameters.ignore_eos=3 is not legal; legal: true or false"),
        ('{"stop": [1]}', "sampling_parameters.stop=[1] is not legal"),
        ('{"n": 2}', "sampling_parameters.n=2 is not legal; legal: 1: one answer a request"),
        ('{"top_p": 0}', "sampling_parameters.top_p=0 is not legal"),
        ('{"temperature": true}', "sampling_parameters.temperature=True is not legal"),
    ],
)
def test_parameters_in_json_that_make_no_sense_are_refused(text: str, detail: str) -> None:
    assert refusal(sampling_parameters=texts(text)).startswith(detail)


@pytest.mark.parametrize(
    ("tensors", "detail"),
    [
        ({"text_input": tensor(b"x", np.object_, (1, 2))}, "text_input has shape [1, 2]; it must have exactly 1"),
        ({"text_input": tensor(b"x", np.object_, (0,))}, "text_input has shape [0]"),
        ({"text_input": tensor(b"ab\xff", np.object_)}, "text_input is not UTF-8: byte 2 of 3 is 0xff"),
        ({"seed": tensor(1, np.uint64, (2,))}, "seed has shape [2]"),
        ({"max_tokens": tensor(1.5, np.float32)}, "max_tokens is float32; it must be an integer"),
        ({"stream": tensor(1, np.int32)}, "stream is int32; it must be BOOL"),
        ({"stop_words": tensor(3, np.int32)}, "stop_words is int; it must be BYTES"),
        ({"beam_width": tensor(4, np.int32)}, "beam_width=4 is not served; legal: 1 (there is no beam search)"),
        ({"return_context_logits": tensor(True, np.bool_)}, "return_context_logits=True is not served"),
        ({"surprise": tensor(1, np.int32)}, "surprise is not an input of this model; inputs: bad_words"),
    ],
)
def test_tensors_that_make_no_sense_are_refused(tensors: dict[str, Any], detail: str) -> None:
    assert refusal(**tensors).startswith(detail)


def test_outputs_are_what_the_client_names_or_flags() -> None:
    assert read().outputs == TEXT_OUTPUTS
    flagged = read(return_finish_reason=tensor(True, np.bool_), return_num_input_tokens=tensor(False, np.bool_))
    assert flagged.outputs == TEXT_OUTPUTS | {"finish_reason"}
    assert read(return_perf_metrics=tensor(True, np.bool_)).outputs == TEXT_OUTPUTS | PERFORMANCE_OUTPUTS
    named = read_fields("r1", {"text_input": PROMPT}, requested=frozenset({"output_ids"}))
    assert named.outputs == {"output_ids"}


def test_outputs_of_log_probabilities_make_them() -> None:
    assert read(return_log_probs=tensor(True, np.bool_)).logprobs == 0
    top = read(return_logprobs=tensor(True, np.bool_), sampling_parameters=texts('{"logprobs": 3}'))
    assert (top.logprobs, top.outputs) == (3, TEXT_OUTPUTS | {"logprobs"})
    assert read(return_prompt_log_probs=tensor(True, np.bool_)).score_prompt is True


def test_the_models_configuration_declares_these_inputs_and_no_others() -> None:
    from trt_backend.triton.repository import default_template

    config = (default_template() / "config.pbtxt").read_text()
    inputs = config[config.index("input [") : config.index("output [")]
    declared = {line.split('"')[1] for line in inputs.splitlines() if "name:" in line}
    assert declared == set(TENSORS)
    assert inputs.count("optional: true") == len(declared)
