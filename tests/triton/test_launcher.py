"""The launcher against a real tritonserver with a small model of the test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.triton.clients import Stream, make_inputs, wait_until
from tests.triton.echo import make_server, regions, stub_of, write_model
from trt_backend.config import LOOPBACK, ConfigError, DeploymentConfig, ServerConfig
from trt_backend.triton.launcher import ServerError, TritonServer
from trt_backend.triton.locate import STUB, find_server
from trt_backend.triton.ports import free_ports
from trt_backend.triton.process import SHM_FOLDER, children_of, command_of, sweep_regions
from trt_backend.triton.repository import RunFolder, StartupEvent, make_run_folder, write_event


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[tuple[TritonServer, RunFolder]]:
    server, folder = make_server(tmp_path)
    server.start()
    try:
        server.wait_ready(lambda _: None, threading.Event())
        yield server, folder
    finally:
        server.stop(lambda _: None)


def test_a_stopped_server_has_finalized_its_model_and_left_no_shared_memory(
    echo: tuple[TritonServer, RunFolder],
) -> None:
    server, folder = echo
    server.check()
    assert len(regions(server)) == 1
    assert server.stop(lambda _: None) is True
    assert "finalized" in folder.log.read_text()
    assert regions(server) == []


def test_it_listens_on_loopback_only(echo: tuple[TritonServer, RunFolder]) -> None:
    server, _ = echo
    ports = set(server.config.ports().values())
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            host, port = address.split(":")
            if state == "0A" and int(port, 16) in ports:
                listening.append((host[-8:], int(port, 16)))
                assert host[:-8] in ("", "0000000000000000FFFF0000")  # IPv4, plain or inside IPv6
    assert sorted(listening) == sorted(("0100007F", port) for port in ports)


def test_the_death_of_the_models_process_is_noticed(echo: tuple[TritonServer, RunFolder]) -> None:
    server, _ = echo
    Stream(server.config.grpc_port, "echo", make_inputs(b"please die")).rest()
    with pytest.raises(ServerError, match="the model's process has ended"):
        server.check()


def test_a_model_that_records_a_failure_while_it_serves_is_noticed(echo: tuple[TritonServer, RunFolder]) -> None:
    server, folder = echo
    write_event(folder.record, StartupEvent("the scheduler has failed: out of pages", failed=True))
    with pytest.raises(ServerError, match=r"^the scheduler has failed: out of pages$"):
        server.check()


def test_a_request_that_the_core_refused_does_not_keep_the_server_from_stopping(
    echo: tuple[TritonServer, RunFolder],
) -> None:
    server, _ = echo
    answer = Stream(server.config.grpc_port, "echo", make_inputs(b"x", max_tokens=(1, "INT64"))).rest()
    assert answer.error is not None
    assert "data-type is 'INT64'" in answer.error
    assert Stream(server.config.grpc_port, "echo", make_inputs(b"y", max_tokens=1)).rest().text == "y"
    started = time.monotonic()
    server.stop(lambda _: None)
    assert time.monotonic() - started < 10
    assert regions(server) == []


def test_a_server_killed_outright_leaves_no_process_and_no_shared_memory(
    echo: tuple[TritonServer, RunFolder],
) -> None:
    server, _ = echo
    assert server.pid is not None
    stub = stub_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not children_of(server.pid or 0))
    with pytest.raises(ServerError, match="ended with code -9"):
        server.check()
    server.stop(lambda _: None)
    assert regions(server) == []
    wait_until(lambda: STUB not in command_of(stub))


def test_the_server_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path / "template")
    ports = dict(zip(ServerConfig().ports(), free_ports(3), strict=True))
    script = f"""
import threading, time
from pathlib import Path
from trt_backend.config import DeploymentConfig, ServerConfig
from trt_backend.triton.launcher import TritonServer
from trt_backend.triton.locate import find_server
from trt_backend.triton.repository import make_run_folder
here = Path({str(tmp_path)!r})
folder = make_run_folder(here / "run", "echo", DeploymentConfig(), here / "template")
server = TritonServer(find_server(), folder, "echo", ServerConfig(**{ports}, drain_seconds=2.0))
server.start()
server.wait_ready(lambda _: None, threading.Event())
print(server.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server_pid = int(launcher.stdout.readline())
    assert "tritonserver" in command_of(server_pid)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: "tritonserver" not in command_of(server_pid), seconds=15.0)
    assert sweep_regions(f"dhs_{os.getuid()}_{ports['http_port']}_") == []


def test_the_models_reason_for_refusing_reaches_the_operator(tmp_path: Path) -> None:
    body = """
from pathlib import Path
from trt_backend.triton.repository import StartupEvent, write_event
record = Path(os.environ["TRT_BACKEND_STARTUP_RECORD"])
write_event(record, StartupEvent("reading weights"))
write_event(record, StartupEvent("config.json: top_k=0: legal range: 1 and up", failed=True))
raise pb_utils.TritonModelException("refused")
"""
    server, _ = make_server(tmp_path, body)
    server.start()
    seen: list[str] = []
    with pytest.raises(ConfigError, match=r"^config\.json: top_k=0: legal range: 1 and up$"):
        server.wait_ready(seen.append, threading.Event())
    server.stop(lambda _: None)
    assert seen == ["starting tritonserver", "reading weights"]


def test_a_model_that_crashes_while_loading_shows_the_end_of_the_log(tmp_path: Path) -> None:
    server, folder = make_server(tmp_path, "raise ValueError('no such luck')")
    server.start()
    with pytest.raises(ServerError, match="no such luck") as caught:
        server.wait_ready(lambda _: None, threading.Event())
    server.stop(lambda _: None)
    assert str(folder.log) in str(caught.value)


def test_a_taken_port_is_named_with_its_option(tmp_path: Path) -> None:
    server, _ = make_server(tmp_path)
    with socket.socket() as taken:
        taken.bind((str(LOOPBACK), server.config.metrics_port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"server\.metrics_port={server.config.metrics_port}: can't listen"):
            server.start()


def test_two_ports_may_not_be_the_same(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run", "echo", DeploymentConfig(), write_model(tmp_path / "template"))
    server = TritonServer(find_server(), folder, "echo", ServerConfig(http_port=9000, metrics_port=9000))
    with pytest.raises(ConfigError, match=r"server\.metrics_port=9000: already used by server\.http_port"):
        server.start()


def test_a_named_server_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tritonserver=.*/nothing: not an executable file"):
        find_server(tmp_path / "nothing")


def test_a_region_in_use_is_not_swept(echo: tuple[TritonServer, RunFolder]) -> None:
    server, _ = echo
    stale = SHM_FOLDER / f"{server.region_prefix}left-behind"
    stale.write_bytes(b"x")
    live = [region for region in regions(server) if region != stale]
    assert sweep_regions(server.region_prefix) == [stale]
    assert regions(server) == live
