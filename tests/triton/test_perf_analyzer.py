"""NVIDIA's own load generators against the shipped model, as they come. docs/profiling.md says how to get them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.server import LOOPBACK, ServeCommand
from tests.triton.clients import wait_until
from tests.triton.conftest import MODEL
from tests.triton.talk import PROMPT, ask, counted, is_idle
from trt_backend.build import find_model

REQUESTS = 16
TOKENS = 32
VARIABLES = {"perf_analyzer": "PERF_ANALYZER", "genai-perf": "GENAI_PERF"}
PROFILE_SECONDS = 300.0
"""genai-perf imports transformers first, which takes half a minute where all cores have work."""


def find_tool(name: str) -> Path:
    """The program that the tool's variable names, or the one on PATH; without one the test is skipped."""
    named = os.environ.get(VARIABLES[name], name)
    found = shutil.which(named)
    if found is None:
        pytest.skip(f"there is no {named}: put {name} on PATH or its path into {VARIABLES[name]} (docs/profiling.md)")
    tool = Path(found).absolute()
    tried = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=PROFILE_SECONDS)
    if tried.returncode != 0:
        pytest.skip(f"{tool} can't run here: {(tried.stderr or tried.stdout).strip()[-300:]}")
    return tool


def run_tool(command: Sequence[str | Path], path: Path | None = None) -> str:
    """What it printed, once it has ended well."""
    searched = f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"]
    environment = {**os.environ, "PATH": searched, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=PROFILE_SECONDS
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def requests_of(export: Path) -> list[dict[str, Any]]:
    """The requests of a profile with one experiment."""
    (experiment,) = json.loads(export.read_text())["experiments"]
    requests: list[dict[str, Any]] = experiment["requests"]
    return requests


def text_of(request: dict[str, Any]) -> str:
    return "".join(response["text_output"] for response in request["response_outputs"])


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: ServeCommand) -> Iterator[None]:
    """No session and no page, and no request that ended in an error."""
    failed = [counted(server, outcome) for outcome in ("invalid_argument", "internal", "overloaded")]
    yield
    wait_until(lambda: is_idle(server), seconds=30.0)
    assert [counted(server, outcome) for outcome in ("invalid_argument", "internal", "overloaded")] == failed


def test_perf_analyzer_measures_streams(server: ServeCommand, tmp_path: Path) -> None:
    tool = find_tool("perf_analyzer")
    prompts = [PROMPT.decode(), "class Queue:\n"]
    data = [{"text_input": [prompt], "max_tokens": [TOKENS], "stream": [True]} for prompt in prompts]
    (tmp_path / "inputs.json").write_text(json.dumps({"data": data}))
    export = tmp_path / "profile.json"
    command: list[str | Path] = [tool, "-m", MODEL, "-u", f"{LOOPBACK}:{server.grpc_port}", "-i", "grpc", "--streaming"]
    command += ["--async", "--input-data", tmp_path / "inputs.json", "--profile-export-file", export]
    command += ["--shape", "text_input:1", "--shape", "max_tokens:1", "--concurrency-range=2"]
    printed = run_tool([*command, f"--request-count={REQUESTS}", "--warmup-request-count=2"])
    assert f"Request count: {REQUESTS}" in printed
    requests = requests_of(export)
    assert len(requests) == REQUESTS
    right = {prompt: ask(server, prompt.encode(), max_tokens=TOKENS).text for prompt in prompts}
    assert [text_of(request) for request in requests] == [
        right[request["request_inputs"]["text_input"]] for request in requests
    ]
    assert all(len(request["response_timestamps"]) > 1 for request in requests)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("tensorrtllm", []), ("tensorrtllm", ["--output-tokens-mean-deterministic"]), ("vllm", [])],
    ids=["tensorrtllm", "tensorrtllm-deterministic", "vllm"],
)
def test_genai_perf_completes_a_profile(server: ServeCommand, tmp_path: Path, backend: str, options: list[str]) -> None:
    genai_perf, perf_analyzer = find_tool("genai-perf"), find_tool("perf_analyzer")
    # It runs `perf_analyzer` by that name, wherever PATH has it.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "perf_analyzer").symlink_to(perf_analyzer)
    command: list[str | Path] = [genai_perf, "profile", "-m", MODEL, "--endpoint-type=kserve", f"--backend={backend}"]
    command += ["--streaming", f"--url={LOOPBACK}:{server.grpc_port}", "--tokenizer", find_model(MODEL)]
    command += ["--synthetic-input-tokens-mean=64", f"--output-tokens-mean={TOKENS}", "--num-prompts=8"]
    command += [f"--request-count={REQUESTS}", "--warmup-request-count=2", "--concurrency=2"]
    printed = run_tool([*command, "--artifact-dir", tmp_path, *options], path=tmp_path / "bin")
    assert "LLM Metrics" in printed
    (folder,) = tmp_path.glob(f"{MODEL}-*")
    measured = json.loads((folder / "profile_export_genai_perf.json").read_text())
    assert measured["request_count"]["avg"] == REQUESTS
    assert 0 < measured["time_to_first_token"]["avg"] < measured["request_latency"]["avg"]
    # It counts tokens again from the text, which tokenises otherwise now and then where the text was drawn by chance.
    assert measured["output_sequence_length"]["avg"] == pytest.approx(TOKENS, rel=0.1)
    requests = requests_of(folder / "profile_export.json")
    assert len(requests) == REQUESTS
    for request in requests[:4]:
        wishes: dict[str, Any] = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in request["request_inputs"].items()
        }
        assert text_of(request) == ask(server, wishes.pop("text_input"), **wishes).text
