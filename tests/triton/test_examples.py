"""The programs in `examples/`, as a user would run them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server import LOOPBACK, ServeCommand, free_ports
from tests.triton.clients import wait_until
from tests.triton.talk import LONG_PROMPT, PROMPT, ask, counted, is_idle

EXAMPLES = Path(__file__).parents[2] / "examples"
STREAMING = ["stream_sync.py", "stream_async.py", "curl.sh"]
ALL = [*STREAMING, "curl.sh --whole"]
INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT)
"""A shell that an interrupt ends is ended by the signal itself."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ServeCommand) -> Iterator[None]:
    yield
    wait_until(lambda: is_idle(server), seconds=30.0)


def command_of(example: str, url: str, *options: str) -> list[str]:
    """How to run an example; skips the test where what it needs is not installed."""
    name, *own = example.split()
    if name.endswith(".py"):
        return [sys.executable, str(EXAMPLES / name), "--url", url, *options]
    missing = [program for program in ("bash", "curl", "jq") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}")
    return [str(EXAMPLES / name), *own, "--url", f"http://{url}", *options]


def command_to(server: ServeCommand, example: str, *options: str) -> list[str]:
    port = server.http_port if example.startswith("curl") else server.grpc_port
    return command_of(example, f"{LOOPBACK}:{port}", *options)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("example", ALL)
def test_an_example_prints_the_answer(server: ServeCommand, example: str) -> None:
    right = ask(server, max_tokens=24, temperature=0.9).text
    done = run(command_to(server, example, "--max-tokens", "24", "--temperature", "0.9", PROMPT.decode()))
    assert (done.stdout, done.stderr, done.returncode) == (right + "\n", "", 0)


@pytest.mark.parametrize("example", ALL)
def test_an_example_says_what_was_wrong(server: ServeCommand, example: str) -> None:
    for options, message in (
        (["--max-tokens", "0"], "max_tokens=0 is not legal; legal range: 1 to 2048 (max_model_len)"),
        (["--temperature", "-1"], "temperature=-1 is not legal"),
    ):
        done = run(command_to(server, example, *options, PROMPT.decode()))
        assert done.returncode not in (0, 2)
        assert done.stdout == ""
        assert done.stderr.startswith("error: INVALID_ARGUMENT id=")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = run(command_to(server, example, "--model", "nobody", PROMPT.decode()))
    assert done.returncode not in (0, 2)
    assert done.stderr == "error: Request for unknown model: 'nobody' is not found\n"


@pytest.mark.parametrize("example", ALL)
def test_an_example_says_that_there_is_no_server(example: str) -> None:
    done = run(command_of(example, f"{LOOPBACK}:{free_ports(1)[0]}", PROMPT.decode()))
    assert done.returncode not in (0, 2)
    assert done.stdout == ""
    assert "connect" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("example", STREAMING)
def test_ctrl_c_cancels_the_request(server: ServeCommand, example: str) -> None:
    before = counted(server, "cancelled")
    command = command_to(server, example, "--max-tokens", "900", LONG_PROMPT.decode())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.read(1) != ""  # long before the answer's end
        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=30)
    assert program.returncode in INTERRUPTED
    assert "Traceback" not in errors
    wait_until(lambda: counted(server, "cancelled") == before + 1)
