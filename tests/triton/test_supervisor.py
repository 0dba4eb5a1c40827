"""What becomes of a server whose model dies, hangs or fails, and of its clients."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from loadtest.server import ServeCommand
from tests.triton.clients import Answer, Stream, make_inputs, wait_until
from tests.triton.echo import make_server, refusal_file, regions, serving, stub_of
from trt_backend.triton.canary import Canary, HttpDoor
from trt_backend.triton.launcher import ServerError, TritonServer
from trt_backend.triton.process import SHM_FOLDER, children_of, command_of
from trt_backend.triton.repository import StartupEvent, write_event
from trt_backend.triton.stall import StallWatch
from trt_backend.triton.supervisor import Event, EventKind, Supervisor

NOTICED_SECONDS = 5.0
"""How soon the clients of a dead model must know."""


def break_off(stream: Stream, pid: int, number: signal.Signals) -> float:
    """Send a signal to the model's process while a stream runs; how many seconds later that ended with an error."""
    answer = Answer()
    assert stream.next(answer)
    os.kill(pid, number)
    killed = time.monotonic()
    while stream.next(answer):
        pass
    stream.close(cancel=False)
    assert answer.error is not None
    return time.monotonic() - killed


def test_a_crashed_model_is_restarted_and_the_third_crash_within_a_minute_ends_serve_with_the_reason(
    tmp_path: Path, endless_model: Path
) -> None:
    options = [f"--model={endless_model}", "--model-name=m", "--max-sessions=2", "--max-model-len=2048"]
    options += ["--log-format=json", "--restart-backoff-seconds=0.1"]
    with ServeCommand(tmp_path, *options) as command:
        log = tmp_path / f"m-{command.http_port}" / "server.log"
        for crash, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL), start=1):
            command.wait_line("ready:", crash)
            short = Stream(command.grpc_port, "m", make_inputs(b"import os\n", max_tokens=3)).rest()
            assert short.error is None
            (server,) = [child for child in children_of(command.process.pid) if "tritonserver" in command_of(child)]
            stub = stub_of(server)
            stream = Stream(command.grpc_port, "m", make_inputs(b"import os\n", max_tokens=2000, stream=True))
            assert break_off(stream, stub, number) < NOTICED_SECONDS
        assert command.wait_exit() == 1
    assert (
        "error: crash 3 within 60 s of serving (max_restarts=2, restart_window_seconds=60): giving up" in command.output
    )
    # 2.51 sometimes aborts when it loses its model in the middle of a request.
    assert re.search(r"the reason: (the model's process has ended|tritonserver ended with code -6)", command.output)
    assert [line for line in command.lines if line.startswith("restart ")] == [
        "restart 1 in 0.1 s (1 of 2 within 60 s)",
        "restart 2 in 0.2 s (2 of 2 within 60 s)",
    ]
    assert log.read_text(errors="replace").count('"event": "restarting"') == 2
    assert log.read_text(errors="replace").count("Started GRPCInferenceService") == 3
    assert list(SHM_FOLDER.glob(f"dhs_{os.getuid()}_{command.http_port}_*")) == []
    wait_until(lambda: not command_of(stub) and not command_of(server))


def test_a_model_that_hangs_or_records_a_failure_is_restarted_and_nothing_is_left_behind(tmp_path: Path) -> None:
    threads = threading.active_count()
    server, folder = make_server(
        tmp_path, canary_seconds=0.2, canary_timeout_seconds=2.0, restart_backoff_seconds=0.1, max_restarts=5
    )
    events: list[Event] = []
    stopping = threading.Event()

    def serve() -> None:  # the server ends with the thread that started it
        Supervisor(server, events.append).run(stopping)
        server.stop(lambda _: None)

    def ready(count: int) -> bool:
        return [event.kind for event in events].count(EventKind.READY) == count

    thread = threading.Thread(target=serve)
    thread.start()
    wait_until(lambda: ready(1), seconds=30.0)
    stub = stub_of(server.pid)
    stream = Stream(server.config.grpc_port, "echo", make_inputs(b"for ever", stream=True))
    assert break_off(stream, stub, signal.SIGSTOP) < NOTICED_SECONDS
    wait_until(lambda: ready(2), seconds=30.0)
    write_event(folder.record, StartupEvent("no step for 61 s with 3 running, 7 waiting", failed=True))
    wait_until(lambda: ready(3), seconds=30.0)
    assert Stream(server.config.grpc_port, "echo", make_inputs(b"x")).rest().text == "x"
    stopping.set()
    thread.join(30.0)
    reasons = [event.fields["reason"] for event in events if event.kind is EventKind.RESTARTING]
    assert len(reasons) == 2
    assert reasons[0].startswith("no canary has had a good answer for 2.")
    assert "(canary_timeout_seconds=2)" in reasons[0]
    assert reasons[1] == "no step for 61 s with 3 running, 7 waiting"
    assert [event.fields["restarts"] for event in events if event.kind is EventKind.READY] == [0, 1, 2]
    assert regions(server) == []
    assert not command_of(stub)
    wait_until(lambda: threading.active_count() <= threads)


def test_a_model_that_never_was_ready_is_not_tried_again(tmp_path: Path) -> None:
    server, _ = make_server(tmp_path, "raise ValueError('no such luck')")
    events: list[Event] = []
    with pytest.raises(ServerError, match="no such luck"):
        Supervisor(server, events.append).run(threading.Event())
    assert [event.kind for event in events] == [EventKind.STARTED]
    assert server.pid is None


def look_until_answered(canary: Canary) -> str | None:
    """The verdict on the next canary."""
    deadline = time.monotonic() + 5.0
    while canary._connection is None:
        assert canary.look() is None
    while canary._connection is not None:
        assert time.monotonic() < deadline
        fault = canary.look()
    return fault


def test_a_canary_refused_for_overload_means_alive_and_another_error_does_not(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        config = server.config.model_copy(update={"canary_seconds": 0.1, "canary_timeout_seconds": 1.0})
        canary = Canary(HttpDoor(config, ""), "echo", config)
        assert canary.first(5.0) is None
        refusal = refusal_file(server._folder)
        for message in ("OVERLOADED id=dhs-canary 8 wait (queue_limit)", "DEADLINE_EXCEEDED id=dhs-canary 500 ms"):
            refusal.write_text(message)
            assert look_until_answered(canary) is None
        refusal.write_text("INTERNAL id=dhs-canary a fault")
        assert look_until_answered(canary) == "INTERNAL id=dhs-canary a fault"
        time.sleep(config.canary_timeout_seconds)
        with pytest.raises(TimeoutError, match="the last one: INTERNAL id=dhs-canary a fault"):
            canary.look()
        canary.close()


def test_a_scheduler_that_stands_still_with_work_is_a_stall_told_once() -> None:
    steps, load = 5, (0, 0)
    told: list[str] = []
    watch = StallWatch(lambda: steps, lambda: load, 0.05, told.append)

    def look_after_a_while() -> list[str]:
        watch.look()
        time.sleep(0.06)
        watch.look()
        return told

    assert look_after_a_while() == []  # nothing to do
    load = (3, 7)
    assert look_after_a_while() == ["no step for 0 s with 3 running, 7 waiting (stall_seconds=0.05)"]
    assert len(look_after_a_while()) == 1
    steps += 1
    watch.look()
    assert len(told) == 1
    assert len(look_after_a_while()) == 2


def test_what_a_server_was_told_to_do_is_in_its_environment_without_the_operators_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DHS_SERVER_ADMIN_KEY", "a-secret-of-the-operator")

    def environment(server: TritonServer) -> str:
        return Path(f"/proc/{server.pid}/environ").read_text()

    with serving(tmp_path, log_format="json") as server:
        assert "TRT_BACKEND_LOG_FORMAT=json" in environment(server)
        assert "DHS_" not in environment(server)
