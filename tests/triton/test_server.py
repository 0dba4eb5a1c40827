"""The shipped model behind a real tritonserver, over gRPC streams and HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from loadtest.server import LOOPBACK, ServeCommand
from tests.triton.clients import Answer, Stream, make_inputs, wait_until
from tests.triton.conftest import MODEL

PROMPT = b"import os\n\n\ndef main(argv):\n"
LONG_PROMPT = Path(textwrap.__file__).read_bytes()[:3000]
"""The beginning of a module, with more history than a selection has rows."""


def ask(server: ServeCommand, text: bytes = PROMPT, request_id: str = "", **fields: Any) -> Answer:
    return Stream(server.grpc_port, MODEL, make_inputs(text, **fields), request_id).rest()


def counted(server: ServeCommand, outcome: str) -> float:
    return server.metrics().get(f'dhs_requests_total{{outcome="{outcome}"}}', 0.0)


def is_idle(server: ServeCommand) -> bool:
    """No session, every page free."""
    now = server.metrics()
    sessions = sum(value for name, value in now.items() if name.startswith("dhs_sessions"))
    held = sum(now[f'dhs_pages{{state="{state}"}}'] for state in ("required", "optional", "in_transit"))
    return sessions == 0 and held == 0 and now['dhs_host_pages{state="used"}'] == 0


def test_streamed_pieces_are_the_whole_answer_and_the_last_one_is_final(server: ServeCommand) -> None:
    whole = ask(server, max_tokens=24)
    streamed = ask(server, max_tokens=24, stream=True)
    assert len(whole.texts) == 1
    assert whole.finals == [True]
    assert len(streamed.texts) > 1
    assert all(streamed.texts[:-1])
    assert streamed.finals == [False] * (len(streamed.texts) - 1) + [True]
    assert streamed.text == whole.text


def test_http_gives_the_same_answer(server: ServeCommand) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, server.http_port, timeout=30)
    body = json.dumps({"text_input": PROMPT.decode(), "max_tokens": 24})
    connection.request("POST", f"/v2/models/{MODEL}/generate", body)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["text_output"] == ask(server, max_tokens=24).text


def test_the_seed_decides_a_sampled_answer(server: ServeCommand) -> None:
    first, again, other = (ask(server, max_tokens=24, temperature=1.0, seed=seed).text for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_answers_do_not_depend_on_who_else_is_served(server: ServeCommand) -> None:
    prompts = [PROMPT, LONG_PROMPT, b"class Queue:\n", b"for x in "]
    alone = [ask(server, prompt, max_tokens=16).text for prompt in prompts]
    streams = [
        Stream(server.grpc_port, MODEL, make_inputs(prompt, max_tokens=16, stream=True), f"n{number}")
        for number, prompt in enumerate(prompts)
    ]
    assert [stream.rest().text for stream in streams] == alone


def test_a_cancelled_stream_gives_its_session_back(server: ServeCommand) -> None:
    before = counted(server, "cancelled")
    stream = Stream(server.grpc_port, MODEL, make_inputs(LONG_PROMPT, max_tokens=700, stream=True))
    answer = Answer()
    assert stream.next(answer)
    wait_until(lambda: not is_idle(server))
    stream.close(cancel=True)
    wait_until(lambda: counted(server, "cancelled") == before + 1)
    wait_until(lambda: is_idle(server))


def test_a_client_that_dies_gives_its_session_back(server: ServeCommand) -> None:
    before = counted(server, "cancelled")
    script = (
        "from tests.triton.clients import *\n"
        f"s = Stream({server.grpc_port}, {MODEL!r}, make_inputs({LONG_PROMPT!r}, max_tokens=700, stream=True))\n"
        "s.next(Answer()); print('first', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    assert client.stdout is not None
    assert client.stdout.readline() == "first\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    wait_until(lambda: counted(server, "cancelled") == before + 1)
    wait_until(lambda: is_idle(server))


BAD_INPUTS: list[tuple[bytes, dict[str, Any], str]] = [
    (b"", {"max_tokens": 4}, "text_input is empty"),
    (b"ab\xff", {"max_tokens": 4}, "text_input is not UTF-8: byte 2 of 3 is 0xff"),
    (PROMPT, {"max_tokens": 0}, "max_tokens=0 is not legal; legal range: 1 to 2048"),
    (PROMPT, {"max_tokens": -1}, "max_tokens=-1 is not legal"),
    (PROMPT, {"temperature": -1.0}, "temperature=-1 is not legal"),
    (PROMPT, {"temperature": float("nan")}, "temperature=nan is not legal"),
    (PROMPT, {"max_tokens": 9000}, "this deployment holds 2048 (max_model_len)"),
    (b"x" * 200_000, {"max_tokens": 4}, "a prompt of 200000 bytes has at least"),
    (PROMPT, {"max_tokens": 4, "shape": [1, 2]}, "text_input has shape [1, 2]; it must have exactly 1 element"),
]


def test_bad_inputs_are_refused_every_time_and_neighbours_go_on(server: ServeCommand) -> None:
    alone = ask(server, LONG_PROMPT, max_tokens=60).text
    neighbour = Stream(server.grpc_port, MODEL, make_inputs(LONG_PROMPT, max_tokens=60, stream=True), "neighbour")
    for number, (text, fields, detail) in enumerate(BAD_INPUTS * 2):
        answer = ask(server, text, request_id=f"bad{number}", **fields)
        assert answer.texts == []
        assert answer.error is not None
        assert f"INVALID_ARGUMENT id=bad{number} " in answer.error
        assert detail in answer.error
    assert neighbour.rest().text == alone


def test_two_requests_with_one_id_are_both_served(server: ServeCommand) -> None:
    inputs = make_inputs(PROMPT, max_tokens=24, stream=True)
    streams = [Stream(server.grpc_port, MODEL, inputs, "same") for _ in range(2)]
    first, second = (stream.rest() for stream in streams)
    assert first.error is None
    assert first.text == second.text != ""


def test_a_full_queue_refuses_at_once_and_the_others_are_served(server: ServeCommand) -> None:
    """4 sessions and 8 places in the queue: of 14 requests that come together 8 to 12 are taken."""
    streams = [
        Stream(server.grpc_port, MODEL, make_inputs(PROMPT, max_tokens=40), f"q{number}") for number in range(14)
    ]
    answers = [stream.rest() for stream in streams]
    refused = [answer.error for answer in answers if answer.error is not None]
    assert 2 <= len(refused) <= 6
    assert all("OVERLOADED id=q" in error and "(queue_limit)" in error for error in refused)
    assert {answer.text for answer in answers if answer.error is None} == {ask(server, max_tokens=40).text}


def test_metrics_count_rows_tokens_and_outcomes(server: ServeCommand) -> None:
    wait_until(lambda: is_idle(server))
    before = server.metrics()
    done = counted(server, "length")
    ask(server, LONG_PROMPT, max_tokens=40, stream=True)
    wait_until(lambda: counted(server, "length") == done + 1)
    now = server.metrics()
    grown = {name: value - before.get(name, 0.0) for name, value in now.items()}
    assert grown["dhs_generated_tokens_total"] == 40
    rows = {s: grown[f'dhs_resolver_rows_total{{source="{s}"}}'] for s in ("direct", "hot", "host", "padding")}
    # Each token but the first, which comes out of the prompt itself, selects 64 rows in each index group.
    assert sum(rows.values()) % (39 * 64) == 0
    assert rows["padding"] == 0
    assert rows["direct"] > 0
    assert rows["host"] > 0
    assert now['dhs_resolver_rows_total{source="masked"}'] == 0
    assert grown["dhs_backed_up_pages_total"] > 0


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ServeCommand) -> Any:
    """After every test the server is as it was: no session, no page, and still alive."""
    yield
    wait_until(lambda: is_idle(server), seconds=30.0)
    assert server.process.poll() is None
