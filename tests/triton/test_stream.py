"""The streaming thread: outputs in, responses out, each request by itself."""

from __future__ import annotations

import threading

import pytest

from trt_backend.request import ErrorCode, FinishReason, Output, RequestError, RowCounts
from trt_backend.triton.stream import Ended, Streamer
from trt_backend.triton.text import Tokenizer

END = frozenset({0})


class Collector:
    """A client in this process. `gate` holds its first response back; `broken` refuses all but the end."""

    def __init__(self, gate: threading.Event | None = None, broken: bool = False) -> None:
        self.responses: list[tuple[str, bool]] = []
        self.error: RequestError | None = None
        self.ends = 0
        self.arrived = threading.Event()
        self._gate, self._broken = gate, broken

    def send(self, text: str, final: bool) -> None:
        self.arrived.set()
        if self._gate is not None:
            assert self._gate.wait(10.0)
        if self._broken:
            raise OSError("the client is gone")
        assert self.ends == 0
        self.responses.append((text, final))
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
        self.streamer = Streamer(tokenizer, self.ended.append, self.cancelled.append)
        self.streamer.start()

    def finish(self) -> None:
        self.streamer.stop()


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Rig:
    return Rig(tokenizer)


def test_pieces_come_as_they_are_made_and_the_last_one_is_final(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("import os").tolist()
    client = Collector()
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    for token in tokens[:-1]:
        rig.streamer.deliver(Output("a", (token,)))
    rig.streamer.deliver(Output("a", (tokens[-1],), FinishReason.LENGTH, rows=RowCounts(direct=3)))
    rig.finish()
    assert "".join(text for text, _ in client.responses) == "import os"
    assert [final for _, final in client.responses] == [False] * (len(client.responses) - 1) + [True]
    (ended,) = rig.ended
    assert (ended.request_id, ended.finish, ended.generated) == ("a", FinishReason.LENGTH, len(tokens))
    assert ended.rows == RowCounts(direct=3)


def test_the_end_token_is_not_shown(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x = 1").tolist()
    client = Collector()
    rig.streamer.open("a", client, in_pieces=False, end_ids=frozenset({tokens[-1]}))
    rig.streamer.deliver(Output("a", tuple(tokens)))
    rig.streamer.deliver(Output("a", (tokens[-1],), FinishReason.STOP))
    rig.finish()
    assert client.responses == [("x = 1", True)]


def test_an_answer_of_nothing_but_the_end_token_still_has_a_final_response(rig: Rig) -> None:
    client = Collector()
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("a", (0,), FinishReason.STOP))
    rig.finish()
    assert client.responses == [("", True)]


def test_an_incomplete_character_makes_no_response_and_is_replaced_at_the_end(rig: Rig, tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é").tolist()[0]
    client = Collector()
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("a", (half,)))
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    rig.finish()
    assert client.responses == [("\ufffd", True)]


def test_what_waits_while_a_client_is_slow_goes_out_as_one_piece(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("def main(argv):\n    return 0\n").tolist()
    gate = threading.Event()
    client = Collector(gate)
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("a", (tokens[0],)))
    assert client.arrived.wait(10.0)
    for token in tokens[1:]:
        rig.streamer.deliver(Output("a", (token,)))
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    gate.set()
    rig.finish()
    assert client.responses == [
        (tokenizer.decode(tokens[:1]), False),
        (tokenizer.decode(tokens[1:]), True),
    ]


def test_a_whole_answer_is_one_response(rig: Rig, tokenizer: Tokenizer) -> None:
    client = Collector()
    rig.streamer.open("a", client, in_pieces=False, end_ids=END)
    for token in tokenizer.encode("return None").tolist():
        rig.streamer.deliver(Output("a", (token,)))
    rig.streamer.deliver(Output("a", (), FinishReason.LENGTH))
    rig.finish()
    assert client.responses == [("return None", True)]


def test_an_error_ends_the_stream_after_what_was_made_before_it(rig: Rig, tokenizer: Tokenizer) -> None:
    error = RequestError(ErrorCode.INTERNAL, "a", "the step failed")
    client = Collector()
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("a", tuple(tokenizer.encode("pass").tolist())))
    rig.streamer.deliver(Output("a", (), FinishReason.ERROR, error))
    rig.finish()
    assert "".join(text for text, _ in client.responses) == "pass"
    assert client.error is error
    assert client.ends == 1


def test_a_client_that_is_gone_is_cancelled_and_its_neighbour_served(rig: Rig, tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("yield x").tolist())
    gone, neighbour = Collector(broken=True), Collector()
    rig.streamer.open("gone", gone, in_pieces=True, end_ids=END)
    rig.streamer.open("neighbour", neighbour, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("gone", tokens[:1]))
    rig.streamer.deliver(Output("neighbour", tokens, FinishReason.LENGTH))
    assert gone.arrived.wait(10.0)
    cancelled = RequestError(ErrorCode.CANCELLED, "gone", "cancelled after 1 tokens")
    rig.streamer.deliver(Output("gone", (), FinishReason.CANCELLED, cancelled))
    rig.finish()
    assert neighbour.responses == [("yield x", True)]
    assert rig.cancelled == ["gone"]
    assert gone.ends == 1
    assert sorted(ended.request_id for ended in rig.ended) == ["gone", "neighbour"]


def test_a_client_that_is_gone_at_the_last_response_gets_its_end(rig: Rig) -> None:
    gone = Collector(broken=True)
    rig.streamer.open("gone", gone, in_pieces=True, end_ids=END)
    rig.streamer.deliver(Output("gone", (5, 6), FinishReason.LENGTH))
    rig.finish()
    assert gone.ends == 1
    assert gone.error is not None
    assert gone.error.code is ErrorCode.INTERNAL


def test_stopping_ends_what_is_open(rig: Rig) -> None:
    client = Collector()
    rig.streamer.open("a", client, in_pieces=True, end_ids=END)
    rig.finish()
    assert client.error is not None
    assert str(client.error) == "INTERNAL id=a the server stopped before the request's end"
    assert [ended.finish for ended in rig.ended] == [FinishReason.ERROR]
