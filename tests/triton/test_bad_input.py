"""Whatever comes in, it is answered twice alike, hurts no neighbour, and leaves nothing behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from loadtest.server import LOOPBACK, ServeCommand
from tests.triton.clients import Answer, Stream, make_input, make_inputs, wait_until
from tests.triton.conftest import MODEL, SERVER_MODEL_LEN
from tests.triton.talk import LONG_PROMPT, PROMPT, ask, counted, holdings, is_idle, resident_bytes, stub_of

NAN = float("nan")
REFUSED_BY_US: list[tuple[dict[str, Any], str]] = [
    ({"text": b""}, "text_input is empty"),
    ({"text": None}, "text_input or input_ids, one of them, must hold the prompt"),
    ({"text": b"ab\xff"}, "text_input is not UTF-8: byte 2 of 3 is 0xff"),
    ({"text": b"x" * 200_000}, "a prompt of 200000 bytes has at least"),
    ({"text": b"x = 1\n" * 900}, "this deployment holds 2048 (max_model_len)"),
    ({"max_tokens": 0}, "max_tokens=0 is not legal; legal range: 1 to 2048"),
    ({"max_tokens": -1}, "max_tokens=-1 is not legal"),
    ({"max_tokens": 9000}, "this deployment holds 2048 (max_model_len)"),
    ({"top_k": -2}, "top_k=-2 is not legal"),
    ({"temperature": NAN}, "temperature=nan is not legal"),
    ({"temperature": -1.0}, "temperature=-1 is not legal"),
    ({"top_p": 7.0}, "top_p=7 is not legal"),
    ({"stop_words": [b"\xfe"]}, "stop_words is not UTF-8"),
    ({"sampling_parameters": b"{max_tokens}"}, "sampling_parameters is not JSON"),
    ({"input_ids": [5, 99999]}, "both are here"),
    ({"text": None, "input_ids": [5, 99999]}, "input_ids has token id 99999; the vocabulary has 0 to"),
    ({"beam_width": 4}, "beam_width=4 is not served"),
    ({"priority": 99}, "priority=99 is not legal; legal range: 0 to 9"),
    ({"deadline_ms": -1}, "deadline_ms=-1 is not legal"),
]
REFUSED_BY_TRITON: list[tuple[Any, str]] = [
    (lambda: make_inputs(PROMPT, max_tokens=(1.5, "FP32")), "data-type"),
    (lambda: make_inputs(PROMPT, stop_words=(3, "INT32")), "data-type"),
    (lambda: make_inputs(PROMPT, max_tokens=[4, 5]), "shape"),
    (lambda: [make_input("text_input", PROMPT, shape=[1])], "shape"),
    (lambda: [make_input("text_input", PROMPT, shape=[3, 1])], "batch"),
    (lambda: [*make_inputs(PROMPT), make_input("surprise", 1, "INT32")], "surprise"),
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ServeCommand) -> Iterator[None]:
    """Pages, slots, threads and shared memory are back to where they were, and the server lives."""
    ask(server, max_tokens=2)  # the first request ever starts the engine's own threads
    before = holdings(server)
    yield
    wait_until(lambda: is_idle(server), seconds=30.0)
    wait_until(lambda: holdings(server) == before, seconds=30.0)
    assert server.process.poll() is None


@pytest.fixture(scope="module")
def alone(server: ServeCommand) -> str:
    """What the neighbour says when there is nobody else."""
    return ask(server, LONG_PROMPT, max_tokens=80).text


@pytest.fixture
def neighbour(server: ServeCommand, alone: str) -> Iterator[None]:
    """A stream that runs meanwhile and says what it says when it is alone."""
    running = Stream(server.grpc_port, MODEL, make_inputs(LONG_PROMPT, max_tokens=80, stream=True), "neighbour")
    first = Answer()
    assert running.next(first)
    yield
    assert first.text + running.rest().text == alone


@pytest.mark.usefixtures("neighbour")
def test_what_we_refuse_is_refused_twice_with_the_numbers(server: ServeCommand) -> None:
    for number, (fields, detail) in enumerate(REFUSED_BY_US):
        text = fields.get("text", PROMPT)
        tensors = {name: value for name, value in fields.items() if name != "text"}
        for _ in range(2):
            inputs = make_inputs(text, **({"max_tokens": 4} | tensors))
            answer = Stream(server.grpc_port, MODEL, inputs, f"bad{number}").rest()
            assert answer.texts == []
            assert answer.error is not None
            assert f"INVALID_ARGUMENT id=bad{number} " in answer.error
            assert detail in answer.error


@pytest.mark.usefixtures("neighbour")
def test_what_triton_refuses_is_refused_twice(server: ServeCommand) -> None:
    for make, detail in REFUSED_BY_TRITON:
        for _ in range(2):
            answer = Stream(server.grpc_port, MODEL, make(), "bad").rest()
            assert answer.texts == []
            assert answer.error is not None
            assert detail in answer.error


@pytest.mark.usefixtures("neighbour")
def test_top_k_minus_1_is_all_tokens(server: ServeCommand) -> None:
    for _ in range(2):
        answer = ask(server, max_tokens=8, top_k=-1, temperature=1.0)
        assert answer.error is None
        assert answer.text == ask(server, max_tokens=8, temperature=1.0).text


@pytest.mark.usefixtures("neighbour")
def test_the_header_that_asks_for_grpc_errors_gives_them_and_breaks_nothing(server: ServeCommand) -> None:
    """One request a stream: with two, an error ends servers before 26.03."""
    for _ in range(2):
        inputs = make_inputs(PROMPT, max_tokens=0)
        answer = Stream(server.grpc_port, MODEL, inputs, "bad", headers={"triton_grpc_error": "true"}).rest()
        assert answer.error is not None
        assert "StatusCode.INVALID_ARGUMENT" in answer.error
        assert "INVALID_ARGUMENT id=bad max_tokens=0" in answer.error


@pytest.mark.usefixtures("neighbour")
def test_a_hundred_huge_prompts_at_once_are_refused(server: ServeCommand) -> None:
    for _ in range(2):
        inputs = make_inputs(b"x" * 400_000, max_tokens=4)
        streams = [Stream(server.grpc_port, MODEL, inputs, f"huge{number}") for number in range(100)]
        errors = [stream.rest().error for stream in streams]
        assert all("a prompt of 400000 bytes has at least" in str(error) for error in errors)


def test_a_stream_may_be_cancelled_before_its_first_token(server: ServeCommand) -> None:
    """With every session taken it waits, so there can be no token yet when it is cancelled."""
    before = counted(server, "cancelled")
    inputs = make_inputs(LONG_PROMPT, max_tokens=900, stream=True)
    taken = [Stream(server.grpc_port, MODEL, inputs, "taken") for _ in range(4)]
    assert all(stream.next(Answer()) for stream in taken)
    stream = Stream(server.grpc_port, MODEL, inputs, "waiting")
    wait_until(lambda: server.metrics()['dhs_sessions{state="waiting"}'] == 1)
    stream.close(cancel=True)
    wait_until(lambda: counted(server, "cancelled") == before + 1)
    for stream in taken:
        stream.close(cancel=True)
    wait_until(lambda: counted(server, "cancelled") == before + 5)


def test_a_stream_may_be_cancelled_between_any_two_tokens(server: ServeCommand) -> None:
    before = counted(server, "cancelled")
    for responses in range(1, 12):
        stream = Stream(server.grpc_port, MODEL, make_inputs(LONG_PROMPT, max_tokens=900, stream=True), "c")
        answer = Answer()
        for _ in range(responses):
            assert stream.next(answer)
        stream.close(cancel=True)
    wait_until(lambda: counted(server, "cancelled") == before + 11, seconds=60.0)


@pytest.mark.usefixtures("neighbour")
def test_requests_with_one_id_are_all_served(server: ServeCommand) -> None:
    inputs = make_inputs(PROMPT, max_tokens=24, stream=True)
    streams = [Stream(server.grpc_port, MODEL, inputs, "same") for _ in range(3)]
    texts = [stream.rest().text for stream in streams]
    assert set(texts) == {ask(server, max_tokens=24).text}


def test_two_thousand_requests_meet_a_queue_of_a_hundred(tmp_path: Path, endless_model: Path) -> None:
    options = [f"--model={endless_model}", "--max-sessions=4", f"--max-model-len={SERVER_MODEL_LEN}"]
    with ServeCommand(tmp_path, *options, "--queue-limit=100") as crowded:
        crowded.wait_ready()
        right = ask(crowded, max_tokens=3).text
        answers: list[tuple[str | None, str | None]] = []
        done = threading.Semaphore(0)

        def receive(result: Any, error: Any) -> None:
            text = result.as_numpy("text_output")[0, 0].decode() if result is not None else None
            answers.append((text, str(error) if error is not None else None))
            done.release()

        clients = [grpcclient.InferenceServerClient(f"{LOOPBACK}:{crowded.grpc_port}") for _ in range(8)]
        for client in clients:
            client.start_stream(receive)
        for number in range(2000):
            clients[number % 8].async_stream_infer(MODEL, make_inputs(PROMPT, max_tokens=3), request_id=f"r{number}")
        for _ in range(2000):
            assert done.acquire(timeout=120)
        for client in clients:
            client.stop_stream()
            client.close()
        served = [text for text, error in answers if error is None]
        refused = [error for _, error in answers if error is not None]
        assert len(answers) == 2000
        assert len(served) >= 100
        assert set(served) == {right}
        assert refused
        assert all("OVERLOADED id=r" in error and " retry_after_ms=" in error for error in refused)
        assert all("100 requests wait already; this deployment queues 100 (queue_limit)" in error for error in refused)
        wait_until(lambda: is_idle(crowded), seconds=30.0)
        assert counted(crowded, "overloaded") == len(refused)
        assert ask(crowded, max_tokens=3).text == right


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_stays_where_it_was_after_two_thousand_streams(server: ServeCommand) -> None:
    """Random cancels among them; the memory of the last 500 is compared with that of the 500 before."""
    chance = random.Random(0)
    stub = stub_of(server)
    held: list[int] = []
    for number in range(2000):
        inputs = make_inputs(PROMPT, max_tokens=chance.randint(1, 40), stream=True)
        stream = Stream(server.grpc_port, MODEL, inputs, f"s{number}")
        if chance.random() < 0.3:
            answer = Answer()
            for _ in range(chance.randint(0, 3)):
                if not stream.next(answer):
                    break
            stream.close(cancel=True)
        else:
            stream.rest()
        held.append(resident_bytes(stub))
    before, last = max(held[1000:1500]), max(held[1500:])
    assert abs(last - before) <= 0.02 * before, (before, last)
