"""`trt-backend serve` as an operator meets it: what it refuses, what it says, how it stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.server import ServeCommand, free_ports
from tests.triton.clients import Answer, Stream, make_inputs
from tests.triton.conftest import MODEL
from trt_backend.build import find_model
from trt_backend.triton.process import SHM_FOLDER


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the shipped model, to be damaged."""
    return shutil.copytree(find_model(MODEL), tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.csv", "*.png"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def regions_of(command: ServeCommand) -> list[Path]:
    return list(SHM_FOLDER.glob(f"dhs_{os.getuid()}_{command.http_port}_*"))


def refusal(state_dir: Path, *options: str) -> str:
    """What a server that must not start prints; it leaves nothing behind."""
    with ServeCommand(state_dir, *options) as command:
        assert command.wait_exit() == 1, command.output
    assert "ready:" not in command.output
    assert "Traceback" not in command.output
    assert regions_of(command) == []
    return command.output


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def truncate(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(b"\\xff" * 64 + path.read_bytes()[64:])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, r"model\S*\.safetensors"),
        (corrupt, r"model\S*\.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json: the tokenizer is missing"),
    ],
    ids=["truncated shard", "corrupt shard", "no tokenizer"],
)
def test_a_damaged_checkpoint_is_refused_with_the_files_name(
    tmp_path: Path, checkpoint: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(checkpoint)
    output = refusal(tmp_path, f"--model={checkpoint}")
    assert re.search(rf"error: the model refused to start\n{re.escape(str(checkpoint))}/{named}", output), output
    assert str(tmp_path / "checkpoint-") in output  # where the server's log is


def test_a_wrong_value_in_the_models_config_is_refused_with_key_and_range(tmp_path: Path, checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", index_topk=0)
    output = refusal(tmp_path, f"--model={checkpoint}")
    assert f"{checkpoint}/config.json: index_topk=0: Input should be greater than or equal to 1" in output


def test_a_wrong_value_in_the_deployments_file_is_refused_with_key_and_range(tmp_path: Path) -> None:
    file = tmp_path / "deployment.json"
    file.write_text(json.dumps({"model": MODEL, "max_sessions": 0}))
    output = refusal(tmp_path, f"--config={file}")
    assert f"error: {file}: max_sessions=0: Input should be greater than or equal to 1; legal: 1 to 4096" in output


def test_a_size_that_does_not_fit_the_model_is_refused_with_its_range(tmp_path: Path) -> None:
    output = refusal(tmp_path, f"--model={MODEL}", "--max-model-len=9000")
    assert "max_model_len=9000 is not legal for this model and residency; legal range: 2 to 8192" in output


def test_a_pool_too_small_for_one_session_is_refused_with_its_range(tmp_path: Path) -> None:
    output = refusal(tmp_path, f"--model={MODEL}", "--device-pages=1")
    assert re.search(r"device_pages=1 is not legal .*; legal range: \d+ and up", output), output


def test_a_stop_lets_running_streams_finish_and_leaves_nothing_behind(tmp_path: Path, endless_model: Path) -> None:
    options = [f"--model={endless_model}", "--max-sessions=2", "--max-model-len=1024", "--model-name=tiny.v1"]
    with ServeCommand(tmp_path, *options) as command:
        command.wait_ready()
        stream = Stream(command.grpc_port, "tiny.v1", make_inputs(b"import os\n", max_tokens=60, stream=True))
        answer = Answer()
        assert stream.next(answer)
        command.process.terminate()
        while stream.next(answer):
            pass
        stream.close(cancel=False)
        assert command.wait_exit() == 0, command.output
    assert answer.error is None
    assert answer.finals[-1] is True
    assert regions_of(command) == []
    assert command.lines[-2:] == ["stopping tritonserver", "stopped"]
    log = (tmp_path / f"tiny.v1-{command.http_port}" / "server.log").read_text()
    assert "successfully unloaded 'tiny.v1'" in log


def test_a_stop_during_start_up_is_obeyed_however_often_it_is_asked_for(tmp_path: Path) -> None:
    with ServeCommand(tmp_path, f"--model={MODEL}") as command:
        while not any("starting tritonserver" in line for line in command.lines):
            assert command.process.poll() is None, command.output
        for _ in range(100):  # by people who can't wait
            command.process.terminate()
            command.process.send_signal(signal.SIGINT)
        assert command.wait_exit() == 0
    assert "ready:" not in command.output
    assert regions_of(command) == []


def test_a_server_whose_output_nobody_reads_any_more_still_stops_in_order(tmp_path: Path) -> None:
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    command = [sys.executable, "-m", "trt_backend.cli", "serve", f"--model={MODEL}", f"--state-dir={tmp_path}"]
    command += ["--max-sessions=2", "--max-model-len=1024", *(f"--{name}-port={port}" for name, port in ports.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith("ready:") for line in process.stdout)
        process.stdout.close()
        process.terminate()
        process.wait(60.0)
    finally:
        process.kill()
    log = (tmp_path / f"{MODEL}-{ports['http']}" / "server.log").read_text()
    assert f"successfully unloaded '{MODEL}'" in log
    assert list(SHM_FOLDER.glob(f"dhs_{os.getuid()}_{ports['http']}_*")) == []
