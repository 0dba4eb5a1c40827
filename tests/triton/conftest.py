"""What several tests of this folder share: the shipped tokenizer, and one real server over the shipped model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server import ServeCommand
from trt_backend.build import find_model
from trt_backend.models.registry import read_config
from trt_backend.triton.text import Tokenizer

MODEL = "glm53-tiny"
SERVER_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the shipped model."""
    folder = find_model(MODEL)
    return Tokenizer.load(folder, read_config(folder).vocab_size)


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model without end ids: every answer is as long as it may be, whatever the model has learnt to say."""
    folder = shutil.copytree(
        find_model(MODEL), tmp_path_factory.mktemp("models") / MODEL, ignore=shutil.ignore_patterns("generation_*")
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, endless_model: Path) -> Iterator[ServeCommand]:
    """`trt-backend serve` with a small pool, for all tests that leave it as they found it."""
    options = [f"--model={endless_model}", "--residency=hisparse", "--max-sessions=4"]
    options += [f"--max-model-len={SERVER_MODEL_LEN}", "--queue-limit=8"]
    options += ["--canary-seconds=3600"]  # tests count pages and steps
    with ServeCommand(tmp_path_factory.mktemp("server"), *options) as command:
        command.wait_ready()
        yield command
