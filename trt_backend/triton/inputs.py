"""What clients send, under all the names they know it by: TensorRT-LLM's text and token tensors, vLLM's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_backend.request import ErrorCode, RequestError, TokenSequences
from trt_backend.triton.outputs import LOGPROB_OUTPUTS, PERFORMANCE_OUTPUTS, TEXT_OUTPUTS, TOKEN_OUTPUTS

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]


VLLM_TEMPERATURE = 1.0
"""Where parameters come as vLLM's JSON, a temperature that is not given is what it is there."""


class WrongInputError(Exception):
    """An input that makes no sense. The message starts with its name."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A client's wishes as Python values, not yet checked against the deployment. None: not said."""

    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_sequences: TokenSequences | None = None
    bad_words: tuple[str, ...] | None = None
    bad_sequences: TokenSequences | None = None
    end_id: int | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    exclude_input: bool | None = None
    stream: bool | None = None
    logprobs: int | None = None
    score_prompt: bool | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cancel: bool | None = None
    """Not a request of its own: end those with the same id."""
    outputs: frozenset[str] = TEXT_OUTPUTS


# --- one input's value ---


def _one(tensor: Array) -> Any:
    if tensor.size != 1:
        raise WrongInputError(f"has shape {list(tensor.shape)}; it must have exactly 1 element")
    return tensor.reshape(-1)[0]


def _integer(tensor: Array) -> int:
    value = _one(tensor)
    if not isinstance(value, np.integer):
        raise WrongInputError(f"is {tensor.dtype}; it must be an integer")
    return int(value)


def _number(tensor: Array) -> float:
    value = _one(tensor)
    if not isinstance(value, np.integer | np.floating):
        raise WrongInputError(f"is {tensor.dtype}; it must be a number")
    # The shortest number that is this float32: 0.1 rather than 0.10000000149011612.
    return float(str(value)) if isinstance(value, np.floating) else float(value)


def _flag(tensor: Array) -> bool:
    value = _one(tensor)
    if not isinstance(value, np.bool_):
        raise WrongInputError(f"is {tensor.dtype}; it must be BOOL")
    return bool(value)


def _text(tensor: Array) -> str:
    return _decode(_one(tensor))


def _texts(tensor: Array) -> tuple[str, ...]:
    """Empty strings stand for "none", as clients of TensorRT-LLM send them."""
    return tuple(text for text in map(_decode, tensor.reshape(-1).tolist()) if text)


def _decode(value: object) -> str:
    if not isinstance(value, bytes):
        raise WrongInputError(f"is {type(value).__name__}; it must be BYTES with text in UTF-8")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of {len(value)} is 0x{value[error.start]:02x}"
        raise WrongInputError(f"is not UTF-8: {byte}") from None


def _tokens(tensor: Array) -> tuple[int, ...]:
    if not np.issubdtype(tensor.dtype, np.integer):
        raise WrongInputError(f"is {tensor.dtype}; it must be INT32 token ids")
    if max(tensor.shape, default=0) != tensor.size:
        raise WrongInputError(f"has shape {list(tensor.shape)}; it must hold the tokens of one prompt")
    return tuple(tensor.reshape(-1).tolist())


def _sequences(tensor: Array) -> TokenSequences:
    """TensorRT-LLM's lists of words: the tokens of all words in a row, then where each word ends, filled up with -1."""
    if tensor.size == 0:
        return ()
    if tensor.ndim < 2 or tensor.size != 2 * tensor.shape[-1]:
        raise WrongInputError(
            f"has shape {list(tensor.shape)}; it must be [2, n]: token ids, then the ends of the words"
        )
    ids, ends = tensor.reshape(2, -1).tolist()
    words, start = [], 0
    for end in (end for end in ends if end != -1):
        if not start < end <= len(ids):
            raise WrongInputError(f"has {end} as the end of a word that begins at {start}; it has {len(ids)} token ids")
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)


def _only(legal: Any, why: str) -> Callable[[Array], None]:
    def check(tensor: Array) -> None:
        if _one(tensor) != legal:
            raise WrongInputError(f"={_one(tensor)} is not served; legal: {legal} ({why})")

    return check


def _unused(tensor: Array) -> None:
    """What changes nothing here, whatever its value."""


Reader = Callable[[Array], Any]

TENSORS: dict[str, tuple[str, Reader]] = {
    "text_input": ("text", _text),
    "input_ids": ("input_ids", _tokens),
    "input_lengths": ("input_length", _integer),
    "max_tokens": ("max_tokens", _integer),
    "request_output_len": ("max_tokens", _integer),
    "min_tokens": ("min_tokens", _integer),
    "min_length": ("min_tokens", _integer),
    "temperature": ("temperature", _number),
    "top_k": ("top_k", _integer),
    "runtime_top_k": ("top_k", _integer),
    "top_p": ("top_p", _number),
    "runtime_top_p": ("top_p", _number),
    "min_p": ("min_p", _number),
    "repetition_penalty": ("repetition_penalty", _number),
    "presence_penalty": ("presence_penalty", _number),
    "frequency_penalty": ("frequency_penalty", _number),
    "seed": ("seed", _integer),
    "random_seed": ("seed", _integer),
    "stop_words": ("stop", _texts),
    "stop_words_list": ("stop_sequences", _sequences),
    "bad_words": ("bad_words", _texts),
    "bad_words_list": ("bad_sequences", _sequences),
    "end_id": ("end_id", _integer),
    "pad_id": ("", _unused),
    "stream": ("stream", _flag),
    "streaming": ("stream", _flag),
    "exclude_input_in_output": ("exclude_input", _flag),
    "return_log_probs": ("output_log_probs,cum_log_probs", _flag),
    "return_logprobs": ("logprobs", _flag),
    "return_cumulative_logprob": ("cumulative_logprob", _flag),
    "return_prompt_log_probs": ("prompt_log_probs", _flag),
    "return_finish_reason": ("finish_reason", _flag),
    "return_num_input_tokens": ("num_input_tokens", _flag),
    "return_num_output_tokens": ("num_output_tokens", _flag),
    "return_perf_metrics": (",".join(sorted(PERFORMANCE_OUTPUTS)), _flag),
    "priority": ("priority", _integer),
    "deadline_ms": ("deadline_ms", _integer),
    "stop": ("cancel", _flag),
    "sampling_parameters": ("json", _text),
    "beam_width": ("", _only(1, "there is no beam search")),
    "num_return_sequences": ("", _only(1, "one answer a request")),
    "length_penalty": ("", _unused),
    "len_penalty": ("", _unused),
    "early_stopping": ("", _unused),
    "beam_search_diversity_rate": ("", _unused),
    "return_context_logits": ("", _only(False, "logits stay in the server; return_prompt_log_probs scores a prompt")),
    "return_generation_logits": ("", _only(False, "logits stay in the server; return_log_probs has the tokens'")),
}
"""Input tensor → the field of `Fields` it sets (or the outputs it asks for) and how its value is read."""


def _json_integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _json_number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _json_flag(value: Any) -> bool:
    legal = {True: True, False: False, "true": True, "false": False}
    return legal[value.lower() if isinstance(value, str) else value]


def _json_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    return tuple(text for text in texts if text)


def _json_tokens(value: Any) -> tuple[int, ...]:
    return tuple(_json_integer(token) for token in ([value] if isinstance(value, int) else value))


def _json_one(value: Any) -> None:
    if _json_integer(value) != 1:
        raise ValueError


PARAMETERS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "max_tokens": ("max_tokens", _json_integer, "an integer"),
    "min_tokens": ("min_tokens", _json_integer, "an integer"),
    "temperature": ("temperature", _json_number, "a number"),
    "top_k": ("top_k", _json_integer, "an integer"),
    "top_p": ("top_p", _json_number, "a number"),
    "min_p": ("min_p", _json_number, "a number"),
    "repetition_penalty": ("repetition_penalty", _json_number, "a number"),
    "presence_penalty": ("presence_penalty", _json_number, "a number"),
    "frequency_penalty": ("frequency_penalty", _json_number, "a number"),
    "seed": ("seed", _json_integer, "an integer"),
    "stop": ("stop", _json_texts, "a string or a list of strings"),
    "stop_token_ids": ("stop_token_ids", _json_tokens, "a list of token ids"),
    "bad_words": ("bad_words", _json_texts, "a string or a list of strings"),
    "ignore_eos": ("ignore_eos", _json_flag, "true or false"),
    "include_stop_str_in_output": ("include_stop", _json_flag, "true or false"),
    "logprobs": ("logprobs", _json_integer, "an integer"),
    "prompt_logprobs": ("score_prompt", lambda value: _json_integer(value) >= 0, "an integer"),
    "priority": ("priority", _json_integer, "an integer"),
    "n": ("", _json_one, "1: one answer a request"),
    "best_of": ("", _json_one, "1: one answer a request"),
    "skip_special_tokens": ("", _json_flag, "true or false"),
    "spaces_between_special_tokens": ("", _json_flag, "true or false"),
    "detokenize": ("", _json_flag, "true or false"),
}
"""Key of vLLM's `sampling_parameters` → field, reader, what is legal. Values may be strings: some clients quote all."""


def read_fields(request_id: str, tensors: Tensors, requested: frozenset[str] | None = None) -> Fields:
    """Read the input tensors, each with or without a batch dimension of 1, and the parameters in JSON among them.

    Args:
        requested: output tensors that the client names; None when it names none and takes what there is.

    Raises:
        RequestError: INVALID_ARGUMENT, naming the input.
    """
    try:
        return _read(tensors, requested)
    except WrongInputError as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, request_id, str(error)) from None


def _read(tensors: Tensors, requested: frozenset[str] | None) -> Fields:
    values: dict[str, tuple[str, Any]] = {}
    outputs: set[str] = set()
    for name, tensor in tensors.items():
        if name not in TENSORS:
            raise WrongInputError(f"{name} is not an input of this model; inputs: {', '.join(sorted(TENSORS))}")
        field, reader = TENSORS[name]
        try:
            value = reader(tensor)
        except WrongInputError as error:
            separator = "" if str(error).startswith("=") else " "
            raise WrongInputError(f"{name}{separator}{error}") from None
        if name.startswith("return_"):
            outputs |= set(field.split(",")) if value else set()
        elif field == "json":
            for key, wish in _read_parameters(value).items():
                _set(values, key, f"sampling_parameters.{key}", wish)
        elif field:
            _set(values, field, name, value)
    given = {field: value for field, (_, value) in values.items()}
    length = given.pop("input_length", None)
    if length is not None and length != len(given.get("input_ids", ())):
        raise WrongInputError(
            f"input_lengths={length} with {len(given.get('input_ids', ()))} input_ids; they must agree"
        )
    if "sampling_parameters" in tensors:
        given.setdefault("temperature", VLLM_TEMPERATURE)
    wanted = _outputs(outputs, requested, by_tokens="input_ids" in given)
    if "prompt_log_probs" in wanted:
        given["score_prompt"] = True
    if wanted & LOGPROB_OUTPUTS:
        given.setdefault("logprobs", 0)
    return Fields(**given, outputs=wanted)


def _set(values: dict[str, tuple[str, Any]], field: str, name: str, value: Any) -> None:
    """One wish may come under several names, but with one value."""
    if field in values and values[field][1] != value:
        other, before = values[field]
        raise WrongInputError(f"{name}={value} contradicts {other}={before}; send one of them")
    values[field] = (name, value)


def _read_parameters(text: str) -> dict[str, Any]:
    """The fields that a JSON object sets."""
    try:
        parameters = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise WrongInputError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise WrongInputError(f"sampling_parameters is {type(parameters).__name__}; it must be a JSON object")
    fields = {}
    for key, value in parameters.items():
        if key not in PARAMETERS:
            raise WrongInputError(f"sampling_parameters.{key} is not served; keys: {', '.join(sorted(PARAMETERS))}")
        field, reader, legal = PARAMETERS[key]
        if value is None:
            continue
        try:
            read = reader(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise WrongInputError(f"sampling_parameters.{key}={value!r} is not legal; legal: {legal}") from None
        if field:
            fields[field] = read
    if fields.get("top_p") == 0:
        raise WrongInputError("sampling_parameters.top_p=0 is not legal; legal: above 0, up to 1")
    return fields


def _outputs(flagged: set[str], requested: frozenset[str] | None, by_tokens: bool) -> frozenset[str]:
    """What the client names or flags; a client that does neither gets what its kind of prompt suggests."""
    if requested is not None:
        return frozenset(flagged) | requested
    return frozenset(flagged) | (TOKEN_OUTPUTS if by_tokens else TEXT_OUTPUTS)
