"""From a client's wishes to a validated request. Nothing is allocated for a request that does not pass."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_backend.request import (
    DEFAULT_PRIORITY,
    MAX_LOGPROBS,
    PRIORITIES,
    ErrorCode,
    Request,
    RequestError,
    SamplingParams,
    TokenSequences,
)
from trt_backend.triton.inputs import Fields
from trt_backend.triton.text import Tokenizer

MAX_SEED = 2**64 - 1
MAX_WORDS = 64
"""Stop and bad words of a request, each; they are looked for at every token."""
MAX_WORD_LENGTH = 1024
"""Characters, or token ids, of one of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a deployment allows and assumes."""

    max_model_len: int
    vocab_size: int
    end_ids: frozenset[int] = frozenset()
    default_max_tokens: int = 256
    exclude_input_in_output: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answer of a request is to be shown.

    `echo` is the prompt's text where it comes before the answer. The text ends before the first of `stops`, or behind
    it (`keep_stop`), but not before `min_tokens` tokens.
    """

    outputs: frozenset[str]
    in_pieces: bool = False
    end_ids: frozenset[int] = frozenset()
    echo: str = ""
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    min_tokens: int = 0
    prompt: tuple[int, ...] = ()
    """The prompt's tokens, where they are shown before the answer's."""
    prompt_tokens: int = 0


class _IllegalError(Exception):
    """A value out of its range; the message has it, and the range."""


def make_request(request_id: str, fields: Fields, tokenizer: Tokenizer, limits: Limits) -> tuple[Request, Shape]:
    """Check the fields against the deployment and tokenise the prompt.

    Raises:
        RequestError: INVALID_ARGUMENT, with the numbers and the setting that would change it.
    """
    try:
        return _make(request_id, fields, tokenizer, limits)
    except _IllegalError as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, request_id, str(error)) from None


def _make(request_id: str, fields: Fields, tokenizer: Tokenizer, limits: Limits) -> tuple[Request, Shape]:
    arrival_ns = time.monotonic_ns()
    sampling = _sampling(fields)
    if fields.max_tokens is not None and fields.max_tokens < (0 if fields.score_prompt else 1):
        least = "0 (the prompt is only scored)" if fields.score_prompt else "1"
        raise _IllegalError(
            f"max_tokens={fields.max_tokens} is not legal; legal range: {least} to {limits.max_model_len} "
            "(max_model_len)"
        )
    prompt = _prompt(fields, tokenizer, limits)
    max_tokens = _max_tokens(fields, len(prompt), limits)
    min_tokens = _within("min_tokens", fields.min_tokens or 0, 0, max_tokens)
    logprobs = fields.logprobs
    if logprobs is not None:
        _within("logprobs", logprobs, 0, MAX_LOGPROBS)
    priority = DEFAULT_PRIORITY if fields.priority is None else fields.priority
    end_ids = _end_ids(fields, limits)
    request = Request(
        id=request_id,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        end_ids=end_ids,
        min_tokens=min_tokens,
        stop_sequences=_sequences("stop_words_list", fields.stop_sequences, limits),
        bad_sequences=(
            *_sequences("bad_words_list", fields.bad_sequences, limits),
            *_bad_words(fields.bad_words, tokenizer),
        ),
        logprobs=logprobs,
        score_prompt=bool(fields.score_prompt),
        priority=_within("priority", priority, PRIORITIES[0], PRIORITIES[-1]),
        arrival_ns=arrival_ns,
        deadline_ms=_deadline(fields.deadline_ms),
    )
    in_pieces = bool(fields.stream)
    echoes = not limits.exclude_input_in_output and not in_pieces
    if fields.exclude_input is not None:
        echoes = not fields.exclude_input
    shape = Shape(
        outputs=fields.outputs,
        in_pieces=in_pieces,
        end_ids=end_ids,
        echo=(fields.text if fields.text is not None else tokenizer.decode(prompt.tolist())) if echoes else "",
        stops=_words("stop_words", fields.stop),
        keep_stop=bool(fields.include_stop),
        min_tokens=min_tokens,
        prompt=tuple(prompt.tolist()) if echoes else (),
        prompt_tokens=len(prompt),
    )
    return request, shape


def _sampling(fields: Fields) -> SamplingParams:
    """A temperature that is not given is 0 (greedy), or 1 where a filter is given that makes sense only with chance."""
    top_k = fields.top_k or 0
    top_p = fields.top_p or 1.0  # 0 is off, as in TensorRT-LLM
    drawn = top_k > 1 or top_p < 1 or bool(fields.min_p)
    temperature = fields.temperature if fields.temperature is not None else float(drawn)
    if not math.isfinite(temperature) or temperature < 0:
        raise _IllegalError(f"temperature={temperature:g} is not legal; legal: 0 (greedy) or any finite number above")
    if top_k < -1:
        raise _IllegalError(f"top_k={top_k} is not legal; legal: 1 and up, or 0 or -1 for all tokens")
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=_between("top_p", top_p, 0.0, 1.0),
        min_p=_between("min_p", fields.min_p or 0.0, 0.0, 1.0),
        repetition_penalty=_repetition(fields.repetition_penalty),
        presence_penalty=_between("presence_penalty", fields.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=_between("frequency_penalty", fields.frequency_penalty or 0.0, -2.0, 2.0),
        seed=_within("seed", fields.seed or 0, 0, MAX_SEED),
    )


def _repetition(penalty: float | None) -> float:
    value = 1.0 if penalty is None else penalty
    if not math.isfinite(value) or value <= 0:
        raise _IllegalError(f"repetition_penalty={value:g} is not legal; legal: 1 (off) or any finite number above 0")
    return value


def _prompt(fields: Fields, tokenizer: Tokenizer, limits: Limits) -> npt.NDArray[np.int32]:
    if (fields.text is None) == (fields.input_ids is None):
        given = "both are here" if fields.text is not None else "neither is here"
        raise _IllegalError(f"text_input or input_ids, one of them, must hold the prompt; {given}")
    if fields.input_ids is not None:
        if not fields.input_ids:
            raise _IllegalError("input_ids is empty; the prompt must have at least 1 token")
        _check_ids("input_ids", fields.input_ids, limits)
        return np.array(fields.input_ids, dtype=np.int32)
    assert fields.text is not None
    if not fields.text:
        raise _IllegalError("text_input is empty; the prompt must have at least 1 token")
    try:
        size = len(fields.text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise _IllegalError(f"the prompt is not Unicode text: {error.reason} at character {error.start}") from None
    # A token covers so many bytes at most, so a huge prompt is refused without tokenising it first.
    least_tokens = -(-size // tokenizer.longest_token_bytes)
    if least_tokens > limits.max_model_len:
        raise _IllegalError(
            f"a prompt of {size} bytes has at least {least_tokens} tokens; this deployment holds "
            f"{limits.max_model_len} (max_model_len)"
        )
    return tokenizer.encode(fields.text)


def _max_tokens(fields: Fields, prompt_tokens: int, limits: Limits) -> int:
    room = limits.max_model_len - prompt_tokens
    assumed = max(1, min(limits.default_max_tokens, room))
    max_tokens = assumed if fields.max_tokens is None else fields.max_tokens
    if max_tokens > room:
        raise _IllegalError(
            f"max_tokens={max_tokens} with a {prompt_tokens}-token prompt needs {prompt_tokens + max_tokens} "
            f"positions; this deployment holds {limits.max_model_len} (max_model_len)"
        )
    return max_tokens


def _end_ids(fields: Fields, limits: Limits) -> frozenset[int]:
    """`end_id` takes the place of the model's own, -1 means none; stop_token_ids come on top."""
    end_ids = limits.end_ids
    if fields.end_id is not None:
        end_ids = frozenset()
        if fields.end_id != -1:
            _check_ids("end_id", (fields.end_id,), limits)
            end_ids = frozenset({fields.end_id})
    if fields.ignore_eos:
        end_ids = frozenset()
    extra = fields.stop_token_ids or ()
    _check_ids("stop_token_ids", extra, limits)
    return end_ids | frozenset(extra)


def _bad_words(words: tuple[str, ...] | None, tokenizer: Tokenizer) -> TokenSequences:
    """A word as the tokenizer writes it at the start of a text and after a space."""
    spellings = dict.fromkeys(form for word in _words("bad_words", words) for form in (word, f" {word.lstrip()}"))
    return tuple(tuple(tokenizer.encode(form).tolist()) for form in spellings)


def _words(name: str, words: tuple[str, ...] | None) -> tuple[str, ...]:
    _few(name, words or (), "characters")
    return words or ()


def _sequences(name: str, sequences: TokenSequences | None, limits: Limits) -> TokenSequences:
    _few(name, sequences or (), "token ids")
    for sequence in sequences or ():
        _check_ids(name, sequence, limits)
    return sequences or ()


def _few(name: str, words: tuple[str, ...] | TokenSequences, unit: str) -> None:
    if len(words) > MAX_WORDS:
        raise _IllegalError(f"{name} has {len(words)} words; at most {MAX_WORDS} are looked for")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_LENGTH:
        raise _IllegalError(f"{name} has a word of {longest} {unit}; at most {MAX_WORD_LENGTH} are looked for")


def _check_ids(name: str, ids: tuple[int, ...], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise _IllegalError(f"{name} has token id {token}; the vocabulary has 0 to {limits.vocab_size - 1}")


def _deadline(deadline_ms: int | None) -> int | None:
    if deadline_ms is not None and deadline_ms < 1:
        raise _IllegalError(f"deadline_ms={deadline_ms} is not legal; legal: 1 and up")
    return deadline_ms


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise _IllegalError(f"{name}={value} is not legal; legal range: {low} to {high}")
    return value


def _between(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # also when it is not a number
        raise _IllegalError(f"{name}={value:g} is not legal; legal range: {low:g} to {high:g}")
    return value
