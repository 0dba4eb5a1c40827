"""The shipped model behind a real tritonserver, over gRPC streams and HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.server import LOOPBACK, ServeCommand
from tests.triton.clients import Answer, Stream, make_input, make_inputs, wait_until
from tests.triton.conftest import MODEL
from tests.triton.talk import LONG_PROMPT, PROMPT, ask, counted, is_idle
from trt_backend.triton.text import Tokenizer


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


def text_of(server: ServeCommand, **fields: Any) -> str:
    answer = ask(server, **fields)
    assert answer.error is None
    return answer.text


def test_both_names_of_a_wish_work(server: ServeCommand) -> None:
    assert len(ask(server, max_tokens=12, streaming=True).texts) > 1
    assert text_of(server, request_output_len=12) == text_of(server, max_tokens=12, min_length=3)


def test_prompts_as_token_ids_give_token_ids(server: ServeCommand, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT.decode()).tolist()
    inputs = make_inputs(None, input_ids=ids, input_lengths=len(ids), request_output_len=20)
    whole = Stream(server.grpc_port, MODEL, inputs).rest()
    (output_ids,), (length,) = whole.tensors("output_ids"), whole.tensors("sequence_length")
    assert (output_ids.shape, length.tolist()) == ((1, 20), [20])
    assert tokenizer.decode(output_ids[0].tolist()) == text_of(server, max_tokens=20)
    assert whole.texts == []
    streamed = Stream(server.grpc_port, MODEL, [*inputs, make_input("streaming", True)]).rest()
    pieces = streamed.tensors("output_ids")
    assert len(pieces) > 1
    assert np.concatenate([piece[0] for piece in pieces]).tolist() == output_ids[0].tolist()


def test_vllm_parameters_give_the_same_text_as_tensors(server: ServeCommand) -> None:
    parameters = json.dumps({"max_tokens": "24", "temperature": 0.9, "top_k": 20, "seed": 3}).encode()
    assert text_of(server, sampling_parameters=parameters) == text_of(
        server, max_tokens=24, temperature=0.9, top_k=20, seed=3
    )


def test_filters_change_what_is_drawn_and_one_token_is_greedy(server: ServeCommand) -> None:
    greedy = text_of(server, max_tokens=24)
    assert text_of(server, max_tokens=24, temperature=1.0, top_k=1) == greedy
    assert text_of(server, max_tokens=24, temperature=1.0, top_p=1e-6) == greedy
    assert text_of(server, max_tokens=24, temperature=1.0, min_p=1.0) == greedy
    assert text_of(server, max_tokens=24, temperature=1.0, top_k=-1, seed=1) == text_of(
        server, max_tokens=24, temperature=1.0, seed=1
    )
    assert text_of(server, max_tokens=24, repetition_penalty=1.5) != greedy


def test_stop_words_end_the_text_before_them_in_pieces_and_whole(server: ServeCommand) -> None:
    greedy = text_of(server, max_tokens=40)
    stop = greedy[17:20]
    wanted = greedy[: greedy.index(stop)]
    fields = {"max_tokens": 40, "stop_words": [stop.encode(), b"never to be seen"], "return_finish_reason": True}
    whole, streamed = ask(server, **fields), ask(server, **fields, stream=True)
    assert whole.text == streamed.text == wanted
    assert [reason.tolist() for reason in streamed.tensors("finish_reason")] == [[b"stop"]]
    assert streamed.finals[-1] is True
    kept = json.dumps({"max_tokens": 40, "temperature": 0, "stop": stop, "include_stop_str_in_output": True})
    assert text_of(server, sampling_parameters=kept.encode()) == wanted + stop


def test_bad_words_never_come(server: ServeCommand) -> None:
    greedy = text_of(server, max_tokens=40)
    word = next(word for word in greedy.split() if word.isalpha())
    assert word not in text_of(server, max_tokens=40, bad_words=[word.encode()])


def test_a_prompt_is_echoed_if_the_client_wants_it(server: ServeCommand) -> None:
    greedy = text_of(server, max_tokens=12)
    for stream in (False, True):
        echoed = text_of(server, max_tokens=12, exclude_input_in_output=False, stream=stream)
        assert echoed == PROMPT.decode() + greedy


def test_log_probabilities_and_usage_come_with_the_answer(server: ServeCommand, tokenizer: Tokenizer) -> None:
    flags = ("log_probs", "logprobs", "cumulative_logprob", "num_input_tokens", "num_output_tokens", "perf_metrics")
    before = time.time_ns()
    answer = ask(server, max_tokens=12, stream=True, **{f"return_{flag}": True for flag in flags})
    logprobs = np.concatenate([tensor[0] for tensor in answer.tensors("output_log_probs")])
    assert len(logprobs) == 12
    assert (logprobs < 0).all()
    assert answer.tensors("cum_log_probs")[-1][0] == pytest.approx(logprobs.sum(), rel=1e-5)
    assert answer.tensors("cumulative_logprob")[-1][0] == answer.tensors("cum_log_probs")[-1][0]
    described = [entry for tensor in answer.tensors("logprobs") for entry in json.loads(tensor[0])]
    assert [next(iter(entry.values()))["rank"] for entry in described] == [1] * 12
    assert answer.tensors("num_input_tokens")[0].tolist() == [len(tokenizer.encode(PROMPT.decode()))]
    assert sum(int(tensor[0]) for tensor in answer.tensors("num_output_tokens")) == 12
    stations = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [int(answer.tensors(f"{name}_time_ns")[0][0]) for name in stations]
    course = [before, *times, time.time_ns()]
    assert course == sorted(course)
    assert answer.tensors("kv_cache_alloc_new_blocks")[0][0] > 0


def test_a_prompt_is_scored_as_its_continuation_was(server: ServeCommand, tokenizer: Tokenizer) -> None:
    """Log-probabilities of generated tokens equal those of the same tokens as part of a prompt."""
    ids = tokenizer.encode(LONG_PROMPT.decode()).tolist()
    inputs = make_inputs(None, input_ids=ids, max_tokens=30, return_log_probs=True)
    generated = Stream(server.grpc_port, MODEL, inputs).rest()
    new = generated.tensors("output_ids")[0][0].tolist()
    assert len(new) == 30
    scored = Stream(
        server.grpc_port, MODEL, make_inputs(None, input_ids=ids + new, max_tokens=0, return_prompt_log_probs=True)
    ).rest()
    scores = scored.tensors("prompt_log_probs")[0][0]
    assert len(scores) == len(ids) + len(new) - 1
    assert scores[-len(new) :].tolist() == generated.tensors("output_log_probs")[0][0].tolist()


def test_a_request_is_stopped_by_another_with_its_id(server: ServeCommand) -> None:
    before = counted(server, "cancelled")
    running = Stream(server.grpc_port, MODEL, make_inputs(PROMPT, max_tokens=900, stream=True), "long")
    neighbour = Stream(server.grpc_port, MODEL, make_inputs(PROMPT, max_tokens=30, stream=True), "other")
    answer = Answer()
    assert running.next(answer)
    stop = Stream(server.grpc_port, MODEL, make_inputs(None, stop=True), "long").rest()
    assert (stop.error, stop.texts, stop.finals) == (None, [""], [True])
    while running.next(answer):
        pass
    running.close(cancel=False)
    assert answer.error is not None
    assert "CANCELLED id=long cancelled after" in answer.error
    assert neighbour.rest().text == text_of(server, max_tokens=30)
    wait_until(lambda: counted(server, "cancelled") == before + 1)


def test_a_deadline_ends_a_request_whether_it_is_a_tensor_or_tritons_timeout(server: ServeCommand) -> None:
    for _ in range(2):
        answer = ask(server, LONG_PROMPT, request_id="late", max_tokens=900, deadline_ms=1)
        assert answer.error is not None
        assert "DEADLINE_EXCEEDED id=late deadline_ms=1 has passed" in answer.error
    inputs = make_inputs(LONG_PROMPT, max_tokens=900, stream=True)
    timed = Stream(server.grpc_port, MODEL, inputs, "timed", timeout=300_000).rest()
    assert timed.error is not None
    assert "DEADLINE_EXCEEDED id=timed deadline_ms=300 has passed: " in timed.error


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ServeCommand) -> Any:
    """After every test the server is as it was: no session, no page, and still alive."""
    yield
    wait_until(lambda: is_idle(server), seconds=30.0)
    assert server.process.poll() is None
