"""The streaming thread: outputs in, responses out, each request by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from trt_backend.request import (
    ErrorCode,
    FinishReason,
    Output,
    RequestError,
    RequestTimes,
    RowCounts,
    TokenLogprob,
)
from trt_backend.triton.outputs import TEXT_OUTPUTS, Array, Ended
from trt_backend.triton.parse import Shape
from trt_backend.triton.stream import BEHIND, Streamer
from trt_backend.triton.text import Tokenizer

END = frozenset({0})
PIECES = Shape(TEXT_OUTPUTS, in_pieces=True, end_ids=END)
WHOLE = Shape(TEXT_OUTPUTS, in_pieces=False, end_ids=END)


class Collector:
    """A client in this process. `gate` holds its first response back; `broken` refuses all but the end."""

    def __init__(self, gate: threading.Event | None = None, broken: bool = False) -> None:
        self.responses: list[tuple[str, bool]] = []
        self.tensors: list[Mapping[str, Array]] = []
        self.error: RequestError | None = None
        self.ends = 0
        self.arrived = threading.Event()
        self._gate, self._broken = gate, broken

    def send(self, tensors: Mapping[str, Array], final: bool) -> None:
        self.arrived.set()
        if self._gate is not None:
            assert self._gate.wait(10.0)
        if self._broken:
            raise OSError("the client is gone")
        assert self.ends == 0
        self.tensors.append(tensors)
        if "text_output" in tensors:
            self.responses.append((tensors["text_output"][0].decode(), final))
        self.ends += final

    def fail(self, error: RequestError) -> None:
        assert self.ends == 0
        self.error = error
        self.ends += 1

    def is_cancelled(self) -> bool:
        return False


class Rig:
    """A streamer that runs, and what it reported."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ended: list[Ended] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.released: list[str] = []
        self.streamer = Streamer(tokenizer, self.released.append, self.ended.append, self)
        self.streamer.start()

    def hold_back(self, tokens: list[int]) -> tuple[Collector, threading.Event]:
        """A client of request "a" that holds its first token until the gate is set, while the others wait."""
        gate = threading.Event()
        client = Collector(gate)
        self.streamer.open("a", client, PIECES)
        self.streamer.deliver(Output("a", (tokens[0],)))
        assert client.arrived.wait(10.0)
        for token in tokens[1:]:
            self.streamer.deliver(Output("a", (token,)))
        return client, gate

    # What the streamer asks of the scheduler.

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def close(self) -> None:
        self.streamer.stop()


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Rig:
    return Rig(tokenizer)


def test_pieces_come_as_they_are_made_and_the_last_one_is_final(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("import os").tolist()
    client = Collector()
    rig.streamer.open("a", client, PIECES)
    for token in tokens[:-1]:
        rig.streamer.deliver(Output("a", (token,)))
    rig.streamer.deliver(Output("a", (tokens[-1],), FinishReason.LENGTH, rows=RowCounts(direct=3)))
    rig.close()
    assert "".join(text for text, _ in client.responses) == "import os"
    assert [final for _, final in client.responses] == [False] * (len(client.responses) - 1) + [True]
    (ended,) = rig.ended
    assert (ended.request_id, ended.finish, ended.generated) == ("a", FinishReason.LENGTH, len(tokens))
    assert ended.rows == RowCounts(direct=3)


def test_the_end_token_is_not_shown(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x = 1").tolist()
    client = Collector()
    rig.streamer.open("a", client, WHOLE)
    rig.streamer.deliver(Output("a", tuple(tokens)))
    rig.streamer.deliver(Output("a", (0,), FinishReason.STOP))
    rig.close()
    assert client.responses == [("x = 1", True)]


def test_an_answer_of_nothing_but_the_end_token_still_has_a_final_response(rig: Rig) -> None:
    client = Collector()
    rig.streamer.open("a", client, PIECES)
    rig.streamer.deliver(Output("a", (0,), FinishReason.STOP))
    rig.close()
    assert client.responses == [("", True)]


def test_an_incomplete_character_makes_no_response_and_is_replaced_at_the_end(rig: Rig, tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é").tolist()[0]
    client = Collector()
    rig.streamer.open("a", client, PIECES)
    rig.streamer.deliver(Output("a", (half,)))
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    rig.close()
    assert client.responses == [("\ufffd", True)]


def test_a_few_outputs_that_wait_have_a_response_each(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("def main(argv):\n    return 0\n").tolist()[: BEHIND + 1]
    client, gate = rig.hold_back(tokens)
    assert rig.streamer.backlog == len(tokens)
    gate.set()
    rig.close()
    assert [text for text, _ in client.responses] == [tokenizer.decode([token]) for token in tokens]
    assert rig.streamer.backlog == 0


def test_what_waits_while_a_client_is_slow_goes_out_as_one_piece(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("def main(argv):\n    return 0\n").tolist()
    client, gate = rig.hold_back(tokens)
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    gate.set()
    rig.close()
    assert client.responses == [
        (tokenizer.decode(tokens[:1]), False),
        (tokenizer.decode(tokens[1:]), True),
    ]


def test_a_whole_answer_is_one_response(rig: Rig, tokenizer: Tokenizer) -> None:
    client = Collector()
    rig.streamer.open("a", client, WHOLE)
    for token in tokenizer.encode("return None").tolist():
        rig.streamer.deliver(Output("a", (token,)))
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    rig.close()
    assert client.responses == [("return None", True)]


def test_an_error_ends_the_stream_after_what_was_made_before_it(rig: Rig, tokenizer: Tokenizer) -> None:
    error = RequestError(ErrorCode.INTERNAL, "a", "the step failed")
    client = Collector()
    rig.streamer.open("a", client, PIECES)
    rig.streamer.deliver(Output("a", tuple(tokenizer.encode("pass").tolist())))
    rig.streamer.deliver(Output("a", (), FinishReason.ERROR, error))
    rig.close()
    assert "".join(text for text, _ in client.responses) == "pass"
    assert client.error is error
    assert client.ends == 1


def test_a_client_that_is_gone_is_cancelled_and_its_neighbour_served(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("yield x").tolist())
    gone, neighbour = Collector(broken=True), Collector()
    rig.streamer.open("gone", gone, PIECES)
    rig.streamer.open("neighbour", neighbour, PIECES)
    rig.streamer.deliver(Output("gone", tokens[:1]))
    rig.streamer.deliver(Output("neighbour", tokens, FinishReason.LENGTH))
    assert gone.arrived.wait(10.0)
    cancelled = RequestError(ErrorCode.CANCELLED, "gone", "cancelled after 1 tokens")
    rig.streamer.deliver(Output("gone", (), FinishReason.CANCELLED, cancelled))
    rig.close()
    assert neighbour.responses == [("yield x", True)]
    assert rig.cancelled == ["gone"]
    assert gone.ends == 1
    assert sorted(ended.request_id for ended in rig.ended) == ["gone", "neighbour"]


def test_a_client_that_is_gone_at_the_last_response_gets_its_end(rig: Rig) -> None:
    gone = Collector(broken=True)
    rig.streamer.open("gone", gone, PIECES)
    rig.streamer.deliver(Output("gone", (5, 6), FinishReason.LENGTH))
    rig.close()
    assert gone.ends == 1
    assert gone.error is not None
    assert gone.error.code is ErrorCode.INTERNAL


def test_stopping_ends_what_is_open(rig: Rig) -> None:
    client = Collector()
    rig.streamer.open("a", client, PIECES)
    rig.close()
    assert client.error is not None
    assert str(client.error) == "INTERNAL id=a the server stopped before the request's end"
    assert [ended.finish for ended in rig.ended] == [FinishReason.ERROR]


def test_a_stop_string_ends_the_answer_and_what_comes_later_is_dropped(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a = 1\nreturn a\nb = 2").tolist()
    client = Collector()
    rig.streamer.open("a", client, Shape(TEXT_OUTPUTS, in_pieces=True, end_ids=END, stops=("turn a",)))
    for token in tokens:
        rig.streamer.deliver(Output("a", (token,)))
    cancelled = RequestError(ErrorCode.CANCELLED, "a", "too late")
    rig.streamer.deliver(Output("a", (), FinishReason.CANCELLED, cancelled))
    rig.close()
    assert "".join(text for text, _ in client.responses) == "a = 1\nre"
    assert (client.ends, client.error) == (1, None)
    assert rig.finished == ["a"]
    (ended,) = rig.ended
    assert (ended.finish, ended.error) == (FinishReason.STOP, None)
    assert ended.generated < len(tokens)
    assert "turn a" in tokenizer.decode(tokens[: ended.generated])
    assert "turn a" not in tokenizer.decode(tokens[: ended.generated - 1])


def test_an_echoed_prompt_comes_with_the_first_piece(rig: Rig, tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode("x = ").tolist(), tokenizer.encode("1").tolist()
    client = Collector()
    outputs = TEXT_OUTPUTS | {"output_ids", "sequence_length", "num_output_tokens"}
    shape = Shape(outputs, in_pieces=True, end_ids=END, echo="x = ", prompt=tuple(prompt))
    rig.streamer.open("a", client, shape)
    rig.streamer.deliver(Output("a", tuple(answer)))
    rig.streamer.deliver(Output("a", tuple(answer), FinishReason.LENGTH))
    rig.close()
    assert "".join(text for text, _ in client.responses) == "x = 11"
    assert client.responses[0][0].startswith("x = ")
    ids = np.concatenate([tensors["output_ids"][0] for tensors in client.tensors])
    assert ids.tolist() == prompt + answer + answer
    assert sum(int(tensors["sequence_length"][0]) for tensors in client.tensors) == len(ids)
    assert sum(int(tensors["num_output_tokens"][0]) for tensors in client.tensors) == 2 * len(answer)


def test_every_output_that_is_asked_for_is_there(rig: Rig, tokenizer: Tokenizer) -> None:
    token = int(tokenizer.encode("x")[0])
    outputs = frozenset(
        {"output_log_probs", "cum_log_probs", "logprobs", "prompt_log_probs", "finish_reason", "resolver_rows"}
        | {"num_input_tokens", "arrival_time_ns", "last_token_time_ns", "kv_cache_alloc_new_blocks"}
    )
    client = Collector()
    rig.streamer.open("a", client, Shape(outputs, in_pieces=True, end_ids=END, prompt_tokens=3))
    entry = TokenLogprob(token, -0.5, 2, top=((7, -0.25), (token, -0.5)))
    scores = np.array([-1.0, -2.0], dtype=np.float32)
    rig.streamer.deliver(Output("a", (token,), logprobs=(entry,), prompt_logprobs=scores))
    times = RequestTimes(1_000_000, 2_000_000, 3_000_000, 4_000_000)
    rows = RowCounts(1, 2, 3, 4, 0)
    last = Output("a", (token,), FinishReason.LENGTH, rows=rows, times=times, device_pages=6, logprobs=(entry,))
    rig.streamer.deliver(last)
    rig.close()
    tensors = {name: tensor for response in client.tensors for name, tensor in response.items()}
    assert set(tensors) == outputs
    assert tensors["cum_log_probs"].tolist() == [-1.0]
    assert np.concatenate([r["output_log_probs"][0] for r in client.tensors]).tolist() == [-0.5, -0.5]
    described = [entry for r in client.tensors for entry in json.loads(r["logprobs"][0])]
    text = tokenizer.show(token)
    assert described[0] == {
        str(token): {"logprob": -0.5, "rank": 2, "decoded_token": text},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.show(7)},
    }
    assert tensors["prompt_log_probs"].tolist() == [[-1.0, -2.0]]
    assert tensors["finish_reason"].tolist() == [b"length"]
    assert tensors["resolver_rows"].tolist() == [1, 2, 3, 4, 0]
    assert tensors["num_input_tokens"].tolist() == [3]
    assert tensors["last_token_time_ns"][0] - tensors["arrival_time_ns"][0] == 3_000_000
    assert tensors["kv_cache_alloc_new_blocks"].tolist() == [6]
